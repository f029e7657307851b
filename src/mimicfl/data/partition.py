"""Partitioners: labels in, one array of sample numbers per client out.

Every partitioner is seeded, draws from a stream of its own, and ends: where luck is needed the tries are bounded
and the error says what to change. `shards`, `classes` and `anchored` give all clients parts of equal size and leave the remaining samples
unused; if these are more than 1 %, a warning gives their number. `sum(map(len, split))` is the number of samples used.
"""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec

import numpy as np

from ..errors import UsageError, number, whole
from ..registry import Registry
from ..seeds import stream
from .arrays import labels_of

Split = list[np.ndarray]
P = ParamSpec("P")
PARTITIONS: Registry[Split] = Registry("partition", ("partition",))
register = PARTITIONS.register
NOTABLE = 0.01  # warn above this share of unused samples: on CIFAR-10, 30 clients with 2 shards leave 0.04 % unused


class NamedSplit(Split):
    """A split that records how it was made, without the seed: `split.spec` is `dirichlet:alpha=0.3,...`."""

    spec = ""


def named(partitioner: Callable[P, Split]) -> Callable[P, Split]:
    """Let reports and data frames distinguish the splits of a partitioner by its options."""

    @functools.wraps(partitioner)
    def described(*args: P.args, **kwargs: P.kwargs) -> Split:
        split = NamedSplit(partitioner(*args, **kwargs))
        given = inspect.signature(partitioner).bind(*args, **kwargs)
        given.apply_defaults()
        usual = {key: p.default for key, p in inspect.signature(partitioner).parameters.items()}
        chosen = {key: value for key, value in given.arguments.items() if key not in ("labels", "num_clients", "seed")}
        # The main option always, the others if they are not at their default.
        options = [f"{key}={value}" for k, (key, value) in enumerate(chosen.items()) if k == 0 or value != usual[key]]
        split.spec = ":".join(filter(None, (partitioner.__name__, ",".join(options))))
        return split

    return described


