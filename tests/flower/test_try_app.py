"""`python try_it.py`: settings on the command line, and mistakes as one sentence with exit code 2."""

import warnings
from types import SimpleNamespace

import pytest

import mimicfl.flower as mff
from mimicfl.errors import UsageError
from mimicfl.flower.app import make_strategy
from mimicfl.flower.new_app import new_app
from tests.flower.problems import N, app, problem
from tests.flower.test_app import run

CONFIG = {"num-rounds": "1", "num-clients": str(N), "algorithm": '"fedavg"', "folder": '""', "my-own": "3", "lr": "0.05"}


@pytest.fixture
def project(tmp_path):
    lines = [f"{key} = {value}" for key, value in CONFIG.items()]
    file = tmp_path / "pyproject.toml"
    file.write_text("\n".join(["[tool.flwr.app.config]", *lines, ""]))
    return file


def tried(project, *arguments):
    return mff.try_app(mff.server_app(lambda: problem()[2]), app(), project, arguments)


def test_settings_of_the_file_and_of_the_command_line(project, tmp_path):
    assert tried(project, f"folder='{tmp_path / 'run'}'", "num-rounds=3", "my-own=4", "average=9") == 0
    lines = (tmp_path / "run" / "rows.jsonl").read_text().splitlines()
    assert len(lines) == 3
    assert 'algorithm = "fedavg"' in (tmp_path / "run" / "config.toml").read_text()
    assert tried(project, f"folder='{tmp_path / 'other'}'", "num_rounds=2") == 0
    assert len((tmp_path / "other" / "rows.jsonl").read_text().splitlines()) == 2


MISTAKES = {
    "numrounds=2": "there is no setting 'numrounds'; did you mean 'num-rounds'?",
    'algoritm="fedavg"': "there is no setting 'algoritm'; did you mean 'algorithm'?",
    "my-onw=4": "there is no setting 'my-onw'; did you mean 'my-own'?",
    "algorithm=mimic": "'algorithm=mimic' is not valid TOML; text needs quotes of its own: 'algorithm=\"mimic\"'",
    "num-rounds": "'num-rounds' is not a setting; write NAME=VALUE, such as num-rounds=3",
    "num-rounds=[": "'num-rounds=[' is not valid TOML",
    'form="cloud"': "form 'cloud' is unknown",
    "num-clients=0": "num-clients must be a whole number of at least 1, got 0",
    'algorithm="nowhere-near"': "server_app.py",
}


@pytest.mark.parametrize("argument", MISTAKES)
def test_a_mistake_is_one_sentence(project, argument, capsys):
    assert tried(project, argument) == 2
    said = capsys.readouterr().err
    last = said.strip().splitlines()[-1]
    assert last.startswith("try_it.py: ")
    assert MISTAKES[argument] in last
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("text", "message"), [("", "has no table"), ("[tool", "not valid TOML"), ("[tool.flwr.app.config]\nlr = 1\n", "num-clients")]
)
def test_a_file_without_settings(project, text, message, capsys):
    project.write_text(text)
    assert tried(project) == 2
    assert message in capsys.readouterr().err


def test_misspelt_settings_are_refused_in_python_too():
    """Other unknown keys belong to the user's app, and so does one that resembles a setting which is given as well."""
    server = mff.server_app(lambda: problem()[2], num_clients=N, lr=0.05)
    for key, meant in (("numrounds", "num-rounds"), ("algoritm", "algorithm"), ("num-round", "num-rounds")):
        with pytest.raises(UsageError, match=f"'{key}'; did you mean '{meant}'"):
            mff.simulate(server, app(), N, {key: 2})
    mff.simulate(server, app(), N, {"num-rounds": 1, "seed": 0, "seeds": "a,b", "batch-size": 3})


def test_an_app_of_its_own_settings_does_not_warn(flower_log):
    flower_log.lines.clear()
    strategy = make_strategy([], {})
    assert (strategy.fraction_evaluate, strategy.min_evaluate_nodes) == (0.0, 0)
    assert not flower_log.count("fraction_evaluate")
    make_strategy([], {"fraction_evaluate": 0.0})
    assert flower_log.count("fraction_evaluate", "skipped") == 1


@pytest.mark.slow
def test_the_template_says_so_too_and_does_not_warn_on_its_own_data(tmp_path, monkeypatch):
    target = new_app(tmp_path / "small")
    done = run("try_it.py", "numrounds=2", folder=target)
    assert (done.returncode, done.stderr) == (2, "try_it.py: there is no setting 'numrounds'; did you mean 'num-rounds'?\n")
    monkeypatch.syspath_prepend(str(target))
    from small import task  # type: ignore[import-not-found]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert task.data(SimpleNamespace(node_config={"partition-id": 3, "num-partitions": 10})).num_train
