"""A small study for tests: the built-in digits, two columns, short runs."""

import pytest

from mimicfl.paper import studies, study
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