@named
def shards(labels: Any, num_clients: int, shards_per_client: int = 2, seed: int = 0) -> Split:
    """The paper's split: single-class shards of one size, `shards_per_client` random ones to each client.

    With 30 clients and 2 shards each, Fashion-MNIST gives 2,000 samples a client and CIFAR-10 1,666, as in Table II.
    What is left of a class after its last whole shard is not used.
    """
    y = _classes(labels, num_clients, seed)
    total = num_clients * whole("shards_per_client", shards_per_client)
    if total > len(y):
        raise UsageError(f"{total} shards were asked of {len(y)} samples: use fewer clients or fewer shards per client")
    rng = stream(seed, "partition")
    found, counts = np.unique(y, return_counts=True)
    size = _largest_shard(counts, total)
    pieces: list[np.ndarray] = []
    for label, held in zip(found, _share(counts // size, total), strict=True):
        members = rng.permutation(np.flatnonzero(y == label))
        pieces += [members[k * size : (k + 1) * size] for k in range(held)]
    deal = rng.permutation(total).reshape(num_clients, shards_per_client)
    return _told("shards", [np.sort(np.concatenate([pieces[k] for k in hand])) for hand in deal], len(y))


@named
def classes(labels: Any, num_clients: int, classes_per_client: int = 2, seed: int = 0) -> Split:
    """Every client holds exactly `classes_per_client` classes, in equal parts (Table V of the paper: 2, 5, 8, 10).

    The parts are as large as the scarcest class allows; the remaining samples of the others are not used.
    """
    y = _classes(labels, num_clients, seed)
    found = np.unique(y)
    k = whole("classes_per_client", classes_per_client)
    if k > len(found):
        raise UsageError(f"{k} classes per client were asked, the data has {len(found)}: ask for at most {len(found)}")
    rng = stream(seed, "partition")
    slots = _share(np.full(len(found), num_clients), num_clients * k)  # how many clients hold each class
    left = slots.copy()
    hands = []
    for _ in range(num_clients):
        # Taking the classes with most places left, ties at random, always leaves a way to deal out the rest.
        hand = np.lexsort((rng.random(len(found)), -left))[:k]
        left[hand] -= 1
        hands.append(hand)
    return _told("classes", _dealt(y, found, hands, rng, shuffled=True), len(y))


@named
def anchored(labels: Any, num_clients: int, seed: int = 0) -> Split:
    """Client i holds class i mod C and one other at random, in equal parts: the split of the script of the paper's authors, seeded.

    The parts are as large as the class held by most clients allows; the remaining samples of the others are not used.
    """
    y = _classes(labels, num_clients, seed)
    found = np.unique(y)
    if len(found) < 2:
        raise UsageError("anchored gives every client two classes: the data has only one")
    rng = stream(seed, "partition")
    own = np.arange(num_clients) % len(found)
    other = (own + rng.integers(1, len(found), size=num_clients)) % len(found)
    return _told("anchored", _dealt(y, found, list(np.stack([own, other], axis=1)), rng, shuffled=False), len(y))


def _dealt(y: np.ndarray, found: np.ndarray, hands: list[np.ndarray], rng: np.random.Generator, shuffled: bool) -> Split:
    """Samples for clients that hold these classes each, as many of a class for everyone as the scarcest allows."""
    slots = np.bincount(np.concatenate(hands), minlength=len(found))
    counts = np.array([(y == label).sum() for label in found])
    size = int((counts[slots > 0] // slots[slots > 0]).min())
    if size == 0:
        raise UsageError(f"{len(hands)} clients with {len(hands[0])} classes each need more samples than there are: use fewer clients")
    pools = [rng.permutation(np.flatnonzero(y == label)) for label in found]
    taken = np.zeros(len(found), dtype=int)
    split = []
    for client in rng.permutation(len(hands)) if shuffled else range(len(hands)):
        hand = hands[client]
        split.append(np.sort(np.concatenate([pools[c][taken[c] * size : (taken[c] + 1) * size] for c in hand])))
        taken[hand] += 1
    return split


@named
def dirichlet(labels: Any, num_clients: int, alpha: float = 0.5, min_samples: int = 1, tries: int = 100, seed: int = 0) -> Split:
    """Each class is dealt out by proportions drawn from Dirichlet(alpha); small alpha is very uneven.

    Drawn again, at most `tries` times, until every client has `min_samples`.
    """
    y = _classes(labels, num_clients, seed)
    number("alpha", alpha, low=0, high=1e9, open_low=True)
    whole("min_samples", min_samples)
    members = [np.flatnonzero(y == label) for label in np.unique(y)]
    for attempt in range(whole("tries", tries, high=100_000)):
        rng = stream(seed, "partition", attempt)
        dealt: list[tuple[np.ndarray, np.ndarray]] = []  # each class: its samples, shuffled, and where to cut them
        for pool in members:
            cuts = (np.cumsum(rng.dirichlet(np.full(num_clients, alpha)))[:-1] * len(pool)).astype(int)
            dealt.append((rng.permutation(pool), cuts))
        sizes = sum(np.diff(cuts, prepend=0, append=len(pool)) for pool, cuts in dealt)
        if np.min(sizes) >= min_samples:
            pieces = zip(*(np.split(pool, cuts) for pool, cuts in dealt), strict=True)
            return [np.sort(np.concatenate(own)) for own in pieces]
    raise UsageError(
        f"dirichlet found no split in {tries} tries that gives each of {num_clients} clients {min_samples} sample(s): "
        f"raise alpha (now {alpha:g}), use fewer clients or lower min_samples"
    )


@named
def iid(labels: Any, num_clients: int, seed: int = 0) -> Split:
    """Shuffled and dealt out in equal parts (sizes differ by at most one)."""
    samples = len(_samples(labels, num_clients, seed))
    return [np.sort(part) for part in np.array_split(stream(seed, "partition").permutation(samples), num_clients)]


def by_ids(ids: Any) -> Split:
    """One client per distinct id (a writer, a phone, a hospital), in sorted order of the ids."""
    values = labels_of(ids, "ids")
    if values.ndim != 1 or values.size == 0:
        raise UsageError("by_ids needs one id for every training sample")
    _, inverse = np.unique(values, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    return list(np.split(order, np.cumsum(np.bincount(inverse))[:-1]))


def _natural(ids: Any = None) -> Split:
    """The clients that the data itself names."""
    if ids is None:
        raise UsageError("partition 'natural' needs data that knows its clients; use shards, classes, dirichlet or iid")
    return by_ids(ids)


PARTITIONS.factories |= {
    "shards": shards,
    "classes": classes,
    "anchored": anchored,
    "dirichlet": dirichlet,
    "iid": iid,
    "natural": _natural,
}


def _samples(labels: Any, num_clients: int, seed: int) -> np.ndarray:
    """One entry per sample, of any kind; enough of them for the clients."""
    y = labels_of(labels, "labels")
    if y.ndim == 0 or len(y) == 0:
        raise UsageError(f"a partition needs one label for every sample, got an array of shape {y.shape}")
    whole("seed", seed, low=0)
    if whole("num_clients", num_clients) > len(y):
        raise UsageError(f"{num_clients} clients cannot share {len(y)} samples, since some would have no data; use fewer clients")
    return y


def _classes(labels: Any, num_clients: int, seed: int) -> np.ndarray:
    """One class per sample."""
    y = _samples(labels, num_clients, seed)
    if y.dtype.kind == "f":
        raise UsageError(
            "this partition groups samples by class, but the labels are real numbers; "
            "use iid, by_ids, or dirichlet on binned labels such as np.digitize(y, edges)"
        )
    if y.ndim != 1:
        raise UsageError(f"this partition needs one label for every sample, got an array of shape {y.shape}: use iid or by_ids")
    return y


def _told(name: str, split: Split, samples: int) -> Split:
    """The split, with a warning if it leaves more than a few samples unused."""
    used = sum(map(len, split))
    if samples - used > NOTABLE * samples:
        warnings.warn(
            f"{name} uses {used:,} of {samples:,} samples ({100 * used / samples:.1f} %): "
            "all parts have equal size and the remaining samples are not used; dirichlet and iid use every sample",
            stacklevel=4,
        )
    return split


def _largest_shard(counts: np.ndarray, total: int) -> int:
    """The largest shard size for which the classes still give `total` single-class shards."""
    low, high = 1, int(counts.max())
    if int((counts // low).sum()) < total:
        raise UsageError(f"the classes cannot be cut into {total} shards: use fewer clients or fewer shards per client")
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if int((counts // middle).sum()) >= total else (low, middle - 1)
    return low


def _share(capacity: np.ndarray, total: int) -> np.ndarray:
    """`total` places over classes, in proportion to their capacity and never above it."""
    ideal = capacity * (total / capacity.sum())
    share = np.floor(ideal).astype(int)
    for c in np.argsort(-(ideal - share), kind="stable")[: total - int(share.sum())]:
        share[c] += 1
    return np.asarray(share)
