"""The search for runs is bounded and skips hidden folders, symbolic links and the inside of runs."""

import os
from pathlib import Path

import pytest

from mimicfl.errors import UsageError
from mimicfl.metrics import find
from mimicfl.metrics.find import config_files


def run_at(path):
    path.mkdir(parents=True)
    (path / "config.toml").write_text("seed = 0\n")
    return path


def test_runs_are_found_in_order_but_not_inside_other_runs(tmp_path):
    found = [run_at(tmp_path / name) for name in ("b/deep/er", "a", "b/c")]
    run_at(tmp_path / "a" / "inner")
    run_at(tmp_path / ".hidden" / "run")
    (tmp_path / "empty").mkdir()
    assert config_files(tmp_path) == sorted(found)
    assert config_files(tmp_path / "a") == [tmp_path / "a"]
    assert config_files(tmp_path / "empty") == []
    assert config_files(tmp_path / ".hidden") == [tmp_path / ".hidden" / "run"]  # given explicitly


def test_a_folder_named_config_toml_is_not_a_run(tmp_path):
    run_at(tmp_path / "config.toml" / "run")
    assert config_files(tmp_path) == [tmp_path / "config.toml" / "run"]


def test_links_are_not_followed(tmp_path):
    run_at(tmp_path / "elsewhere" / "run")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "here" / "loop").symlink_to(tmp_path / "here")
    assert config_files(tmp_path / "here") == []
    assert config_files(tmp_path / "here" / "link") == [tmp_path / "here" / "link" / "run"]


@pytest.mark.parametrize("start", ["/", "~", "~/.."])
def test_root_and_home_folder_are_refused_without_reading_them(start, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path) if start == "~" else "/home")
    monkeypatch.setattr(os, "scandir", lambda path: pytest.fail(f"{path} was read"))
    with pytest.raises(UsageError, match=r"too large to search.*runs/demo"):
        config_files(Path(start.replace("~", os.environ["HOME"])))


def test_a_home_folder_can_be_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "config.toml").write_text("")
    assert config_files(tmp_path) == [tmp_path]


def test_too_many_or_too_deep_folders_are_refused(tmp_path, monkeypatch):
    for k in range(12):
        (tmp_path / "wide" / str(k)).mkdir(parents=True)
    deep = tmp_path / "deep"
    deep.joinpath(*"abcdef").mkdir(parents=True)
    monkeypatch.setattr(find, "MOST_FOLDERS", 12)
    monkeypatch.setattr(find, "DEEPEST", 5)
    with pytest.raises(UsageError, match="more than 12 folders"):
        config_files(tmp_path / "wide")
    with pytest.raises(UsageError, match="more than 5 levels"):
        config_files(deep)
    assert config_files(deep / "a") == []


def test_unreadable_folders_are_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be searched"):
        config_files(tmp_path / "file")

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UsageError, match="Permission denied"):
        config_files(tmp_path)
