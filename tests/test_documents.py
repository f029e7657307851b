"""What the documentation shows is run: README blocks, examples, doctests, the command reference, the links."""

import doctest
import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mimicfl
from mimicfl.paper.records import read_all
from mimicfl.paper.reproduce import Cell
from mimicfl.paper.studies import STUDIES
from mimicfl.report.paper import build, cell_text, published_text

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def run(command, folder):
    """As a user would, with everything at its default, the engine included."""
    environment = {key: value for key, value in os.environ.items() if key != "MIMICFL_ENGINE"}
    environment |= {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, shell=isinstance(command, str))
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_readme_commands(tmp_path):
    """Every command line of the README, in order, in a new folder; make's own targets are checked to exist."""
    readme = ROOT / "README.md"
    for text in blocks(readme, "toml"):
        (tmp_path / "experiment.toml").write_text(text)
    makefile = (ROOT / "Makefile").read_text()
    ran = 0
    for line in "".join(blocks(readme, "bash")).splitlines():
        if line.startswith("make "):
            assert f"\n{line.split()[1]}:" in makefile
        else:
            run(line, tmp_path)
            ran += 1
    assert ran >= 5
    assert (tmp_path / "runs/first/report.html").is_file()


def test_the_demo_prints_what_the_readme_shows(tmp_path):
    [shown] = blocks(ROOT / "README.md", "text")
    out = run(["mimicfl", "demo"], tmp_path)

    def table(text):
        return [re.split(r"\s{2,}", line.strip("★ "))[:2] for line in text.splitlines() if "±" in line and "ends best" not in line]

    expected, found = table(shown), table(out)
    assert [row[0] for row in expected] == [row[0] for row in found] == ["FedAvg", "FedProx", "SCAFFOLD", "MIFA", "MimiC"]
    for (_, left), (_, right) in zip(expected, found, strict=True):
        # Another processor rounds differently; the story must stay the same.
        assert float(left.split()[0]) == pytest.approx(float(right.split()[0]), abs=4)
    assert "★  MimiC" in out
    assert "report   runs/demo/report.html" in out
    assert (tmp_path / "runs/demo/report.html").is_file()


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.name)
def test_python_blocks(page, tmp_path):
    for k, text in enumerate(blocks(page, "python")):
        (tmp_path / f"block{k}.py").write_text(text)
        run([sys.executable, f"block{k}.py"], tmp_path)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.parent.name == "docs" and p.name != "results.md" and blocks(p, "bash")], ids=lambda p: p.name
)
def test_shell_blocks_of_docs(page, tmp_path):
    for line in "".join(blocks(page, "bash")).splitlines():
        run(line, tmp_path)


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples(example, tmp_path):
    arguments = ["20"] if example.name == "first_run.py" else []
    out = run([sys.executable, str(example), *arguments], tmp_path)
    assert "%" in out


@pytest.mark.parametrize("example", ["own_algorithm.py", "own_availability.py", "own_model_and_data.py"])
def test_commands_that_examples_name(example, tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    commands = re.findall(r"^ *(mimicfl .*)$", (ROOT / "examples" / example).read_text(), re.MULTILINE)
    assert commands
    for command in commands:
        run(command, tmp_path)


MODULES = [m.name for m in pkgutil.walk_packages(mimicfl.__path__, "mimicfl.") if not m.name.endswith("__main__")]


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is_for_and_its_examples_hold(name):
    module = importlib.import_module(name)
    assert module.__doc__
    assert doctest.testmod(module).failed == 0


def test_public_names_are_those_exported():
    names = {n for n in vars(mimicfl) if not n.startswith("_") and not (n in MODULE_NAMES and n not in mimicfl.__all__)}
    assert names == set(mimicfl.__all__)
    for package in (mimicfl.availability, importlib.import_module("mimicfl.algorithms")):
        assert all(hasattr(package, name) for name in package.__all__)


MODULE_NAMES = {m.removeprefix("mimicfl.") for m in MODULES if m.count(".") == 1}


def test_the_command_reference_is_up_to_date(monkeypatch):
    """docs/cli.md is what --help prints."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    monkeypatch.setenv("COLUMNS", "")  # restored afterwards, whatever the reference sets
    make = importlib.import_module("make")
    assert make.reference() == (ROOT / "docs" / "cli.md").read_text(), "run: make docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_algorithm_files_stay_short():
    for file in (ROOT / "src/mimicfl/algorithms").glob("[!_]*.py"):
        if file.name != "base.py":
            assert len(file.read_text().splitlines()) <= 60, file.name


def test_the_page_about_the_paper_is_what_the_records_say(tmp_path):
    """`mimicfl report --paper` makes docs/reproduce.md as it stands; a number changed by hand would show."""
    build(read_all(ROOT / "records" / "paper"), [0, 1, 2], tmp_path / "p.html", tmp_path / "reproduce.md", tmp_path / "pictures")
    assert (tmp_path / "reproduce.md").read_text() == (ROOT / "docs" / "reproduce.md").read_text()
    assert {p.name for p in (tmp_path / "pictures").iterdir()} == {p.name for p in (ROOT / "docs" / "pictures").glob("paper-*.png")}


def test_the_readme_shows_the_records():
    records, study = read_all(ROOT / "records" / "paper"), STUDIES["table-4-fmnist"]
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith(("| here |", "| published |"))]
    shown = [[cell.strip(" *") for cell in line.split("|")[2:-1]] for line in lines]
    assert shown[0] == [cell_text(Cell(study, "10%", a), records, [0, 1, 2]) for a in study.algorithms]
    assert shown[1] == [published_text(study, a, "10%") for a in study.algorithms]
