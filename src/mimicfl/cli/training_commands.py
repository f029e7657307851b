"""The commands that train: their options."""

from .commands import Commands, Later
from .options import add_settings

NAMES = "names of algorithms ('mimicfl run --help' lists them)"
benchmark, paper, sweeping, train = map(Later, ("benchmark", "paper", "sweeping", "train"))


def add_training(commands: Commands) -> None:
    """`demo`, `run`, `compare`, `sweep`, `resume`, `benchmark run`, `reproduce` and `track`."""
    p = commands.add("demo", "compare five algorithms under heavy dropouts, on handwritten digits, in about ten seconds", "mimicfl demo")
    p.add_argument("--out", help="folder for the runs and the report (default runs/demo)", metavar="DIR")
    p.set_defaults(call=train.demo)

    p = commands.add(
        "run",
        "train one algorithm",
        "mimicfl run --dataset digits --algorithm mimic --availability time-varying:0.3 --rounds 60 --seed 3 --out runs/first",
        "mimicfl run experiment.toml --rounds 50",
        "mimicfl run experiment.toml --ray auto",
    )
    p.add_argument("file", nargs="?", help="settings in TOML; command-line options override them", metavar="FILE.toml")
    p.add_argument("--out", help="run folder (default runs/ALGORITHM-DATASET-...); an interrupted run in it resumes", metavar="DIR")
    p.add_dry_run()
    p.add_ray()
    p.add_track()
    add_settings(p)
    p.set_defaults(call=train.run)

    p = commands.add(
        "compare",
        "train several algorithms and seeds on the same splits, availability and initial models",
        "mimicfl compare --algorithms fedavg mifa mimic --seeds 3 --availability bounded:50",
        "mimicfl compare experiment.toml --algorithms fedprox:mu=0.01 fedprox:mu=0.1 --seeds 4,7",
    )
    p.add_argument("file", nargs="?", help="settings in TOML; command-line options override them", metavar="FILE.toml")
    p.add_argument("--algorithms", nargs="+", help=f"{NAMES}; default: the five of the paper", metavar="SPEC")
    p.add_argument("--seeds", help="number of seeds (3: the seeds 0, 1, 2) or a list (4,7); default 3", metavar="SEEDS")
    p.add_argument("--out", help="folder for the runs and the report (default runs/compare-DATASET-...)", metavar="DIR")
    p.add_dry_run()
    p.add_ray()
    p.add_track()
    add_settings(p, without=("algorithm", "seed"))
    p.set_defaults(call=train.compare)

    p = commands.add(
        "sweep",
        "train every combination of a grid of settings, as many runs together as fit into memory",
        "mimicfl sweep grid.toml --device cuda",
        "mimicfl sweep grid.toml --seeds 5 --rounds 40        (options override the file, including its grid)",
        "mimicfl sweep grid.toml --ray auto",
    )
    p.add_argument("file", help="settings in TOML, and a [grid] of lists to combine", metavar="FILE.toml")
    p.add_argument("--algorithms", nargs="+", help=f"{NAMES}, instead of those in the file", metavar="SPEC")
    p.add_argument("--seeds", help="number of seeds (3: the seeds 0, 1, 2) or a list (4,7), instead of those in the file", metavar="SEEDS")
    p.add_argument("--out", help="folder for the runs and the reports (default runs/FILE)", metavar="DIR")
    p.add_ray("distribute the runs over a Ray cluster")
    p.add_dry_run()
    p.add_track()
    add_settings(p)
    p.set_defaults(call=sweeping.sweep)

    p = commands.add(
        "resume",
        "finish an interrupted run, or all interrupted runs in a folder; results are bit-equal to uninterrupted runs",
        "mimicfl resume runs/first",
        "mimicfl resume runs/custom --plugin mine.py          (a custom algorithm whose file has moved)",
    )
    p.add_argument("run", help="run folder, or a folder that contains runs", metavar="RUN")
    p.add_ray()
    p.add_track()
    add_settings(p, only=("plugins",))
    p.set_defaults(call=train.resume)

    p = commands.add(
        "benchmark",
        "run the reference evaluation of the algorithms under many availability patterns, or write its page",
        "mimicfl benchmark list",
        "mimicfl benchmark run digits --minutes 10",
        "mimicfl benchmark run fmnist --device cuda --processes 6",
        "mimicfl benchmark status digits",
        "mimicfl benchmark page",
    )
    actions = "list: the parts of the suite; run: train what is missing; status: what is recorded; page: write the results"
    p.add_argument("action", choices=["list", "run", "status", "page"], help=actions)
    parts = "parts of the suite; run takes one; list and status show the cells of named parts"
    p.add_argument("parts", nargs="*", help=parts, metavar="PART")
    p.add_argument("--patterns", nargs="+", help="run: only these availability patterns", metavar="NAME")
    p.add_argument("--algorithms", nargs="+", help="run: only these algorithms", metavar="NAME")
    p.add_argument("--minutes", type=float, help="run: stop after this many minutes; the same command resumes", metavar="M")
    p.add_argument(
        "--processes",
        type=int,
        default=1,
        help="run: train this many batches of runs at a time, on the same device (default 1)",
        metavar="P",
    )
    p.add_argument("--amend", help="run: record a change of the suite next to its plan, with this reason", metavar="REASON")
    p.add_argument("--records", help="folder of the records (default records/benchmark)", metavar="DIR")
    p.add_argument("--out", help="run: folder for unfinished runs (default runs/benchmark); page: folder to write to", metavar="DIR")
    p.add_track()
    add_settings(p, only=("device", "engine", "data_path"))
    p.set_defaults(call=benchmark.benchmark)

    p = commands.add(
        "reproduce",
        "run the paper's experiments and record the results",
        "mimicfl reproduce --list",
        "mimicfl reproduce table-4-fmnist --seeds 3 --device cuda",
        "mimicfl reproduce table-4-fmnist --scale 0.1          (a quick check on a CPU)",
    )
    p.add_argument("names", nargs="*", help="experiments by name, or 'all'", metavar="NAME")
    p.add_argument("--list", action="store_true", help="list the experiments")
    p.add_argument(
        "--status", action="store_true", help="list which runs are recorded and which are missing, and how long the missing ones take"
    )
    p.add_argument(
        "--seeds",
        help="number of seeds (3: the experiment's first three) or a list of positions such as 0,2 (a single one: 2,); default 3",
        metavar="SEEDS",
    )
    p.add_argument("--columns", nargs="+", help="only these columns of the tables", metavar="NAME")
    p.add_argument("--algorithms", nargs="+", help="only these algorithms", metavar="NAME")
    p.add_argument(
        "--scale", type=float, help="scale rounds and local epochs by this factor; the result is shown, not recorded", metavar="X"
    )
    p.add_argument(
        "--minutes",
        type=float,
        help="stop after this many minutes, even in the middle of a run; the same command resumes",
        metavar="M",
    )
    p.add_argument("--again", action="store_true", help="repeat recorded runs and compare the numbers")
    p.add_argument("--records", help="folder of the records (default records/paper)", metavar="DIR")
    p.add_argument("--out", help="folder for the runs (default runs/paper)", metavar="DIR")
    add_settings(p, only=("device", "engine", "state_budget", "checkpoint_every", "data_path"))
    p.set_defaults(call=paper.run)

    p = commands.add(
        "track",
        "send stored runs to a tracker, except for rounds that it already has",
        "mimicfl track send runs/demo --track tensorboard:logs",
        "mimicfl track send runs/first --track mlflow:http://localhost:5000",
    )
    p.add_argument("action", choices=["send"], help="the only action")
    p.add_argument("runs", nargs="+", help="run folders, or folders that contain runs", metavar="RUN")
    p.add_track("where to send them")
    p.set_defaults(call=train.track)
