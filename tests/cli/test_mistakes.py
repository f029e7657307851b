"""Mistakes on the command line: a sentence, exit code 2, nothing begun."""

from pathlib import Path

import pytest

from tests.cli.conftest import call


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("run --algorithm mimick", "did you mean 'mimic'"),
        ("run --dataset digitz", "did you mean 'digits'"),
        ("run --availability bound:3", "did you mean 'bounded'"),
        ("run --availability static:1.2", "must lie in [0, 1]"),
        ("run --partition shard:2", "did you mean 'shards'"),
        ("run --partition shards:900", "shards were requested of 1442 samples"),
        ("run --clients 2000", "too many for 1442 samples"),
        ("run --model lennet", "did you mean 'lenet'"),
        ("run --rounds 0", "rounds must be a whole number of at least 1"),
        ("run --rounds ten", "rounds must be a whole number"),
        ("run --lr -1", "rate must be more than 0"),
        ("run --lr fast", "learning rate 'fast' is unknown"),
        ("run --batch-size none", "batch_size"),
        ("run --epochs 2 --steps 3", "epochs or steps, not both"),
        ("run --update max", "update 'max' is unknown"),
        ("run --dtype float16", "dtype"),
        ("run --device tpu9", "device 'tpu9' is unknown"),
        ("run --roundz 3", "there is no option --roundz; did you mean '--rounds'"),
        ("run nowhere.toml", "nowhere.toml does not exist"),
        ("run --algorithm fedprox:nu=1", "has no option 'nu'; it has: mu"),
        ("run --plugin nowhere.py", "nowhere.py does not exist"),
        ("run --plugin no_such_module", "cannot be imported"),
        ("run --loss mse", "the loss does not fit outputs of shape (2, 10)"),
        ("run --lr 1e300", "rate must be more than 0 and at most"),
        ("run --device mps", "device 'mps' is unknown"),
        ("run --model mlp:hidden=3", "has no option 'hidden'"),
        ("run --rounds 1000000000000", "rounds must be at most"),
        ("run --algorithm mimic:[/b]", "memory '[/b]' is unknown"),
        ("run --engine warp", "engine 'warp' is unknown"),
        ("run --engine streams", "engine streams needs a GPU"),
        ("run --engine streams:4:compiled", "engine streams needs a GPU"),
        ("run --engine batched:0", "engine 'batched:0' is not valid"),
        ("run --engine batched:4:fast", "as in batched:128:compiled"),
        ("run --engine streams:64", "streams up to 16"),
        ("run --engine batched:²", "is not valid"),
        ("run --engine native:4", "as in batched:128:compiled"),
        ("compare --engine streams", "engine streams needs a GPU"),
        ("run --state-budget lots", "state_budget must be"),
        ("run --precision fp16", "precision 'fp16' is unknown"),
        ("run --precision bf16", "precision bf16 needs a GPU"),
        ("compare --algorithms fedavg scaffold:uploads=2 --uploads 1", "uploads of one round"),
        ("run --availability explicit:nowhere.csv", "cannot read a schedule"),
        ("run --algorithm fedprox:mu=abc", "takes a number for 'mu', got 'abc'"),
        ("run --availability markov:0.1,yes", "takes a number for"),
        ("run --algorithm fedavgm:damped=False", "takes true or false for 'damped', got 'False'"),
        ("run --plugin .", "neither a Python file"),
        ("run --momentum 1", "momentum must be at least 0 and less than 1, got 1.0"),
        ("run --data-path /nowhere --dataset fmnist", "does not exist"),
        ("resume nowhere", "nowhere does not exist"),
        ("report nowhere", "does not exist"),
        ("compare --algorithms fedavg mimik", "did you mean 'mimic'"),
        ("compare --seeds some", "seeds takes a count"),
        ("compare --seeds 0", "seeds must be a whole number"),
        ("data fetch", "name a dataset"),
        ("data fetch imagenet", "dataset 'imagenet' is unknown"),
        ("availability show static:0.1 --rounds 0", "--rounds"),
        ("availability show static:0.1 --out picture.gif", "ending of --out"),
        ("fly", "command 'fly' is unknown"),
        ("comapre --seeds 2", "did you mean 'compare'"),
        ("data fetsh", "did you mean 'fetch'"),
    ],
)
def test_mistakes_give_one_line_and_exit_code_2(capsys, words, answer):
    try:
        code = call(*words.split())
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    captured = capsys.readouterr()
    assert answer in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""  # no line says that anything begins
    assert not Path("runs").exists()  # nothing was begun


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        ('algoritm = "mimic"', "there is no setting 'algoritm'; did you mean 'algorithm'"),
        ("rounds = true", "rounds cannot be True"),
        ('rounds = "many"', "rounds must be a whole number"),
        ("rounds = 3.5", "rounds must be a whole number"),
        ("algorithm = 3", "algorithm must be a string"),
        ("[run]\nrounds = 3", "there is no setting 'run'"),
        ("rounds = = 3", "not valid TOML"),
        ("rounds = 3\n[grid]\nseed = 2", "use mimicfl sweep"),
    ],
)
def test_mistakes_in_toml(capsys, content, answer):
    Path("e.toml").write_text(content)
    assert call("run", "e.toml") == 2
    assert answer in capsys.readouterr().err


def test_algorithms_of_a_comparison_in_toml_are_texts(capsys):
    for value in ("3", "[3]"):
        Path("e.toml").write_text(f"algorithms = {value}")
        assert call("compare", "e.toml") == 2
        assert "got 3" in capsys.readouterr().err


def test_a_mistake_in_a_grid_is_found_first(capsys):
    Path("grid.toml").write_text('[grid]\nalgorithm = ["fedavg", "mimik"]\n')
    assert call("sweep", "grid.toml") == 2
    captured = capsys.readouterr()
    assert "did you mean 'mimic'" in captured.err
    assert captured.out == ""


def test_a_plugin_that_fails_is_reported_in_one_line(capsys):
    for content, words in (
        ("1 / 0", "ZeroDivisionError in line 1"),
        ("import", "SyntaxError in line 1"),
        ("raise SystemExit(3)", "SystemExit"),
    ):
        Path("bad.py").write_text(content)
        assert call("run", "--plugin", "bad.py", "--rounds", 2) == 2
        assert words in capsys.readouterr().err
