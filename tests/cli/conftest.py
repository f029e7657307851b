"""Every test of the command line starts in a folder of its own."""

import pytest

from mimicfl.cli.main import main


@pytest.fixture(autouse=True)
def _in_a_new_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def call(*words):
    return main([str(word) for word in words])
