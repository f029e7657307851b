"""`Data` from torch datasets and from datasets of Hugging Face."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import mimicfl as mf
from mimicfl.data import sources

X, Y = torch.arange(20.0).reshape(10, 2), torch.arange(10) % 3


class Sentences(Dataset):
    """Sentences of different lengths, with their writers."""

    def __init__(self, n=7, writers="ab"):
        self.n, self.writers = n, writers

    def __len__(self):
        if self.n is None:
            raise NotImplementedError
        return self.n

    def __getitem__(self, k):
        return {"tokens": torch.arange(k % 3 + 1), "label": k % 2, "writer": self.writers[k % len(self.writers)]}


class NotAvailable:
    """Like `pandas.NA`, which is neither true nor false."""

    def __ne__(self, other):
        return self

    def __bool__(self):
        raise TypeError("ambiguous")


def padded(samples):
    tokens = torch.zeros(len(samples), 3, dtype=torch.long)
    for row, sample in zip(tokens, samples, strict=True):
        row[: len(sample["tokens"])] = sample["tokens"]
    return {"tokens": tokens, "mask": tokens > 0, "label": torch.tensor([sample["label"] for sample in samples])}


class TestTorch:
    def test_pairs(self, monkeypatch):
        monkeypatch.setattr(sources, "AT_ONCE", 3)  # several batches, the last one short
        data = mf.Data.from_datasets(TensorDataset(X, Y), TensorDataset(X[:4], Y[:4]), name="pairs")
        assert torch.equal(data.x_train, X)
        assert torch.equal(data.y_test, Y[:4])
        assert (data.name, data.ids) == ("pairs", None)

    def test_several_inputs(self):
        data = mf.Data.from_datasets(TensorDataset(X, X + 1, Y), TensorDataset(X, X + 1, Y))
        assert isinstance(data.x_train, tuple)
        assert torch.equal(data.x_train[1], X + 1)

    def test_dicts_with_collate_and_clients(self, monkeypatch):
        monkeypatch.setattr(sources, "AT_ONCE", 2)
        data = mf.Data.from_datasets(Sentences(), Sentences(3), collate=padded, targets="label", client="writer")
        assert list(data.x_train) == ["tokens", "mask"]
        assert data.x_train["tokens"][2].tolist() == [0, 1, 2]
        assert data.y_train.tolist() == [k % 2 for k in range(7)]
        assert data.ids.tolist() == list("abababa")
        assert data.test_ids.tolist() == list("aba")

    def test_lists_of_numbers_are_vectors(self):
        """Torch collates them position by position."""
        samples = [{"ids": [k, k + 1, k + 2], "tags": [k % 2, 1]} for k in range(2)]  # as many samples as tags
        data = mf.Data.from_datasets(samples, samples[:1], targets="tags")
        assert data.x_train["ids"].tolist() == [each["ids"] for each in samples]
        assert data.y_train.tolist() == [each["tags"] for each in samples]
        assert data.x_test["ids"].tolist() == [samples[0]["ids"]]

    def test_lists_of_lists_are_matrices(self):
        samples = [{"image": [[k, 1], [2, 3]], "label": k} for k in range(2)]
        data = mf.Data.from_datasets(samples, samples[:1], targets="label")
        assert data.x_train["image"].tolist() == [each["image"] for each in samples]
        assert data.x_test["image"].shape == (1, 2, 2)

    def test_a_list_in_a_pair_is_one_input(self):
        samples = [([0.5, 1.0, k], k) for k in range(2)]
        data = mf.Data.from_datasets(samples, samples)
        assert data.x_train.tolist() == [x for x, _ in samples]
        several = mf.Data.from_datasets([((1.0, 2.0), 0)], [((1.0, 2.0), 0)])  # a tuple holds several inputs
        assert len(several.x_train) == 2

    def test_a_run_on_it(self):
        data = mf.Data.from_datasets(TensorDataset(X, Y), TensorDataset(X, Y))
        assert mf.simulate(nn.Linear(2, 3), data, [np.arange(5), np.arange(5, 10)], rounds=1).rows[0]["test_loss"] > 0

    @pytest.mark.parametrize(
        ("train", "options", "words"),
        [
            (type("Endless", (IterableDataset,), {"__iter__": lambda self: iter([])})(), {}, "no length"),
            (TensorDataset(X[:0], Y[:0]), {}, "train is empty"),
            (Sentences(), {}, "pad them to one length"),
            (Sentences(2), {"collate": padded}, "targets="),
            (Sentences(2), {"collate": padded, "targets": "lable"}, "no column 'lable'; did you mean"),
            (Sentences(2), {"collate": padded, "targets": "label", "client": "author"}, "no such entry"),
            (Sentences(2, writers=[None]), {"collate": padded, "targets": "label", "client": "writer"}, "without a client"),
            (Sentences(2), {"collate": lambda samples: 1 / 0, "targets": "label"}, "collate fails"),
            (Sentences(2), {"collate": lambda samples: padded(samples[:1]), "targets": "label"}, "keep the number of samples"),
            (TensorDataset(X), {}, "pairs"),
            (Sentences(2, writers=[np.float32("nan")]), {"collate": padded, "targets": "label", "client": "writer"}, "without a client"),
            ([{"text": "a", "label": 0}], {"targets": "label"}, r"train\['text'\] must hold numbers"),
            ([{"a": X[0], "label": 0}, {"a": X[0], "b": X[0], "label": 0}], {"targets": "label"}, "'b' is missing"),
            (TensorDataset(X, Y), {"targets": "label"}, "not dicts"),
            (Sentences(2, writers=[NotAvailable()]), {"collate": padded, "targets": "label", "client": "writer"}, "without a client"),
            (Sentences(2, writers=[torch.ones(2)]), {"collate": padded, "targets": "label", "client": "writer"}, "one number or string"),
            (Sentences(2, writers=["a", 1]), {"collate": padded, "targets": "label", "client": "writer"}, "not of both"),
            ([{"label": 0}], {"targets": "label"}, "nothing besides label"),
            ({"a": X[0]}, {}, "sample 0 of train cannot be read: KeyError"),
            (Sentences(None), {}, "no length"),
        ],
    )
    def test_mistakes_are_named(self, train, options, words):
        with pytest.raises(mf.UsageError, match=words):
            mf.Data.from_datasets(train, train, **options)

    def test_an_entry_of_later_batches_is_not_dropped(self, monkeypatch):
        monkeypatch.setattr(sources, "AT_ONCE", 1)
        samples = [{"a": X[0], "label": 0}, {"a": X[0], "b": X[0], "label": 0}]
        with pytest.raises(mf.UsageError, match=r"x_train\['b'\] is missing"):
            mf.Data.from_datasets(samples, samples, targets="label")

    def test_a_collate_that_changes_shapes_is_named(self, monkeypatch):
        monkeypatch.setattr(sources, "AT_ONCE", 1)

        def ragged(samples):
            return {"tokens": torch.stack([sample["tokens"] for sample in samples]), "label": torch.tensor([0])}

        with pytest.raises(mf.UsageError, match=r"same shapes.*tokens"):
            mf.Data.from_datasets(Sentences(), Sentences(), collate=ragged, targets="label")


class Table(dict):
    """A dataset of Hugging Face, as far as columns go."""

    @property
    def column_names(self):
        return list(self)


TABLE = Table(ids=[[1, 2], [3, 4], [5, 6]], mask=[[1, 1], [1, 0], [1, 1]], label=[0, 1, 0], who=["x", "y", "x"])


class TestHuggingFace:
    def test_columns_become_keywords(self):
        data = mf.Data.from_huggingface({"train": TABLE, "test": TABLE}, inputs=["ids", "mask"], target="label", client="who")
        assert data.x_train["ids"].tolist() == TABLE["ids"]
        assert data.y_train.tolist() == [0, 1, 0]
        assert data.test_ids.tolist() == ["x", "y", "x"]

    def test_one_column_is_one_tensor(self):
        data = mf.Data.from_huggingface(TABLE, TABLE, inputs="ids", target="label")
        assert data.x_train.shape == (3, 2)

    @pytest.mark.parametrize(
        ("dataset", "options", "words"),
        [
            (TABLE, {}, "train and test"),
            ({"train": TABLE}, {}, "train and test"),
            ({"train": [1], "test": [1]}, {}, "must be a datasets.Dataset"),
            ({"train": TABLE, "test": TABLE}, {"inputs": ["idz"]}, "did you mean 'ids'"),
            ({"train": TABLE, "test": TABLE}, {"inputs": []}, "a name or a list"),
            ({"train": Table(TABLE, ids=[[1], [2, 3], [4]]), "test": TABLE}, {}, "different lengths"),
            ({"train": Table(TABLE, who=["x", None, "x"]), "test": TABLE}, {"client": "who"}, "without a client"),
        ],
    )
    def test_mistakes_are_named(self, dataset, options, words):
        with pytest.raises(mf.UsageError, match=words):
            mf.Data.from_huggingface(dataset, **{"inputs": ["ids"], "target": "label"} | options)

    @pytest.mark.slow
    def test_a_real_dataset(self):
        datasets = pytest.importorskip("datasets")
        whole = datasets.Dataset.from_dict(dict(TABLE)).train_test_split(test_size=1, seed=0)
        data = mf.Data.from_huggingface(whole, inputs=["ids", "mask"], target="label", client="who")
        assert data.num_train == 2
        assert data.x_train["ids"].tolist() == whole["train"]["ids"][:]
        hidden = {part: each.with_format("torch", columns=["ids"]) for part, each in whole.items()}
        with pytest.raises(mf.UsageError, match="leaves out column 'label'"):
            mf.Data.from_huggingface(hidden, inputs="ids", target="label")
