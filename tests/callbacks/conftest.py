"""Rows are sent to trackers at once, and W&B writes into the folder of the test."""

import pytest

from mimicfl.callbacks import tracker as trackers


@pytest.fixture
def at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(trackers, "FLUSH_EVERY", 0.0)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
