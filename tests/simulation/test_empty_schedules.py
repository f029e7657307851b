"""Runs in which no client ever trains are refused; a warning says that most rounds train nothing."""

import warnings

import numpy as np
import pytest

import mimicfl as mf
from mimicfl.cli.main import main
from mimicfl.participation.run_schedule import Participation
from mimicfl.participation.stages import Stages
from mimicfl.simulation.checks import check_participation

LOCAL = mf.LocalSGD(steps=1)
HOURS = "client,start,end,period\n" + "".join(f"phone{k},{7200 + 60 * k},10800,86400\n" for k in range(30))


def explicit(*active):
    return mf.availability.Explicit(np.repeat(np.array(active, dtype=bool)[:, None], 30, axis=1))


def test_a_run_without_participation_is_refused(digits):
    with pytest.raises(mf.UsageError, match="no client is available in 3 rounds, so nothing would be trained"):
        mf.simulate(**digits, availability="static:0", rounds=3, local=LOCAL)


def test_available_clients_that_never_finish_are_refused():
    everyone = np.ones((2, 3), dtype=bool)
    with pytest.raises(mf.UsageError, match="no available client is selected and finishes in 2 rounds"):
        check_participation(Participation(everyone, ~everyone, Stages()), limited=True)


def test_the_command_names_the_length_of_a_round(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.csv").write_text(HOURS)
    command = ["compare", "--availability", "trace:trace.csv", "--rounds", "5", "--seeds", "1", "--out", "runs"]
    assert main(command) == 2
    assert "no client is available in 5 rounds of 270 s (1,350 s in all)" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_mostly_empty_runs_warn(digits):
    with pytest.warns(UserWarning, match=r"about 80 % of the rounds have no active client"):
        mf.simulate(**digits, availability=explicit(1, 0, 0, 0, 0), local=LOCAL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mf.simulate(**digits, availability=explicit(1, 0), local=LOCAL)
        mf.simulate(**digits, availability=explicit(0, 0, 0, 1), uploads=1, local=LOCAL)  # its length is not in rounds
