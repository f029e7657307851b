"""The commands that read runs, describe settings and data, or prepare a deployment: their options."""

from ..registry import NAMED_BY
from .commands import Commands, Later
from .options import add_settings

availability, benchmark, completion, federation = map(Later, ("availability", "benchmark", "completion", "federation"))
inspect, listing, theory = map(Later, ("inspect", "listing", "theory"))


def add_others(commands: Commands) -> None:
    """Everything that does not train."""
    p = commands.add(
        "runs",
        "list runs: status, last accuracy, and the settings in which they differ",
        "mimicfl runs",
        "mimicfl runs runs/grid --filter algorithm=mimic* status=finished --sort accuracy --reverse",
    )
    p.add_argument("folder", nargs="?", default="runs", help="folder that contains runs (default runs)", metavar="DIR")
    p.add_argument(
        "--filter",
        nargs="+",
        default=[],
        help="only runs for which all of these hold: a column or setting, =, != or a comparison, and a value (* and ? match anything)",
        metavar="KEY=VALUE",
    )
    p.add_argument("--sort", help="sort by a column or setting, smallest first (default: by folder)", metavar="KEY")
    p.add_argument("--reverse", action="store_true", help="largest first")
    p.add_argument("--metric", help="show the last value of this column of the rows (default: test accuracy or test loss)", metavar="NAME")
    p.add_argument("--csv", action="store_true", help="print comma-separated values")
    p.set_defaults(call=listing.runs)

    p = commands.add(
        "report",
        "write a table, figures and an HTML page from runs",
        "mimicfl report runs/demo",
        "mimicfl report runs/a runs/b --out both",
        "mimicfl report --live runs/grid                       (while the sweep is running)",
        "mimicfl report runs/demo --target 0.8",
        "mimicfl report --paper",
    )
    p.add_argument("runs", nargs="*", help="run folders, or folders that contain runs", metavar="RUN")
    p.add_argument("--live", action="store_true", help="rewrite the page until all runs are finished; the page reloads itself")
    p.add_argument("--every", type=float, default=5, help="with --live: seconds between updates (default 5)", metavar="S")
    p.add_argument(
        "--target", type=float, help="also print what it costs to reach this value of the main metric, such as 0.8 for 80 %%", metavar="X"
    )
    p.add_argument("--paper", action="store_true", help="write the page of the paper's results from the records")
    p.add_argument("--records", help="with --paper: folder of the records (default records/paper)", metavar="DIR")
    p.add_argument(
        "--out",
        help="folder to write to (default: the RUN itself; for several, a new folder beside the first; with --paper docs/ and runs/paper/)",
        metavar="DIR",
    )
    p.set_defaults(call=inspect.report)

    p = commands.add(
        "config",
        "print every setting with its value and where it comes from, as a TOML file that `mimicfl run` can read",
        "mimicfl config show",
        "mimicfl config show experiment.toml --dataset fmnist > full.toml",
    )
    p.add_argument("action", choices=["show"], help="the only action")
    p.add_argument("file", nargs="?", help="settings in TOML; command-line options override them", metavar="FILE.toml")
    add_settings(p)
    p.set_defaults(call=inspect.config)

    p = commands.add("data", "list datasets, or download one", "mimicfl data list", "mimicfl data fetch fmnist")
    p.add_argument("action", choices=["list", "fetch"], help="list: the built-in datasets and their files; fetch: download one")
    p.add_argument("name", nargs="?", help="fetch: the dataset, such as fmnist", metavar="NAME")
    p.add_argument("--path", help="folder that holds the downloaded files", metavar="DIR")
    p.set_defaults(call=inspect.data)

    p = commands.add(
        "recommend",
        "recommend an algorithm for your clients, from the results of the benchmark",
        "mimicfl recommend --availability static:0.05 --clients 100",
        "mimicfl recommend --availability explicit:schedule.csv",
    )
    p.add_argument("--part", default="digits", help="part of the benchmark to answer from (default digits)", metavar="PART")
    p.add_argument("--records", help="folder of the records (default records/benchmark)", metavar="DIR")
    add_settings(p, only=("availability", "dataset", "data_path", "num_clients", "partition"))
    p.set_defaults(call=benchmark.recommend)

    p = commands.add(
        "theory",
        "compare a run with the paper's conditions and bounds",
        "mimicfl theory check runs/first",
        "mimicfl theory show runs/first --out figures      (after a run with --diagnose every=10)",
    )
    p.add_argument("action", choices=["check", "show"], help="check: which conditions the rates satisfy; show: plot the diagnosed rounds")
    p.add_argument("runs", nargs="+", help="run folders, or folders that contain runs", metavar="RUN")
    p.add_argument("--L", type=float, help="check: smoothness constant (default: computed)", metavar="L")
    p.add_argument("--K", type=int, help="check: local steps (default: computed)", metavar="K")
    p.add_argument("--tau-max", type=int, help="check: allow gaps up to TAU rounds (default: the largest that occurred)", metavar="TAU")
    p.add_argument("--nu", type=float, help="check: nu in the proof of Theorem 2 (default: optimised)", metavar="NU")
    p.add_argument(
        "--plugin", dest="plugins", action="append", help="check: Python file that registers custom parts of the run", metavar="FILE"
    )
    p.add_argument("--out", help="show: folder for the figures (default: the first run's)", metavar="DIR")
    p.set_defaults(call=theory.theory)

    p = commands.add("bench", "time the engines on this machine", "mimicfl bench --model lenet --batch-size 16 --cohorts 3,30 --threads 2")
    p.add_argument("--model", default="lenet", help="a model by name (default lenet)", metavar="SPEC")
    p.add_argument("--batch-size", type=int, default=16, help="samples per local step (default 16)", metavar="B")
    p.add_argument("--steps", type=int, default=20, help="local steps per client (default 20)", metavar="K")
    p.add_argument("--cohorts", default="3,30", help="active clients per round, one number or several (default 3,30)", metavar="M")
    p.add_argument("--repeats", type=int, default=7, help="timed rounds per engine (default 7)", metavar="R")
    p.add_argument("--device", default="cpu", help="cpu (default), cuda or auto", metavar="NAME")
    p.add_argument("--precision", default="fp32", help="fp32 (default), tf32 or bf16", metavar="NAME")
    p.add_argument(
        "--engines",
        help="engines to time besides plain, e.g. native,workers or native,batched,compiled,streams,compiled-streams (default: all)",
        metavar="NAMES",
    )
    p.add_argument("--threads", type=int, help="number of threads (default: PyTorch's)", metavar="T")
    p.set_defaults(call=inspect.bench)

    p = commands.add(
        "availability",
        "draw the schedule of an availability pattern, convert a trace, or make a pattern or a synthetic trace from one",
        "mimicfl availability show time-varying:0.1 --clients 30 --rounds 100 --out schedule.png",
        'mimicfl availability show "label-correlated:classes=[0,1],rare=0.05"',
        "mimicfl availability show trace:phones.csv,round=270",
        "mimicfl availability convert flash.json phones.csv",
        "mimicfl availability fit phones.csv",
        "mimicfl availability twin phones.csv synthetic.csv",
    )
    actions = "show: draw a schedule and print its statistics; convert: write a trace in the neutral format; fit: print a pattern with the "
    actions += "statistics of a trace; twin: write a synthetic copy of a trace"
    p.add_argument("action", choices=["show", "convert", "fit", "twin"], help=actions)
    p.add_argument("pattern", metavar="SPEC|TRACE")
    p.explain("pattern", lambda: f"show: availability pattern ({', '.join(NAMED_BY['availability'].examples())}); otherwise: a trace file")
    p.add_argument("target", nargs="?", help="convert, twin: the new trace, .csv or .parquet", metavar="NEW")
    p.add_argument(
        "--format", default="auto", help="convert, fit, twin: auto (default), neutral, flash, flash-processed or fedscale", metavar="NAME"
    )
    p.add_argument(
        "--rule",
        default="locked",
        help="convert, fit, twin: when a raw FLASH device is available: locked (default), idle, charging",
        metavar="NAME",
    )
    p.add_argument("--round", type=float, default=270.0, help="fit: seconds per round of the fitted pattern (default 270)", metavar="S")
    p.add_argument(
        "--clients", type=int, help="number of clients (default 30; all of an explicit schedule, up to 100 of a trace)", metavar="N"
    )
    p.add_argument("--rounds", type=int, help="number of rounds (default 100; all of an explicit schedule, a day of a trace)", metavar="T")
    p.add_argument("--seed", type=int, default=0, help="fixes the schedule or the twin (default 0)", metavar="S")
    p.add_argument(
        "--dataset",
        default="digits",
        help="dataset whose labels label-correlated uses (default digits, two shards per client)",
        metavar="NAME",
    )
    p.add_argument("--plugin", dest="plugins", action="append", help="Python file with a custom pattern", metavar="FILE")
    p.add_argument("--out", help="show: also write a figure, .png, .svg or .pdf", metavar="FILE")
    p.set_defaults(call=availability.availability)

    p = commands.add(
        "completion",
        "print a script that completes commands, options and names in the shell",
        "mimicfl completion bash > ~/.local/share/bash-completion/completions/mimicfl",
        "mimicfl completion zsh > ~/.zfunc/_mimicfl            (with fpath+=~/.zfunc before compinit)",
        "mimicfl completion fish > ~/.config/fish/completions/mimicfl.fish",
    )
    p.add_argument("shell", choices=["bash", "zsh", "fish"], help="the shell that reads the script")
    p.set_defaults(call=completion.completion)

    p = commands.add(
        "flower",
        "create a Flower app, monitor a federation, or roll it back to an earlier checkpoint",
        "mimicfl flower new my-federation",
        "mimicfl flower watch /var/lib/mimicfl/study",
        "mimicfl flower rollback /var/lib/mimicfl/study --to 40",
    )
    actions = "new: create an app; rollback: return to an earlier checkpoint; watch: show the rounds and the clients in the browser"
    p.add_argument("action", choices=["new", "rollback", "watch"], help=actions)
    p.add_argument("folder", help="new: a new folder, which names the app; otherwise the folder of a federation", metavar="DIR")
    p.add_argument(
        "--port", type=int, default=8765, help="watch: port of the page on this machine (default 8765; 0: any free one)", metavar="PORT"
    )
    p.add_argument("--prometheus", action="store_true", help="watch: also serve metrics for Prometheus at /metrics")
    p.add_argument(
        "--to", type=int, help="rollback: the number of rounds to keep (default: the checkpoint before the last)", metavar="ROUND"
    )
    p.set_defaults(call=federation.flower)
