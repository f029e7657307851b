"""A finished run, for tests of run folders."""

import pytest

import mimicfl as mf


@pytest.fixture
def finished(tmp_path):
    mf.run(mf.Experiment(rounds=3, availability="static:0.3"), tmp_path / "run")
    return tmp_path / "run"
