"""Generate the parts of the documentation that are program output: the command reference, the tables and the figures.

    make docs            # about three minutes on two cores; docs/make.py --theory-only for docs/theory.md alone

Everything is trained on the embedded digits, so the commands printed beside the numbers reproduce them.
"""

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import flow
from matplotlib.figure import Figure
from rich.console import Console

import notebooks
from mimicfl import compare
from mimicfl.algorithms import paper_algorithms
from mimicfl.benchmark.recommend import Finding, write_findings
from mimicfl.benchmark.suite import PARTS
from mimicfl.cli.main import command_names, main, parser
from mimicfl.cli.train import DEMO
from mimicfl.experiments.names import run_name
from mimicfl.registry import NAMED_BY
from mimicfl.report.benchmark import findings
from mimicfl.report.report import write_report
from mimicfl.report.styles import color_of, title_of
from mimicfl.report.tables import lines
from mimicfl.report.verdict import RULE, verdict
from mimicfl.settings import NOT_IN_RESULT, SETTINGS, from_dict
from mimicfl.settings.experiment import USUAL, USUAL_FOR

DOCS = Path(__file__).parent
SHOWN = ("fedavg", "fedavgm", "fedau", "fedprox", "scaffold", "scaffold:uploads=2", "mifa", "fedvarp", "mimic")
PATTERNS = {
    DEMO["availability"]: "clients that hold the digits 0, 1 or 2 participate in 2 % of the rounds, the others in 30 % (the demo)",
    "bounded:50": "client i participates every tau_i rounds, tau_i uniform on 0..50",
    "cyclic:40,4": "client i participates in 4 consecutive rounds out of 40",
    "markov:0.03,0.3": "a Markov chain per client; on average a client is available in 9 % of the rounds, several in a row",
    "static:0.1": "every client participates in each round with probability 0.1",
    "time-varying:0.1": "3 of 30 clients participate in each round, drawn with new weights in every round",
}


def reference() -> str:
    """The text of docs/cli.md: the output of every --help."""
    text = "# Command reference\n\nMade from `mimicfl COMMAND --help` by `make docs`.\n"
    for command in command_names():
        shown = io.StringIO()
        os.environ["COLUMNS"] = "100"  # argparse would use the width of the terminal
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
            parser().parse_args([command, "--help"])
        text += f"\n## {command}\n\n```text\n{shown.getvalue().rstrip()}\n```\n"
    return text


def all_findings() -> list[Finding]:
    """What `mimicfl recommend` answers from in an installed package."""
    return [finding for part in PARTS.values() for finding in findings(part, DOCS.parent / "records" / "benchmark")]


def settings_page() -> str:
    """The text of docs/settings.md: every setting, from its declaration."""
    text = (
        "# Settings\n\n"
        "Every setting of a run, made from the declarations by `make docs`. The name is the TOML key and the Python argument of\n"
        "`mf.Experiment`; on the command line it is an option with `-` for `_`, as in `--num-clients`. Settings marked with a dot say\n"
        "how or where a run is made and do not change its result; all others are part of its [fingerprint](runs.md#fingerprints).\n\n"
        "| setting | default | |\n|---|---|---|\n"
    )
    for name, declared in SETTINGS.items():
        mark = " ·" if name in NOT_IN_RESULT else ""
        words = ", ".join(f"`{word}`" for word in declared.metadata["choices"])
        meaning = declared.metadata["help"] + (f" ({words})" if words else "")
        text += f"| `{name}`{mark} | {default_of(name)} | {meaning} |\n"
    text += "\n## Names\n\nSettings that name a part take a spec: the name, and options after a colon. `fedprox:mu=0.1` sets an option.\n\n"
    text += "| setting | names, with an option and its default |\n|---|---|\n"
    for name in [name for name in SETTINGS if name in NAMED_BY and name != "global_lr"]:
        text += f"| `{name}` | {', '.join(f'`{example}`' for example in NAMED_BY[name].examples())} |\n"
    return text + usual_values()


def usual_values() -> str:
    """What `auto` means for each dataset."""
    keys = list(USUAL)
    text = "\n## Defaults of the datasets\n\n`auto` takes the dataset's usual value, and a run without `rounds` and `uploads` its usual\n"
    text += f"length:\n\n| dataset | {' | '.join(keys)} |\n|---|{'---|' * len(keys)}\n"
    for dataset, usual in {**USUAL_FOR, "other": {}}.items():
        text += f"| {dataset} | {' | '.join(f'`{(USUAL | usual)[key]}`' for key in keys)} |\n"
    return text


def default_of(name: str) -> str:
    value = SETTINGS[name].default
    return f"`{value}`" if isinstance(value, (str, int, float)) else "none"


