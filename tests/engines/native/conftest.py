"""These tests use the native engine where it can be used."""

import pytest


@pytest.fixture(autouse=True)
def _native(_isolated, monkeypatch):
    monkeypatch.delenv("MIMICFL_ENGINE")
