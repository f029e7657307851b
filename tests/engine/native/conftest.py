"""One library cache for these tests: the same small network need not be compiled for each."""

import pytest


@pytest.fixture(autouse=True)
def _shared_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("MIMICFL_CACHE", str(tmp_path_factory.getbasetemp() / "native-cache"))
    monkeypatch.delenv("MIMICFL_ENGINE")
