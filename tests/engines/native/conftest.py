"""These tests share one compile cache, so that each small network is compiled only once."""

import pytest


@pytest.fixture(autouse=True)
def _shared_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("MIMICFL_CACHE", str(tmp_path_factory.getbasetemp() / "native-cache"))
    monkeypatch.delenv("MIMICFL_ENGINE")
