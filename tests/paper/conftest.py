"""A small study for tests: the built-in digits, two columns, short runs; its runs and its records."""

import shutil

import pytest

from mimicfl.paper import studies, study
from mimicfl.paper.reproduce import cells, plan_of, reproduce
from mimicfl.paper.study import Study

TINY = Study(
    "tiny",
    "Table 0, digits",
    "Two columns of short runs.",
    "digits",
    "P",
    {"10%": {"availability": "time-varying:0.1,warm_start=true"}, "50%": {"availability": "time-varying:0.5,warm_start=true"}},
    ("fedavg", "scaffold", "mimic"),
    published={
        name: {"10%": (mean, 1.5), "50%": (mean + 1, None)} for name, mean in (("fedavg", 50.0), ("scaffold", 40.0), ("mimic", 60.0))
    },
)


@pytest.fixture
def tiny(monkeypatch):
    base = study.COMMON | {"dataset": "digits", "model": "mlp", "batch_size": 16, "lr": "geometric:0.1,0.9,floor=1e-05", "uploads": 6}
    monkeypatch.setitem(study.BASE, "digits", base | {"num_clients": 10, "epochs": 2})
    monkeypatch.setitem(studies.STUDIES, "tiny", TINY)
    return TINY


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    """A folder for the runs and records of the tiny study; the first test that needs them makes them."""
    return tmp_path_factory.mktemp("made")


@pytest.fixture
def made(tiny, template, tmp_path):
    """The plan of the tiny study, with a copy of its runs and records in `tmp_path`."""
    plan = plan_of(list(cells([tiny])), [0, 1], 1.0, {})
    if not (template / "done").exists():
        assert reproduce(plan, template / "runs", template / "records") == (0, [])
        (template / "done").touch()
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    return plan
