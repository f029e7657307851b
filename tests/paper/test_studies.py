"""The declared experiments are complete, match the paper, and do not depend on defaults."""

import math

import pytest

import mimicfl as mf
from mimicfl import algorithms
from mimicfl.clients.lr import schedule
from mimicfl.errors import UsageError
from mimicfl.paper.studies import STUDIES, find
from mimicfl.paper.study import BASE, shortened
from mimicfl.settings import SETTINGS, Experiment

ALL_RUNS = [(study, column, algorithm) for study in STUDIES.values() for column in study.columns for algorithm in study.algorithms]


def test_every_table_and_figure_of_section_six_has_a_study():
    expected = {"table-3", "table-4-fmnist", "table-4-cifar10", "table-5", *[f"figure-{k}" for k in range(4, 9)]}
    assert expected | {"no-dropouts-fmnist", "no-dropouts-cifar10"} <= set(STUDIES)


@pytest.mark.parametrize(("study", "column", "algorithm"), ALL_RUNS)
def test_experiments_are_valid_and_fully_resolved(study, column, algorithm):
    """No setting is left at `auto`, so a later change of a default cannot change a recorded run."""
    e = study.experiment(column, algorithm, 2)
    assert e.resolved() == e
    assert "auto" not in [value for key, value in e.to_dict().items() if key not in ("engine", "state_budget")]
    assert e.seed == study.first_seed + 2
    algorithms.make(e.algorithm)
    mf.availability.make(e.availability)
    schedule(e.lr)


@pytest.mark.parametrize("study", [study for study in STUDIES.values() if study.published], ids=lambda study: study.name)
def test_published_values_cover_every_cell(study):
    assert {a: set(row) for a, row in study.published.items()} == {a: set(study.columns) for a in study.algorithms}


def test_published_values():
    table = STUDIES["table-4-fmnist"].published
    assert table["mimic"]["10%"] == (72.22, 5.28)
    assert table["fedavg"]["50%"] == (71.31, 1.09)
    assert STUDIES["table-3"].published["scaffold"]["100"] == (68.7, None)
    assert STUDIES["table-5"].published["mifa"]["5"] == (77.06, None)
    assert STUDIES["no-dropouts-cifar10"].published["fedavg"] == {"nobody drops out": (62.48, None)}


def test_settings_of_table_two():
    fmnist, cifar = (Experiment(**BASE[name]) for name in ("fmnist", "cifar10"))
    assert (fmnist.batch_size, fmnist.epochs, fmnist.uploads, fmnist.num_clients) == (16, 5, 200, 30)
    assert (cifar.batch_size, cifar.epochs, cifar.uploads, cifar.num_clients) == (32, 5, 400, 30)
    assert schedule(fmnist.lr)(10, 3) == pytest.approx(0.01 * 0.95**10)
    assert schedule(cifar.lr)(10, 3) == pytest.approx(0.01 * 0.99**10)


def test_studies_share_identical_runs():
    table, figure = STUDIES["table-3"], STUDIES["figure-4"]
    assert table.experiment("20", "mimic", 1).id == figure.experiment("20", "mimic", 1).id
    assert STUDIES["choices"].experiment("as chosen", "mimic", 0).id == STUDIES["table-4-fmnist"].experiment("10%", "mimic", 0).id


def test_scaled_runs_are_shorter_and_decay_to_the_same_rate():
    e = STUDIES["table-4-fmnist"].experiment("10%", "mimic", 0)
    small = shortened(e, 0.1)
    assert (small.uploads, small.epochs, small.eval_every) == (20, 1, 1)
    assert schedule(small.lr)(20, 3) == pytest.approx(max(schedule(e.lr)(200, 3), 1e-5), rel=1e-3)
    assert schedule(small.lr)(10, 3) == pytest.approx(schedule(e.lr)(100, 3), rel=1e-3)
    assert small.id != e.id
    assert shortened(e, 1.0) is e
    for wrong in (0.0, -1.0, 1.5, math.nan):
        with pytest.raises(UsageError, match="--scale"):
            shortened(e, wrong)


def test_find_studies_by_name():
    assert find(["all"]) == list(STUDIES.values())
    assert [study.name for study in find(["table-3", "figure-4", "table-3"])] == ["table-3", "figure-4"]
    with pytest.raises(UsageError, match="table-3"):
        find(["tabel-3"])


def test_settings_of_the_studies_exist():
    for study in STUDIES.values():
        for settings in study.columns.values():
            assert set(settings) <= set(SETTINGS)
