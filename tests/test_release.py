"""The version is in one place, and the public workflow runs what the Makefile has."""

import importlib.util
import re
import subprocess
import sys
import tomllib

import pytest
import yaml

import mimicfl
from tests.conftest import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_the_version_is_in_one_place():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in settings["project"]["dynamic"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "mimicfl._version.__version__"}
    assert f"\nversion: {mimicfl.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    others = [file for file in (ROOT / "src").rglob("*.py") if f'"{mimicfl.__version__}"' in file.read_text()]
    assert [file.name for file in others] == ["_version.py"]


def test_a_wheel_holds_every_file_of_the_package():
    """`make dist` checks the wheel itself; this finds a new kind of file at once."""
    package = ROOT / "src" / "mimicfl"
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["mimicfl"]
    included = {file for pattern in declared for file in package.glob(pattern) if file.is_file()}
    files = {file for file in package.rglob("*") if file.is_file() and file.suffix not in (".py", ".pyc")}
    assert files == {file for file in included if file.suffix not in (".py", ".pyc")}


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_package_index_shows_the_readme_without_broken_links():
    setup, relative_links = loaded(ROOT / "setup.py"), loaded(ROOT / ".ci" / "check_dist.py").relative_links
    assert relative_links((ROOT / "README.md").read_text())
    assert relative_links(setup.readme()) == []
    text = "![p](docs/a.png) [b](docs/b.md#c) [d](https://e.org) [f](#g)"
    assert setup.for_index(text) == " b [d](https://e.org) [f](#g)"
    assert setup.for_index(text, "https://h.org/x/", "1.0") == (
        "![p](https://h.org/x/raw/v1.0/docs/a.png) [b](https://h.org/x/blob/v1.0/docs/b.md#c) [d](https://e.org) [f](#g)"
    )


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_workflows_run_targets_that_exist(file):
    jobs = yaml.safe_load(file.read_text())["jobs"]
    makefile = (ROOT / "Makefile").read_text()
    targets = {target for job in jobs.values() for target in job["strategy"]["matrix"].get("target", [])}
    targets |= set(re.findall(r"run: make (\w+)$", file.read_text(), re.MULTILINE))
    assert targets == {"quick", "test", "lint", "site", "dist"}
    assert all(f"\n{target}:" in makefile for target in targets)
    assert jobs["quick"]["strategy"]["matrix"]["python"][0] == "3.11"  # as requires-python says


def test_classifiers_name_versions_that_the_workflow_tries():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    matrix = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]["quick"]["strategy"]["matrix"]
    claimed = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert claimed[0] == project["requires-python"].removeprefix(">=")
    assert set(claimed) <= set(matrix["python"])
    said = re.search(r"tests on Python (3\.\d+) to (3\.\d+)", (ROOT / "docs" / "release.md").read_text())
    assert said.groups() == (matrix["python"][0], matrix["python"][-1])


@pytest.mark.slow
def test_import_does_not_load_torch():
    """`import mimicfl` is free; PyTorch is imported when the first public name is used."""
    program = "import sys, mimicfl; assert 'torch' not in sys.modules; mimicfl.simulate; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.slow
def test_the_public_names_import_nothing_heavy():
    """pandas, Ray, Flower, matplotlib and the trackers are imported when they are used."""
    heavy = "{'pandas', 'ray', 'flwr', 'matplotlib', 'IPython', 'tensorboard', 'wandb', 'mlflow', 'rich'}"
    program = f"import sys, mimicfl; mimicfl.simulate; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
