"""What is read and reported of a federation: which client is which, its settings, and nothing that is unknown."""

import json
import re

import numpy as np
import pytest

import mimicfl as mf
import mimicfl.flower as mff
from mimicfl.errors import UsageError
from mimicfl.metrics.store import RunFolder
from mimicfl.report import figures
from mimicfl.report.report import write_report
from tests.flower.problems import LOCAL, N, app, model_arrays, problem
from tests.flower.toy import Toy, run


def pattern(rounds=6):
    """Client 0 joins last; the others do not join in their order, either."""
    available = np.random.default_rng(0).random((rounds, N)) < 0.5
    available[0] = [False, True, False, True, False]
    available[1] = [False, False, True, False, False]
    available[-1] = True
    return available


def trained(folder, availability, **options):
    strategy = mff.MimiC(lr=LOCAL.lr, fraction_evaluate=0.0, folder=folder, availability=availability, num_clients=N, **options)
    federation = mff.Federation(app(), N)
    with federation.running() as grid:
        strategy.start(grid, model_arrays(problem()[2])[0], 6, 20.0)
    return strategy


def test_clients_with_numbers_as_ids_are_read_under_these(tmp_path):
    available = pattern()
    strategy = trained(tmp_path / "run", mf.availability.Explicit(available))
    history = mf.read(tmp_path / "run")
    assert np.array_equal(history.active, available)
    assert [row["clients"] for row in strategy.rows[:2]] == [[0, 1], [2]]  # on disk: in the order in which they joined
    assert [row["clients"] for row in RunFolder(tmp_path / "run").rows()] == [row["clients"] for row in strategy.rows]
    page = write_report([tmp_path / "run"]).page.read_text()
    assert data_of(page)["schedules"][0]["active"] == [np.flatnonzero(row).tolist() for row in available]
    assert "in the order in which they joined" not in page


def data_of(page):
    return json.loads(re.search(r"const DATA = (.*?);\n", page).group(1))


def figure_words(figure):
    return [text.get_text() for axes in figure.axes for text in (axes.title, axes.yaxis.label, axes.xaxis.label, axes._left_title)]


@pytest.fixture
def drawn(monkeypatch):
    """The words of every figure that is saved."""
    words = []
    save = figures.save

    def saved(figure, path):
        words.extend(figure_words(figure))
        return save(figure, path)

    monkeypatch.setattr(figures, "save", saved)
    return words


def test_named_clients_are_numbered_in_the_order_of_joining_and_the_page_says_so(tmp_path, drawn):
    strategy = mff.MimiC(lr=0.3, fraction_evaluate=0.0, folder=tmp_path / "run", client_ids="node", wait_for=3)
    run(strategy, Toy(), rounds=2)
    assert all(not client.isdigit() for client in strategy.rows[0]["answered"])
    page = write_report([tmp_path / "run"]).page.read_text()
    assert "in the order in which they joined" in page
    assert "client, in the order of joining" in drawn


def test_nothing_unknown_is_shown(tmp_path, drawn):
    strategy = mff.MimiC(lr=0.3, fraction_evaluate=0.0, folder=tmp_path / "run", wait_for=3)  # without num_clients
    run(strategy, Toy(), rounds=2)
    page = write_report([tmp_path / "run"]).page.read_text()
    body = re.sub(r"<style.*?</style>|<script>.*", "", page, flags=re.DOTALL)
    assert "None" not in body
    assert "on data" not in body
    assert "<h1>MimiC with client dropouts</h1>" in body
    assert data_of(page)["schedules"][0]["title"] == "seed 0"
    assert "seed 0" in drawn
    assert not [word for word in drawn if "None" in word]


def test_the_availability_is_among_the_settings(tmp_path):
    trained(tmp_path / "run", "static:0.9")
    assert RunFolder(tmp_path / "run").config["availability"] == "static:p=0.9"
    assert "static:p=0.9" in write_report([tmp_path / "run"]).page.read_text()
    with pytest.raises(UsageError, match="availability"):
        trained(tmp_path / "run", "static:0.8")


def test_a_folder_without_a_pattern_is_not_resumed_under_one(tmp_path):
    trained(tmp_path / "run", None)
    assert "availability" not in write_report([tmp_path / "run"]).page.read_text().split('class="chips"')[1].split("</p>")[0]
    with pytest.raises(UsageError, match="availability"):
        trained(tmp_path / "run", "static:0.9")


def test_a_folder_of_an_earlier_version_without_the_availability_is_resumed(tmp_path):
    trained(tmp_path / "run", None)
    settings = tmp_path / "run" / "config.toml"
    settings.write_text("".join(line for line in settings.read_text().splitlines(keepends=True) if "availability" not in line))
    trained(tmp_path / "run", "static:0.9")
