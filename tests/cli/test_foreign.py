"""Run folders from others: reading them runs none of their code, damage gives an error message, and the terminal gets plain text."""

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from mimicfl.algorithms import ALGORITHMS
from mimicfl.cli.console import PatientConsole, console
from mimicfl.cli.progress import Reporter
from mimicfl.errors import UsageError
from mimicfl.metrics.store import RunFolder
from mimicfl.settings import Experiment
from mimicfl.text import visible
from tests.cli.conftest import call
from tests.cli.test_plugins import PLUGIN
from tests.conftest import forge

SMALL = "--clients 6 --rounds 3 --steps 1 --availability static:0.6,warm_start=true --batch-size full --lr 0.05"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished run on digits, and a diagnosed one."""
    folder = tmp_path_factory.mktemp("made")
    assert call("run", *SMALL.split(), "--out", folder / "plain") == 0
    assert call("run", "--dataset", "synthetic:quadratic", *SMALL.split(), "--diagnose", "every=1", "--out", folder / "diagnosed") == 0
    return folder


@pytest.fixture
def run(made, tmp_path):
    """A copy of the finished run, to be damaged."""
    return Path(shutil.copytree(made / "plain", tmp_path / "run"))


def settings(run, **changes):
    """Change lines of config.toml; values are TOML."""
    file = run / "config.toml"
    lines = [line for line in file.read_text().splitlines() if line.split(" = ")[0] not in changes]
    file.write_text("\n".join([*lines, *(f"{key} = {value}" for key, value in changes.items())]) + "\n")
    with contextlib.suppress(UsageError):  # unreadable settings cannot be signed either
        forge(run)


def change_row(run, t, change):
    rows = RunFolder(run).rows()
    change(rows[t])
    forge(run, rows=rows)
    (run / "final.safetensors").unlink(missing_ok=True)


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """An unfinished run with a custom algorithm, whose plugin leaves a mark when it is imported."""
    (tmp_path / "lazy.py").write_text(PLUGIN + "\nopen('mark', 'w').close()\n")
    assert call("run", "--plugin", "lazy.py", "--algorithm", "lazy", *SMALL.split(), "--out", "foreign") == 0
    Path("foreign/final.safetensors").unlink()
    Path("mark").unlink()
    monkeypatch.delitem(ALGORITHMS.factories, "lazy")  # as in a new process
    monkeypatch.delitem(sys.modules, "mimicfl_plugin_lazy")
    return Path("foreign")


@pytest.mark.slow
def test_reading_a_run_does_not_import_its_plugins(foreign, capsys):
    capsys.readouterr()
    assert call("report", foreign) == 0
    assert call("theory", "check", foreign, "--L", 2, "--K", 1) == 0
    assert call("theory", "show", foreign) == 2
    assert call("theory", "check", foreign) == 2
    error = capsys.readouterr().err
    assert not Path("mark").exists()
    assert "lazy.py" in error  # the file the run was made with
    assert "--plugin FILE" in error


@pytest.mark.slow
def test_a_plugin_is_imported_where_the_user_names_it(foreign, capsys):
    assert call("theory", "check", foreign, "--plugin", "lazy.py") == 0
    assert Path("mark").exists()
    assert "L = " in capsys.readouterr().out


@pytest.mark.slow
def test_known_names_need_no_plugin_and_import_none(run, tmp_path):
    (tmp_path / "evil.py").write_text("open('mark', 'w').close()\n")
    settings(run, plugins=json.dumps([str(tmp_path / "evil.py")]))
    assert call("theory", "check", run) == 0
    assert not Path("mark").exists()


def test_resuming_says_which_files_it_imports(foreign, capsys):
    assert call("resume", foreign) == 0
    error = capsys.readouterr().err
    assert "importing the plugins" in error
    assert str(Path("lazy.py").resolve()) in error


@pytest.mark.slow
@pytest.mark.parametrize("value", ['"x"', "true", "[1]", "1.5", "{a = 1}"])
def test_a_seed_that_is_no_number_is_refused(run, capsys, value):
    settings(run, seed=value)
    for words in (["report", run], ["theory", "check", run], ["theory", "show", run]):
        assert call(*words) == 2
        assert "seed must be a whole number" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["algorithm", "availability", "momentum", "num_clients", "source"])
def test_settings_of_the_wrong_type_are_refused(run, capsys, key):
    settings(run, **{key: '["a"]'})
    assert call("report", run) == 2
    assert f"{key} must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda row: row.pop("global_lr"), "global_lr"),
        (lambda row: row.update(global_lr="fast"), "global_lr"),
        (lambda row: row.update(global_lr=-1.0), "global_lr"),
        (lambda row: row.update(local_lr=None), "local_lr"),
    ],
)
def test_a_damaged_rate_is_refused(run, capsys, change, word):
    change_row(run, 1, change)
    assert call("theory", "check", run, "--L", 2, "--K", 1) == 2
    error = capsys.readouterr().err
    assert word in error
    assert "round 1" in error


@pytest.mark.slow
@pytest.mark.parametrize("key", ["K", "E", "L", "kappa2", "sigma2", "memory", "staleness", "f_low", "newcomers"])
@pytest.mark.parametrize("value", ["x", [None], {"a": "b"}])
def test_a_damaged_diagnosis_is_refused(made, tmp_path, capsys, key, value):
    run = Path(shutil.copytree(made / "diagnosed", tmp_path / "run"))
    change_row(run, 1, lambda row: row["diagnosis"].update({key: value}))
    for words in (["theory", "check", run], ["theory", "show", run], ["report", run]):
        assert call(*words) == 2
        error = capsys.readouterr().err
        assert "diagnosis of round 1 is damaged" in error
        assert key in error


@pytest.mark.slow
@pytest.mark.parametrize("value", [[[1], 0.5], ["x"], 3, {"a": 1}, [10**400]])
def test_a_damaged_accuracy_by_class_is_refused(run, capsys, value):
    change_row(run, 2, lambda row: row.update(class_accuracy=value))
    assert call("report", run) == 2
    assert "class_accuracy" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        r'plugins = ["a\u0000.py"]',
        r'plugins = ["a\u0000"]',
        r'data_path = "a\u0000"',
        r'availability = "explicit:a\u0000.csv"',
        r"""availability = 'explicit:"a\u0000.csv"'""",
        r'model = "a\u0000"',
    ],
)
@pytest.mark.parametrize("command", ["run", "compare", "sweep"])
def test_nul_in_a_setting_is_refused(capsys, line, command):
    Path("e.toml").write_text(line + "\n" + "[grid]\nseed = [0, 1]\n" * (command == "sweep"))
    assert call(command, "e.toml") == 2
    assert "NUL" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["report", "a\0"], ["run", "a\0.toml"], ["resume", "\0"], ["flower", "new", "a\0"], ["demo", "--out", "a\0b"]]
)
def test_nul_in_an_argument_is_refused(capsys, words):
    assert call(*words) == 2
    assert "NUL" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["a = " + "[" * 5000 + "]" * 5000, "rounds = 1" + "0" * 5000, "lr = 1" + "0" * 400])
def test_huge_settings_are_refused(capsys, text):
    Path("e.toml").write_text(text)
    assert call("run", "e.toml") == 2
    assert "e.toml" in capsys.readouterr().err


@pytest.mark.slow
def test_escape_sequences_of_a_run_do_not_reach_the_terminal(run, capsys):
    nasty = json.dumps("fed\x1b]0;title\x07\x1b[2J\u202eavg")
    settings(run, algorithm=nasty, availability=nasty, dataset=nasty, plugins=f"[{nasty}]")
    assert call("report", run) == 0
    assert call("theory", "check", run) == 2
    assert call("theory", "check", run, "--L", 2, "--K", 1) == 0
    settings(run, seed=nasty)
    assert call("report", run) == 2
    captured = capsys.readouterr()
    for text in captured:
        assert r"\x1b[2J" in text
        assert not {"\x1b", "\x07", "\u202e"} & set(text)


def test_progress_on_a_terminal_shows_names_as_they_are(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    shown = PatientConsole(force_terminal=True, width=100, color_system=None, file=open(os.devnull, "w"), record=True)  # noqa: SIM115
    with Reporter(shown) as progress:
        progress(Experiment(algorithm="[bold]\x1b]0;x"), {"round": 0, "test_accuracy": 0.5}, 2)
        shown.print(progress.bars.get_renderable())
    text = shown.export_text()
    shown.file.close()
    assert r"[bold]\x1b]0;x" in text


def test_invisible_characters_are_escaped():
    assert visible("é 漢字\n\ttab") == "é 漢字\n\ttab"
    assert visible("a\nb", keep="") == r"a\x0ab"
    assert visible("\x1b\x9b\u2028\ud800\U000e0001") == r"\x1b\x9b\u2028\ud800\U000e0001"
    assert console().width


def test_status_without_records_says_how_to_give_them(capsys):
    assert call("reproduce", "--status") == 2
    captured = capsys.readouterr()
    assert "no records folder here" in captured.err
    assert "--records DIR" in captured.err
    assert captured.out == ""


def test_bytes_that_are_no_text_are_refused(capsys):
    """As Python decodes an argument that is not UTF-8."""
    assert call("run", "--data-path", "\udcff", *SMALL.split()) == 2
    assert "UTF-8" in capsys.readouterr().err
