"""`Data` with dict and tuple inputs: copied, checked, frozen and identified like single tensors."""

import dataclasses

import numpy as np
import pytest
import torch

import mimicfl as mf
from mimicfl.data.holdout import held_out

TOKENS, MASK, LABELS = np.arange(12).reshape(6, 2), np.ones((6, 2), dtype=bool), np.arange(6) % 2


def data(x=None, y=LABELS, **change):
    x = {"tokens": TOKENS, "mask": MASK} if x is None else x
    given = {"x_train": x, "y_train": y, "x_test": x, "y_test": y} | change
    return mf.Data(**given)


class TestValue:
    def test_entries_are_copied_and_counted(self):
        tokens = TOKENS.copy()
        found = data({"tokens": tokens, "mask": MASK})
        tokens[0] = 99
        assert found.num_train == found.num_test == 6
        assert found.x_train["tokens"][0].tolist() == [0, 1]
        assert "tokens: (2,), mask: (2,)" in repr(found)

    def test_tuples_of_arrays_are_inputs_and_tuples_of_numbers_are_samples(self):
        assert isinstance(data((TOKENS, MASK)).x_train, tuple)
        assert data(y=tuple(LABELS.tolist())).y_train.tolist() == LABELS.tolist()

    def test_edits_in_place_are_detected(self):
        found = data()
        found.x_train["mask"][0, 0] = False
        with pytest.raises(mf.UsageError, match=r"x_train.*edited in place"):
            found.check_unchanged()

    def test_subset_keeps_the_entries(self):
        few = data().subset([4, 1])
        assert few.x_train["tokens"].tolist() == [[8, 9], [2, 3]]
        assert few.y_train.tolist() == [0, 1]

    def test_targets_may_be_a_dict(self):
        found = data(y={"start": LABELS, "length": LABELS * 0.5})
        assert found.num_classes == 0
        assert found.y_train["start"].dtype == torch.int64
        assert found.class_counts([np.arange(6)]) is None

    def test_only_uint8_entries_are_scaled(self):
        found = data((TOKENS.astype(np.uint8), TOKENS), scale=2.0)
        a, b = found.inputs(found.x_train, torch.float64)
        assert a[1].tolist() == [1.0, 1.5]
        assert b.dtype == torch.int64


class TestIdentity:
    def test_names_order_and_values_count(self):
        one, same = data(), data({"tokens": TOKENS.copy(), "mask": MASK.copy()})
        others = [data((TOKENS, MASK)), data({"words": TOKENS, "mask": MASK}), data({"tokens": TOKENS + 1, "mask": MASK})]
        assert one.described() == same.described()
        assert len({repr(each.described()) for each in (one, *others)}) == 4

    def test_test_ids_count_and_data_without_them_is_described_as_before(self):
        plain = data(ids=LABELS)
        assert "test_ids" not in repr(plain.described())
        assert dataclasses.replace(plain, test_ids=LABELS).described() != plain.described()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x_train": {}}, "keywords"),
        ({"x_train": {"not a name": TOKENS}}, "keywords"),
        ({"x_train": {"tokens": TOKENS, "mask": MASK[:5]}}, "one row per sample"),
        ({"x_train": {"tokens": {"deep": TOKENS}, "mask": MASK}}, "nested"),
        ({"x_train": {"tokens": TOKENS}}, "different entries.*mask"),
        ({"x_train": (TOKENS, MASK)}, "differ in kind: a tuple and a dict"),
        ({"x_train": {"tokens": TOKENS[:, :1], "mask": MASK}}, "tokens.*differ in shape"),
        ({"x_train": {"tokens": TOKENS * 1.0, "mask": MASK}}, r"x_train\['tokens'\] is torch.float64"),
        ({name: {"mask": MASK.astype(np.uint8)} for name in ("x_train", "x_test")}, "convert a mask to bool"),
        ({"y_train": LABELS[:5]}, "6 samples but y_train has 5"),
        ({"augment": True}, "crops and flips images"),
        ({"mean": (1.0, 2.0)}, "one value"),
        ({"test_ids": LABELS}, "give ids"),
        ({"ids": LABELS, "test_ids": LABELS[:3]}, "test_ids must hold one id per test sample"),
        ({"ids": LABELS, "test_ids": [str(each) for each in LABELS]}, "both as strings"),
        ({"ids": [2**63 + 1, 2**63 + 2, -1, 0, 0, 0]}, "give strings"),
        ({"ids": [0.0, 1.0, np.nan, 0.0, 0.0, 0.0]}, "finite"),
        ({"transform": "flip"}, "transform must be a function"),
    ],
)
def test_mistakes_are_named(change, words):
    with pytest.raises(mf.UsageError, match=words):
        data(**change)


def test_targets_of_several_entries_can_be_held_out():
    x, y = torch.arange(20.0)[:, None], {"group": torch.arange(20) % 2, "age": torch.arange(20.0)}
    found = held_out(data(x, y), 0.25)
    assert torch.equal(found.y_train["age"], found.x_train[:, 0])
    assert torch.equal(found.y_test["age"], found.x_test[:, 0])
    assert found.num_test == 5


def test_a_model_that_refuses_the_inputs_is_named_before_training():
    with pytest.raises(mf.UsageError, match=r"does not accept inputs.*tokens"):
        mf.simulate(torch.nn.Linear(2, 2), data(), [np.arange(6)], rounds=1)


def test_models_by_name_need_a_single_input():
    with pytest.raises(mf.UsageError, match="several inputs"):
        mf.models.build("mlp", data())