def results(folder: Path) -> str:
    """The text of docs/results.md, from runs trained below `folder`."""
    text = (
        "# Results on the embedded digits\n\n"
        "The paper's five algorithms, FedAvgM, FedAU and FedVARP under six patterns of client availability. Every run has 30 clients with\n"
        "two classes each, an MLP with 32 hidden units, 5 local epochs, batch 16, learning rate 0.1 x 0.99^t and 200 model uploads.\n"
        "SCAFFOLD appears twice: with one upload per client and round, the default, and with two, as the MimiC paper counts them; it then\n"
        "runs half as many rounds. FedProx has mu = 0.01, FedAvgM a momentum of 0.9; MIFA uses a zero update for a client that has not\n"
        "participated yet. Nothing is tuned per algorithm or per pattern. The tables show the test accuracy after the last round, as mean\n"
        "± standard deviation over three seeds, and the swing, the standard deviation of the accuracy over the last quarter of the\n"
        f"rounds. The best mean of a pattern is bold, and so are those that tie with it. {RULE}\n\n"
        "`make docs` generates this page.\n"
    )
    for k, (pattern, meaning) in enumerate(PATTERNS.items()):
        out = folder / f"study{k}"
        compare(from_dict(DEMO | {"availability": pattern}), SHOWN, (0, 1, 2), out)
        report = write_report([out / run_name(a, s) for a in SHOWN for s in (0, 1, 2)], out)
        text += f"\n## {pattern}\n\n{meaning[0].upper() + meaning[1:]}.\n\n"
        text += "| algorithm | test accuracy | swing |\n|---|---|---|\n"
        for line in lines(report.groups):
            cells = [line.label, line.final, line.swing]
            text += "| " + " | ".join(f"**{cell}**" if line.mark else cell for cell in cells) + " |\n"
        command = f'mimicfl compare --algorithms {" ".join(SHOWN)} --partition classes:2 --availability "{pattern}" --uploads 200'
        text += f"\n{verdict(report.groups)}\n\n```bash\n{command}\n```\n"
    return text


def commands(page: Path) -> list[list[str]]:
    """The mimicfl command lines of a page."""
    blocks = re.findall(r"```(?:bash|console)\n(.*?)```", page.read_text(), re.DOTALL)
    lines = [line.removeprefix("$ ") for line in "".join(blocks).splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("mimicfl ")]


def theory(folder: Path) -> None:
    """Make the figures of docs/theory.md and its output of `theory check`, with the commands printed on the page."""
    page = DOCS / "theory.md"
    with contextlib.chdir(folder):
        for command in commands(page):
            shown = io.StringIO()
            with contextlib.redirect_stdout(shown):
                assert main(command) == 0, command
            if command[:2] == ["theory", "check"] and command[2] == "runs/paper":
                text = "\n".join(line.rstrip() for line in shown.getvalue().splitlines())
                before, _, rest = page.read_text().partition("<!-- check -->")
                page.write_text(f"{before}<!-- check -->\n```text\n{text}\n```\n<!-- /check -->{rest.partition('<!-- /check -->')[2]}")
    figures = {"norms": "quadratic/theory-norms", "mixing": "mixing/theory-norms", "certificate": "mixing/theory-certificate"}
    figures |= {"digits": "digits/theory-errors", "recall": "digits/theory-recall"}
    for name, source in figures.items():
        shutil.copy(folder / "runs" / f"{source}.png", DOCS / "pictures" / f"theory-{name}.png")
    never_meet().savefig(DOCS / "pictures" / "never-meet.png", dpi=150)


def never_meet() -> Figure:
    """The figure of the runs in examples/never_meet.py."""
    sys.path.insert(0, str(DOCS.parent / "examples"))
    from never_meet import run, schedule

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    for meetings, pattern, dashes in (("never meet", schedule(), "-"), ("meet every 30th round", schedule(30), "--")):
        for algorithm in ("mifa", "mimic"):
            distance = [row["distance"] for row in run(algorithm, pattern).rows]
            axes.plot(distance, dashes, color=color_of(algorithm), label=f"{title_of(algorithm)}, clients {meetings}")
    axes.set_xlabel("round")
    axes.set_ylabel("distance to the minimum")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def screenshot(page: Path, target: Path) -> None:
    """Save a screenshot of an HTML page, if Chromium is installed."""
    browser = shutil.which("chromium")
    if browser is None:
        print("Chromium is not installed: the screenshot of the report page is not updated", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as profile:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars"]
        size = ["--window-size=1060,1960", f"--user-data-dir={profile}", f"--screenshot={target}"]
        subprocess.run([browser, *flags, *size, page.resolve().as_uri()], check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    (DOCS / "cli.md").write_text(reference())
    (DOCS / "settings.md").write_text(settings_page())
    write_findings(all_findings())
    if "--reference-only" not in sys.argv:
        with tempfile.TemporaryDirectory() as folder:
            theory(Path(folder))
    if "--reference-only" not in sys.argv and "--theory-only" not in sys.argv:
        with tempfile.TemporaryDirectory() as folder:
            (DOCS / "results.md").write_text(results(Path(folder)))
            first, demo = Path(folder) / "study0", Path(folder) / "demo"
            write_report([first / run_name(a, s) for a in paper_algorithms() for s in (0, 1, 2)], demo)  # as in `make demo`
            shutil.copy(demo / "curves.png", DOCS / "pictures" / "demo.png")
            shutil.copy(demo / "availability.png", DOCS / "pictures" / "availability.png")
            screenshot(demo / "report.html", DOCS / "pictures" / "report.png")
            flow.draw().savefig(flow.OUT, dpi=130)
            for file in sorted(notebooks.FOLDER.glob("*.ipynb")):
                notebooks.store(notebooks.executed(file, Path(folder)), file)
            assert main(["availability", "show", "bounded:20", "--out", str(DOCS / "pictures" / "bounded.png")]) == 0
    Console().print("wrote docs/cli.md and docs/settings.md" if "--reference-only" in sys.argv else "docs are up to date")
