"""Data is immutable: it copies its arrays, its fields cannot be assigned, edits in place are detected, and its parts are consistent."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import mimicfl as mf


def arrays(n=8):
    rng = np.random.default_rng(0)
    return {
        "x_train": rng.normal(size=(n, 3)),
        "y_train": np.arange(n) % 2,
        "x_test": rng.normal(size=(4, 3)),
        "y_test": np.arange(4) % 2,
        "ids": np.arange(n) % 4,
        "optimum": np.zeros(5),
    }


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
def test_the_callers_arrays_are_copied(kind):
    given = {name: kind(value) for name, value in arrays().items()}
    data = mf.Data(**given)
    before = data.checksum()
    for value in given.values():
        value[:] = 1
    assert data.checksum() == before
    assert not data.changed()
    assert data.ids.tolist() == arrays()["ids"].tolist()
    assert not data.optimum.any()


def test_data_objects_share_tensors():
    x, y = arrays()["x_train"], arrays()["y_train"]
    data = mf.Data(x, y, x, y)
    assert data.x_train.data_ptr() == data.x_test.data_ptr()
    other = dataclasses.replace(data, y_train=1 - y)
    assert other.x_train.data_ptr() == data.x_train.data_ptr()
    data.x_train[0] = 5.0
    assert data.changed()
    assert other.changed()


@pytest.mark.parametrize(
    "name", ["x_train", "y_train", "x_test", "y_test", "mean", "scale", "augment", "loss", "ids", "optimum", "num_classes"]
)
def test_fields_cannot_be_assigned(name):
    data = mf.Data(**arrays())
    with pytest.raises(mf.UsageError, match=f"{name} cannot be changed"):
        setattr(data, name, None)
    with pytest.raises(mf.UsageError, match=f"{name} cannot be changed"):
        delattr(data, name)
    assert not data.changed()


def test_replace_as_suggested_by_the_error_works():
    data = mf.Data(**arrays())
    with pytest.raises(mf.UsageError, match=r"dataclasses.replace\(data, y_train=...\)"):
        data.y_train = None
    other = dataclasses.replace(data, y_train=np.full(8, 2), mean=(0.5,))
    assert (other.num_classes, other.mean) == (3, (0.5,))
    assert other.checksum() != data.checksum()
    part = data.subset([0, 5])
    assert part.ids.tolist() == [0, 1]
    assert torch.equal(part.x_train, data.x_train[[0, 5]])
    for same in (copy.copy(data), copy.deepcopy(data)):
        assert not same.changed()


EDITS = {
    "y_train": lambda data: data.y_train.fill_(0),
    "x_train": lambda data: data.x_train.numpy().__setitem__((7, 2), 0.0),  # not detected by torch's version counter
    "x_test": lambda data: data.x_test.mul_(2),
    "y_test": lambda data: data.y_test.numpy().fill(1),
    "ids": lambda data: data.ids.fill(0),
    "optimum": lambda data: data.optimum.add_(1e-9),
    "mean": lambda data: vars(data).update(mean=(0.5,)),
    "scale": lambda data: vars(data).update(scale=1.0),
    "loss": lambda data: vars(data).update(loss="mse"),
}


@pytest.mark.parametrize("name", EDITS)
def test_edits_in_place_are_detected_and_named(name):
    data = mf.Data(**arrays())
    data.check_unchanged()
    assert data.changed() is False
    EDITS[name](data)
    assert data.changed() is True
    with pytest.raises(mf.UsageError, match=rf"{name} .*edited.*replace\(data, {name}="):
        data.check_unchanged()
    assert not dataclasses.replace(data).changed()  # a new Data accepts the edited contents


def test_replace_checks_edited_tensors_again():
    data = mf.Data(**arrays())
    data.x_train[0] = float("nan")
    with pytest.raises(mf.UsageError, match="not finite"):
        dataclasses.replace(data)


def test_edits_change_the_checksum_and_clear_cached_tensors():
    data = mf.Data(**{**arrays(), "y_train": np.random.default_rng(0).normal(size=(8, 1)), "y_test": np.zeros((4, 1))})
    before = data.checksum()
    held = data.resident("train", torch.device("cpu"), torch.float32)[1]
    data.y_train[0] = 7.0
    assert data.checksum() != before
    assert held[0] != 7.0  # a converted copy
    assert data.changed()
    assert data.resident("train", torch.device("cpu"), torch.float32)[1][0] == 7.0


IMAGES = np.zeros((6, 1, 2, 2), np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x_test": IMAGES.astype(np.float32)}, r"uint8 but x_test is torch.float32: convert"),
        ({"x_train": IMAGES.astype(np.float32)}, r"float32 but x_test is torch.uint8: convert"),
        ({"x_test": IMAGES.astype(np.int64)}, "uint8 but x_test is torch.int64"),
        ({"x_test": IMAGES[:, :, :1]}, "samples differ in shape"),
        ({"y_test": LABELS.astype(float)}, "differ in kind"),
        ({"y_train": np.stack([LABELS, LABELS], 1)}, "labels differ in shape"),
        ({"y_train": LABELS[:, None] * 1.0, "y_test": LABELS * 1.0}, "labels differ in shape"),
        ({"y_train": LABELS[:, None], "y_test": np.zeros((6, 3), int)}, "labels differ in shape"),
        ({"augment": lambda x: x}, "augment must be True or False"),
        ({"augment": 1}, "augment must be True or False"),
        ({"ids": [0, 1]}, "one id per training sample"),
        ({"ids": [None] * 6}, "ids must have a value"),
        ({"ids": [object()] * 6}, "ids must be"),
        ({"optimum": np.zeros((3, 1))}, "optimum must be a vector"),
        ({"mean": (1, 2)}, "mean must have one value"),
        ({"std": "1"}, "std must be a number"),
        ({"scale": None}, "scale must be a number"),
        ({"loss": 3}, "loss must be a name"),
        ({"x_train": torch.zeros(6, 2, device="meta")}, "meta device"),
        ({"x_train": torch.zeros(6, 2).to_sparse()}, "dense tensor"),
        ({"x_train": np.ma.masked_array(IMAGES, mask=True)}, "masked"),
        ({"y_train": np.where(LABELS == 1, -100, LABELS)}, "negative label"),
    ],
)
def test_inconsistent_arguments_raise_usage_error(change, words):
    with pytest.raises(mf.UsageError, match=words):
        mf.Data(**{"x_train": IMAGES, "y_train": LABELS, "x_test": IMAGES, "y_test": LABELS} | change)


def test_different_widths_are_stored_in_the_wider_type():
    x = np.random.default_rng(0).normal(size=(6, 2))
    data = mf.Data(x.astype(np.float32), LABELS.astype(np.int32), x, LABELS.astype(np.uint8)[:, None])
    assert data.x_train.dtype == data.x_test.dtype == torch.float64
    assert torch.equal(data.x_test, torch.from_numpy(x))
    assert data.y_train.dtype == data.y_test.dtype == torch.int64
    assert data.y_test.shape == (6,)


@pytest.mark.parametrize(
    ("given", "stored"), [(torch.float8_e4m3fn, torch.float32), (torch.float8_e5m2, torch.float32), (torch.uint16, torch.int64)]
)
def test_types_that_few_operations_know_are_stored_in_wider_ones(given, stored):
    x = (torch.arange(12) % 8).view(6, 2).to(stored)
    data = mf.Data(x.to(given), LABELS, x, LABELS)
    assert data.x_train.dtype == stored
    assert torch.equal(data.x_train, x)


def test_class_counts_of_labels_per_position():
    labels = torch.tensor([[0, 1, -100], [2, 2, 2], [0, 0, 1]])
    data = mf.Data(torch.zeros(3, 3), labels, torch.zeros(3, 3), labels)
    assert data.num_classes == 3
    assert data.class_counts([np.array([0, 1]), np.array([2])]).tolist() == [[1, 1, 3], [2, 1, 0]]
    for wrong in (-1, -100):
        with pytest.raises(mf.UsageError, match=r"negative label|no class"):
            mf.Data(torch.zeros(3, 3), torch.full((3, 3), wrong), torch.zeros(3, 3), torch.full((3, 3), wrong))


class InPlace(nn.Module):
    """Modifies its input in place if `writes`."""

    def __init__(self, writes):
        super().__init__()
        self.writes, self.last = writes, nn.Linear(4, 2)

    def forward(self, x):
        if self.writes:
            x -= 0.5
            return self.last(x)
        return self.last(x - 0.5)


def modifying_loss(output, target):
    """A loss that modifies labels and outputs in place."""
    value = nn.functional.cross_entropy(output, target.clone())
    target[target == 0] = -1
    with torch.no_grad():
        output.mul_(0).sub_(1)
    return value


@pytest.mark.parametrize("engine", ["plain", "workers", "batched"])
def test_models_and_losses_that_modify_their_inputs_do_not_change_the_data(engine):
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(80, 4, generator=drawn)
    y = (x.sum(dim=1) > 0).long()
    ends = []
    for writes in (False, True):
        data = mf.Data(x, y, x[:30], y[:30], loss=modifying_loss if writes else None)
        torch.manual_seed(0)
        local = mf.LocalSGD(steps=2, batch_size=8, lr=0.1)
        split = mf.partition.iid(y, 4)
        ends.append(mf.simulate(InPlace(writes), data, split, "fedavg", rounds=3, local=local, engine=engine if writes else "plain"))
        data.check_unchanged()
    assert ends[0].rows[-1]["test_loss"] == pytest.approx(ends[1].rows[-1]["test_loss"], rel=1e-5)
    assert ends[0].rows[-1]["test_accuracy"] == ends[1].rows[-1]["test_accuracy"] > 0.5
    assert ends[0].client_accuracy == ends[1].client_accuracy
