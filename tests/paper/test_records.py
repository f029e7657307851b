"""Records of runs: damaged or incomplete ones are refused, and named in the error."""

import json

import pytest

from mimicfl.errors import UsageError
from mimicfl.paper.records import read, read_all


@pytest.mark.parametrize("text", ["", "{}", '{"format": "other"}', "[1]", "not json"])
def test_damaged_records_are_named_in_the_error(tmp_path, text):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(UsageError, match=r"bad\.json is not a record"):
        read_all(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"num_clients": "x"}, {"colour": "red"}])
def test_records_with_invalid_settings_are_named_in_the_error(tiny, made, tmp_path, change):
    file = next((tmp_path / "records").iterdir())
    record = json.loads(file.read_text())
    record["settings"] |= change
    file.write_text(json.dumps(record))
    with pytest.raises(UsageError, match=f"{file.name} is not a record"):
        read(file)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("column", "value"),
    [("test_accuracy", float("nan")), ("test_accuracy", 7.5), ("train_loss", "abc"), ("uploads", True), ("round", 10**400)],
)
def test_records_with_invalid_values_are_refused(tiny, made, tmp_path, column, value):
    file = next((tmp_path / "records").iterdir())
    record = json.loads(file.read_text())
    record["rows"][column][-1] = value
    file.write_text(json.dumps(record))
    with pytest.raises(UsageError, match=f"not a record.*{column}"):
        read(file)


@pytest.mark.slow
def test_duplicate_records_are_refused(tiny, made, tmp_path):
    file = next((tmp_path / "records").iterdir())
    (tmp_path / "records" / "zz.json").write_text(file.read_text())
    with pytest.raises(UsageError, match=r"zz\.json.*same run"):
        read_all(tmp_path / "records")


@pytest.mark.slow
def test_records_with_columns_of_different_length_are_refused(tiny, made, tmp_path):
    file = next((tmp_path / "records").iterdir())
    record = json.loads(file.read_text())
    record["rows"]["round"].pop()
    file.write_text(json.dumps(record))
    with pytest.raises(UsageError, match="not a record"):
        read(file)


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["end", "beginning"])
def test_incomplete_records_are_refused(tiny, made, tmp_path, cut):
    file = next((tmp_path / "records").iterdir())
    record = json.loads(file.read_text())
    record["rows"] = {name: values[:-2] if cut == "end" else values[2:] for name, values in record["rows"].items()}
    file.write_text(json.dumps(record))
    with pytest.raises(UsageError, match="incomplete" if cut == "end" else "consecutive"):
        read(file)


def test_unreadable_record_folders_are_an_error(tmp_path, monkeypatch):
    def refused(folder):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.iterdir", refused)
    with pytest.raises(UsageError, match="cannot be read: Permission denied"):
        read_all(tmp_path)


@pytest.mark.slow
def test_settings_missing_from_a_record_have_their_defaults(tiny, made, tmp_path):
    file = next(file for file in (tmp_path / "records").iterdir() if "-s0-" in file.name)
    record = json.loads(file.read_text())
    del record["settings"]["seed"]
    file.write_text(json.dumps(record))
    assert read(file).config["seed"] == 0
