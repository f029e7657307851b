"""The documentation is correct: examples and doctests run, generated pages and links are up to date. test_code_blocks.py runs its code."""

import doctest
import importlib
import pkgutil
import re
import shutil
import statistics
import subprocess
import sys
from types import ModuleType

import pytest

import mimicfl
from mimicfl.benchmark.analysis import analyse
from mimicfl.benchmark.recommend import shipped
from mimicfl.benchmark.suite import PARTS
from mimicfl.paper.records import read_all
from mimicfl.paper.reproduce import Cell
from mimicfl.paper.studies import STUDIES
from mimicfl.report.benchmark import findings, write_benchmark_report
from mimicfl.report.paper import cell_text, published_text, write_paper_report
from mimicfl.report.paper_values import comparisons, lookup_in
from mimicfl.significance import UNDECIDED, YES
from tests.conftest import ROOT
from tests.pages import PAGES, blocks, run


@pytest.mark.slow
def test_demo_output_matches_the_readme(tmp_path):
    [shown] = blocks(ROOT / "README.md", "text")
    out = run(["mimicfl", "demo"], tmp_path)

    def table(text):
        return [re.split(r"\s{2,}", line.strip("○★ "))[:2] for line in text.splitlines() if "±" in line and "ends best" not in line]

    expected, found = table(shown), table(out)
    assert [row[0] for row in expected] == [row[0] for row in found] == ["FedAvg", "FedProx", "SCAFFOLD", "MIFA", "MimiC"]
    for (_, left), (_, right) in zip(expected, found, strict=True):
        # Another processor rounds differently, which can move the accuracy by a few points.
        assert float(left.split()[0]) == pytest.approx(float(right.split()[0]), abs=4)
    assert "○  SCAFFOLD" in out
    assert "report   runs/demo/report.html" in out
    assert (tmp_path / "runs/demo/report.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run(example, tmp_path):
    for module in ("peft", "transformers", "datasets"):
        if f"import {module}" in example.read_text():
            pytest.importorskip(module)
    arguments = ["20"] if example.name == "first_run.py" else []
    for name in ("transformers", "datasets") if example.name == "huggingface.py" else ():
        pytest.importorskip(name)
    out = run(["python", str(example), *arguments], tmp_path)
    assert "%" in out


@pytest.mark.slow
@pytest.mark.parametrize("example", ["own_algorithm.py", "own_availability.py", "own_model_and_data.py"])
def test_commands_in_example_docstrings_run(example, tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    commands = re.findall(r"^ *(mimicfl .*)$", (ROOT / "examples" / example).read_text(), re.MULTILINE)
    assert commands
    for command in commands:
        run(command, tmp_path)


MODULES = [m.name for m in pkgutil.walk_packages(mimicfl.__path__, "mimicfl.") if not m.name.endswith("__main__")]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_every_module_has_a_docstring_and_passes_its_doctests(name):
    if name.endswith(("stacked.batched.kernels", "stacked.batched.implicit_gemm")):
        pytest.importorskip("triton", reason="PyTorch for CPUs comes without Triton")
    module = importlib.import_module(name)
    assert module.__doc__
    assert doctest.testmod(module).failed == 0


def test_all_lists_every_public_name():
    assert all(hasattr(mimicfl, name) for name in mimicfl.__all__)  # loads them
    names = {n for n in vars(mimicfl) if not n.startswith("_") and not (n in MODULE_NAMES and n not in mimicfl.__all__)}
    assert names == set(mimicfl.__all__)
    for package in (mimicfl.participation, importlib.import_module("mimicfl.algorithms")):
        assert all(hasattr(package, name) for name in package.__all__)


MODULE_NAMES = {m.removeprefix("mimicfl.") for m in MODULES if m.count(".") == 1}


@pytest.mark.slow
@pytest.mark.parametrize(("page", "function"), [("cli.md", "reference"), ("settings.md", "settings_page")])
def test_reference_is_up_to_date(page, function):
    """docs/cli.md equals the output of --help, docs/settings.md the declarations; in a new process, since other tests register names."""
    program = f"import sys, make; sys.stdout.write(make.{function}())"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT / "docs", capture_output=True, text=True, check=True)
    assert done.stdout == (ROOT / "docs" / page).read_text(), "run: python docs/make.py --reference-only"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_point_to_existing_files(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_algorithm_files_stay_short():
    texts = {file.name: file.read_text() for file in (ROOT / "src/mimicfl/algorithms").glob("*.py")}
    algorithms = {name: text for name, text in texts.items() if "\n@register(" in text and name != "server_optimizers.py"}
    assert len(algorithms) >= 8
    assert {name: text.count("\n") for name, text in algorithms.items() if text.count("\n") > 80} == {}


@pytest.mark.slow
def test_reproduce_page_matches_the_records(tmp_path):
    """`mimicfl report --paper` generates docs/reproduce.md exactly, so a number edited by hand fails here."""
    write_paper_report(
        read_all(ROOT / "records" / "paper"), [0, 1, 2], tmp_path / "p.html", tmp_path / "reproduce.md", tmp_path / "pictures"
    )
    assert (tmp_path / "reproduce.md").read_text() == (ROOT / "docs" / "reproduce.md").read_text()
    assert {p.name for p in (tmp_path / "pictures").iterdir()} == {p.name for p in (ROOT / "docs" / "pictures").glob("paper-*.png")}


@pytest.mark.slow
def test_benchmark_page_and_shipped_findings_match_the_records(tmp_path, monkeypatch):
    """`mimicfl benchmark page` generates docs/benchmark.md exactly, and the findings come from the same analysis."""
    tables = {part.name: analyse(part, ROOT / "records" / "benchmark") for part in PARTS.values()}
    monkeypatch.setattr("mimicfl.report.benchmark.analyse", lambda part, _: tables[part.name])
    write_benchmark_report(ROOT / "records" / "benchmark", tmp_path / "p.html", tmp_path / "benchmark.md", tmp_path / "pictures")
    assert (tmp_path / "benchmark.md").read_text() == (ROOT / "docs" / "benchmark.md").read_text()
    assert {p.name for p in (tmp_path / "pictures").iterdir()} == {p.name for p in (ROOT / "docs" / "pictures").glob("benchmark-*.png")}
    for part in PARTS.values():
        assert shipped(part) == findings(part, ROOT / "records" / "benchmark")


@pytest.mark.slow
def test_readme_table_matches_the_records():
    records, study = read_all(ROOT / "records" / "paper"), STUDIES["table-4-fmnist"]
    rows = ("| mimicfl |", "| published |", "| equal rounds |")
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith(rows)]
    shown = [[cell.strip(" *") for cell in line.split("|")[2:-1]] for line in lines]
    assert shown[0] == [cell_text(Cell(study, "10%", a), records, [0, 1, 2]) for a in study.algorithms]
    assert shown[1] == [published_text(study, a, "10%") for a in study.algorithms]
    here = comparisons(study, lookup_in(records, [0, 1, 2]), equal_rounds=True)["10%"]
    tails = {a: list(values.values()) for a, values in here.tails.items()}
    assert here.rounds == 100
    assert shown[2] == [f"{statistics.mean(tails[a]):.2f} ± {statistics.stdev(tails[a]):.2f}" for a in study.algorithms]
    assert [here.outcome(a) for a in study.algorithms[:-1]] == [YES, YES, UNDECIDED, UNDECIDED]  # as the text says


def test_every_page_of_docs_is_in_the_navigation():
    """Otherwise nobody finds it on the site."""
    listed = re.findall(r"^ +- (?:[^:\n]+: )?([\w/.*-]+)$", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2], re.MULTILINE)
    folders = {path.removesuffix("*") for path in listed if path.endswith("/*")}
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    missing = {page for page in pages if page not in listed and f"{page.rpartition('/')[0]}/" not in folders}
    assert missing == set(), "add it to nav in mkdocs.yml"


def test_every_public_name_is_in_the_reference(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    page = importlib.import_module("exports").with_exports((ROOT / "docs" / "api.md").read_text(), ROOT / "src" / "mimicfl")
    shown = set(re.findall(r"^::: mimicfl\.(?:\w+\.)*(\w+)$", page, re.MULTILINE))
    objects = {name for name in mimicfl.__all__ if not isinstance(getattr(mimicfl, name), ModuleType)}
    assert objects - shown == {"register"}  # an attribute; the page describes it in words
    assert {"Bounded", "TensorBoard", "Observed"} <= shown  # of packages
