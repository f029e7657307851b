"""Make the parts of the documentation that are output: the command reference, the tables and the pictures.

    make docs            # about three minutes on two cores; docs/make.py --theory-only for docs/theory.md alone

Everything is trained on the embedded digits, so anyone gets the same numbers from the commands printed beside them.
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

from mimicfl import compare, runner
from mimicfl.cli.main import main, parser
from mimicfl.cli.train import DEMO
from mimicfl.config import from_dict
from mimicfl.report.report import build
from mimicfl.report.styles import COLORS
from mimicfl.report.summary import TITLES, verdict
from mimicfl.report.tables import lines

DOCS = Path(__file__).parent
SHOWN = ("fedavg", "fedavgm", "fedau", "fedprox", "scaffold", "mifa", "fedvarp", "mimic")
PATTERNS = {
    DEMO["availability"]: "clients that hold a 0, 1 or 2 answer in 2 % of the rounds, the others in 30 % (the demo)",
    "bounded:50": "client i answers every tau_i rounds, tau_i uniform on 0..50",
    "cyclic:40,4": "client i answers in 4 consecutive rounds out of 40",
    "markov:0.03,0.3": "two states; a client is present in 9 % of the rounds, in stretches",
    "static:0.1": "every client answers with probability 0.1",
    "time-varying:0.1": "3 of 30 clients a round, drawn with new weights every round",
}


def reference() -> str:
    """docs/cli.md: what every --help prints."""
    commands = ["demo", "run", "compare", "sweep", "resume", "reproduce", "report", "data", "availability", "theory", "bench", "flower"]
    text = "# Command reference\n\nMade from `mimicfl COMMAND --help` by `make docs`.\n"
    for command in commands:
        shown = io.StringIO()
        os.environ["COLUMNS"] = "100"  # argparse asks the terminal otherwise
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
            parser().parse_args([command, "--help"])
        text += f"\n## {command}\n\n```text\n{shown.getvalue().rstrip()}\n```\n"
    return text


def results(folder: Path) -> str:
    text = (
        "# Results on the embedded digits\n\n"
        "The paper's five algorithms and three more, three seeds, 30 clients with two classes each, an MLP with 32 hidden units,\n"
        "5 local epochs, batch 16, rate 0.1 x 0.99^t, 200 model uploadings (SCAFFOLD, which uploads two vectors, gets half the rounds).\n"
        "FedProx has mu = 0.01, FedAvgM a momentum of 0.9, MIFA counts clients never seen as zero. Nothing is tuned per algorithm\n"
        "or per pattern. The last column, swing, is the standard deviation of the accuracy over the last quarter of the rounds.\n"
        "Made by `make docs`.\n"
    )
    for k, (pattern, meaning) in enumerate(PATTERNS.items()):
        out = folder / f"study{k}"
        compare(from_dict(DEMO | {"availability": pattern}), SHOWN, (0, 1, 2), out)
        report = build([out / runner.run_name(a, s) for a in SHOWN for s in (0, 1, 2)], out)
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
    """The pictures of docs/theory.md, from the commands printed in it, and what `theory check` says of the paper's rate."""
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
    pictures = {"norms": "quadratic/theory-norms", "mixing": "mixing/theory-norms", "certificate": "mixing/theory-certificate"}
    pictures |= {"digits": "digits/theory-errors", "recall": "digits/theory-recall"}
    for name, source in pictures.items():
        shutil.copy(folder / "runs" / f"{source}.png", DOCS / "pictures" / f"theory-{name}.png")
    never_meet().savefig(DOCS / "pictures" / "never-meet.png", dpi=150)


def never_meet() -> Figure:
    """The runs of examples/never_meet.py."""
    sys.path.insert(0, str(DOCS.parent / "examples"))
    from never_meet import run, schedule

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    for words, pattern, dashes in (("never meet", schedule(), "-"), ("meet every 30th round", schedule(30), "--")):
        for algorithm in ("mifa", "mimic"):
            distance = [row["distance"] for row in run(algorithm, pattern).rows]
            axes.plot(distance, dashes, color=COLORS[algorithm], label=f"{TITLES[algorithm]}, clients {words}")
    axes.set_xlabel("round")
    axes.set_ylabel("distance to the minimum")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def photograph(page: Path, target: Path) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        print("no Chromium: the picture of the page is left as it is", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as profile:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars"]
        size = ["--window-size=1060,1960", f"--user-data-dir={profile}", f"--screenshot={target}"]
        subprocess.run([browser, *flags, *size, page.resolve().as_uri()], check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    (DOCS / "cli.md").write_text(reference())
    if "--reference-only" not in sys.argv:
        with tempfile.TemporaryDirectory() as folder:
            theory(Path(folder))
    if "--reference-only" not in sys.argv and "--theory-only" not in sys.argv:
        with tempfile.TemporaryDirectory() as folder:
            (DOCS / "results.md").write_text(results(Path(folder)))
            first, demo = Path(folder) / "study0", Path(folder) / "demo"
            build([first / runner.run_name(a, s) for a in runner.ALL for s in (0, 1, 2)], demo)  # what `make demo` shows
            shutil.copy(demo / "curves.png", DOCS / "pictures" / "demo.png")
            shutil.copy(demo / "availability.png", DOCS / "pictures" / "availability.png")
            photograph(demo / "report.html", DOCS / "pictures" / "report.png")
            flow.draw().savefig(flow.OUT, dpi=130)
            assert main(["availability", "show", "bounded:20", "--out", str(DOCS / "pictures" / "bounded.png")]) == 0
    Console().print("docs are up to date")
