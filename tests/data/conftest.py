"""Each of these tests has a cache of its own: they store datasets there, and damage them."""

import pytest


@pytest.fixture(autouse=True)
def _own_cache(_isolated, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("MIMICFL_CACHE", str(tmp_path_factory.mktemp("cache")))
