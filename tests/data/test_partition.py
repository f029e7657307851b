"""Partitioners: disjoint parts, the documented sizes and classes, reproducible by seed, bounded retries."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

import mimicfl as mf
from mimicfl import partition

labels = st.lists(st.integers(0, 4), min_size=20, max_size=200).map(np.array)


def disjoint(split):
    every = np.concatenate(split)
    return len(np.unique(every)) == len(every)


@pytest.mark.slow
@given(y=labels, clients=st.integers(1, 8), per_client=st.integers(1, 3), seed=st.integers(0, 99))
@settings(max_examples=80, deadline=None)
def test_shards_are_single_class_equally_large_and_disjoint(y, clients, per_client, seed):
    assume(clients * per_client <= len(y))
    try:
        split = partition.shards(y, clients, per_client, seed)
    except mf.UsageError as error:
        assert "use fewer" in str(error)
        reject()  # Hypothesis fails if all examples are rejected
    assert len(split) == clients
    assert disjoint(split)
    assert len({len(part) for part in split}) == 1
    assert all(len(np.unique(y[part])) <= per_client for part in split)


def test_shards_work_for_random_labels():
    split = partition.shards(np.random.default_rng(0).integers(0, 5, 300), 6, 2, seed=0)
    assert min(map(len, split)) >= 30


def test_shards_on_balanced_data_use_every_class_equally():
    y = np.repeat(np.arange(10), 60)
    split = partition.shards(y, 30, 2, seed=5)
    counts = np.bincount(y[np.concatenate(split)])
    assert counts.tolist() == [60] * 10
    assert {len(part) for part in split} == {20}


@pytest.mark.slow
@given(clients=st.integers(1, 20), k=st.integers(1, 10), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_classes_gives_exactly_k_classes_of_equal_size(clients, k, seed):
    y = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 50))
    split = partition.classes(y, clients, k, seed)
    assert disjoint(split)
    for part in split:
        found, counts = np.unique(y[part], return_counts=True)
        assert len(found) == k
        assert len(set(counts.tolist())) == 1
    assert len({len(part) for part in split}) == 1


@given(clients=st.integers(1, 40), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_anchored_gives_class_i_mod_c_and_another_class(clients, seed):
    y = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 100))
    split = partition.anchored(y, clients, seed)
    assert disjoint(split)
    for i, part in enumerate(split):
        found, counts = np.unique(y[part], return_counts=True)
        assert len(found) == 2
        assert i % 10 in found
        assert counts[0] == counts[1]


@given(alpha=st.floats(0.05, 50), clients=st.integers(1, 10), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_dirichlet_uses_every_sample_once(alpha, clients, seed):
    y = np.arange(300) % 5
    try:
        split = partition.dirichlet(y, clients, alpha, seed=seed)
    except mf.UsageError as error:
        assert "raise alpha" in str(error)
        reject()
    assert disjoint(split)
    assert sum(map(len, split)) == 300
    assert min(map(len, split)) >= 1


def test_dirichlet_is_more_even_for_larger_alpha():
    y = np.arange(2000) % 10

    def spread(alpha):
        split = partition.dirichlet(y, 10, alpha, seed=3)
        return np.std([np.bincount(y[part], minlength=10) / len(part) for part in split])

    assert spread(0.1) > 2 * spread(1.0) > 2 * spread(100.0)


def test_dirichlet_error_after_all_tries_suggests_a_larger_alpha():
    with pytest.raises(mf.UsageError, match=r"5 tries.*raise alpha"):
        partition.dirichlet(np.arange(30) % 3, 30, 0.01, tries=5)


@given(n=st.integers(1, 100), clients=st.integers(1, 30), seed=st.integers(0, 9))
@settings(deadline=None)
def test_iid_is_even(n, clients, seed):
    assume(clients <= n)
    split = partition.iid(np.zeros(n), clients, seed)
    sizes = [len(part) for part in split]
    assert disjoint(split)
    assert sum(sizes) == n
    assert max(sizes) - min(sizes) <= 1


def test_by_ids_groups_by_value():
    split = partition.by_ids(["b", "a", "b", "c"])
    assert [part.tolist() for part in split] == [[1], [0, 2], [3]]


@pytest.mark.parametrize("make", [partition.shards, partition.classes, partition.dirichlet, partition.iid])
def test_split_depends_only_on_the_seed(make):
    y = np.arange(600) % 10
    a, b, c = (make(y, 10, seed=seed) for seed in (0, 0, 1))
    assert all(np.array_equal(p, q) for p, q in zip(a, b, strict=True))
    assert not all(np.array_equal(p, q) for p, q in zip(a, c, strict=True))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda y: partition.shards(y, 50, 3), "150 shards .* of 100 samples"),
        (lambda y: partition.iid(y, 101), "too many for 100 samples"),
        (lambda y: partition.classes(y, 5, 11), "at most 10"),
        (lambda y: partition.classes(y, 30, 10), "need more samples"),
        (lambda y: partition.dirichlet(y, 5, 0), "alpha"),
        (lambda y: partition.iid(y, 0), "num_clients"),
        (lambda y: partition.shards(y, 5, 0), "shards_per_client"),
        (lambda y: partition.shards(y[:, None], 5), "one label for every sample"),
        (lambda y: partition.PARTITIONS.make("shard:2", labels=y, num_clients=3, seed=0), "did you mean 'shards'"),
        (lambda y: partition.PARTITIONS.make("natural", ids=None), "client ids"),
    ],
)
def test_impossible_splits_raise_usage_error(call, words):
    with pytest.raises(mf.UsageError, match=words):
        call(np.arange(100) % 10)


@pytest.mark.parametrize(
    ("make", "numbers"), [(partition.shards, "1,380 of 1,442"), (partition.classes, "of 1,442"), (partition.anchored, "of 1,442")]
)
def test_warning_gives_the_number_of_used_samples(make, numbers):
    labels = mf.datasets.load("digits").y_train
    with pytest.warns(UserWarning, match=numbers) as warned:
        split = make(labels, 30)
    assert len(warned) == 1
    assert f"uses {sum(map(len, split)):,} of" in str(warned[0].message)
    assert warned[0].filename == __file__


def test_no_warning_if_almost_all_samples_are_used():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for make in (partition.shards, partition.classes):
            assert sum(map(len, make(np.arange(600) % 10, 30))) == 600
        assert sum(map(len, partition.shards(np.arange(50_000) % 10, 30))) == 49_980  # CIFAR-10, as in the paper


@pytest.mark.parametrize("make", [partition.shards, partition.classes, partition.anchored, partition.dirichlet])
def test_partitions_by_class_refuse_real_targets(make):
    with pytest.raises(mf.UsageError, match=r"real numbers.*iid.*by_ids.*binned"):
        make(np.random.default_rng(0).normal(size=100), 5)


def test_iid_accepts_targets_of_any_kind():
    for labels in (np.zeros((20, 1)), np.zeros((20, 4), int), torch.zeros(20)):
        assert sum(map(len, partition.iid(labels, 3))) == 20


@pytest.mark.parametrize("make", [partition.shards, partition.classes, partition.anchored, partition.dirichlet, partition.iid])
def test_arguments_of_the_wrong_type_raise_usage_error(make):
    y = np.arange(100) % 10
    for labels in (None, 3, b"", [], {}, object(), [[1], [1, 2]], torch.zeros(3, device="meta")):
        with pytest.raises(mf.UsageError, match="label"):
            make(labels, 5)
    for clients in (None, True, -1, float("nan"), "5", [], 10**5000):
        with pytest.raises(mf.UsageError, match="num_clients"):
            make(y, clients)
    for seed in (None, True, -1, 0.5, "", []):
        with pytest.raises(mf.UsageError, match="seed"):
            make(y, 5, seed=seed)


def test_invalid_ids_raise_usage_error():
    for ids in (None, 3, [], [[1], [1, 2]], [object(), object()], {}):
        with pytest.raises(mf.UsageError, match="id"):
            partition.by_ids(ids)
    assert [part.tolist() for part in partition.by_ids(np.array(["b", "a"], dtype=object))] == [[1], [0]]


@pytest.mark.parametrize("hole", [None, float("nan"), np.nan])
@pytest.mark.parametrize("kind", [list, lambda ids: np.array(ids, dtype=object)])
def test_ids_with_holes_or_of_several_kinds_are_refused(kind, hole):
    """NumPy would make nan a client of that name, and the number 1 the client "1"."""
    with pytest.raises(mf.UsageError, match="None or nan"):
        partition.by_ids(kind(["a", hole, "b"]))
    with pytest.raises(mf.UsageError, match="not of both"):
        partition.by_ids(kind(["1", 1, "b"]))
