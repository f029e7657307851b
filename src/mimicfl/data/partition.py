"""Partitioners: turn labels into one array of sample numbers per client.

Every partitioner takes a seed and draws from a separate random stream. The number of retries is bounded; if they fail, the error
says what to change. `shards`, `classes` and `anchored` give all clients equally many samples and leave the rest unused; if that is
more than 1 %, a warning gives the number. `sum(map(len, split))` is the number of samples used.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

import numpy as np

from ..errors import UsageError, integer, number, warn_caller
from ..registry import Registry
from ..seeds import stream
from .arrays import labels_of

Split = list[np.ndarray]
P = ParamSpec("P")
PARTITIONS: Registry[Split] = Registry("partition", ("partition",))
register = PARTITIONS.register
NOTABLE = 0.01  # warn above this share of unused samples: on CIFAR-10, 30 clients with 2 shards leave 0.04 % unused


class NamedSplit(Split):
    """A split that records its partitioner and options, without the seed: `split.spec` is `dirichlet:alpha=0.3,...`."""

    spec = ""


def named(partitioner: Callable[P, Split]) -> Callable[P, Split]:
    """Decorate a partitioner to return a `NamedSplit`, so that reports and data frames can distinguish splits by their options."""

    @functools.wraps(partitioner)
    def described(*args: P.args, **kwargs: P.kwargs) -> Split:
        split = NamedSplit(partitioner(*args, **kwargs))
        given = inspect.signature(partitioner).bind(*args, **kwargs)
        given.apply_defaults()
        defaults = {key: p.default for key, p in inspect.signature(partitioner).parameters.items()}
        chosen = {key: value for key, value in given.arguments.items() if key not in ("labels", "num_clients", "seed")}
        # Always include the first option; include the others if they differ from their defaults.
        options = [f"{key}={value}" for k, (key, value) in enumerate(chosen.items()) if k == 0 or value != defaults[key]]
        split.spec = ":".join(filter(None, (partitioner.__name__, ",".join(options))))
        return split

    return described


@named
def shards(labels: Any, num_clients: int, shards_per_client: int = 2, seed: int = 0) -> Split:
    """The split of the paper: single-class shards of equal size, `shards_per_client` random shards per client.

    With 30 clients and 2 shards each, Fashion-MNIST gives 2,000 samples per client and CIFAR-10 1,666, as in Table II.
    The samples of a class that do not fill a shard are not used.
    """
    y = _classes(labels, num_clients, seed)
    total = num_clients * integer("shards_per_client", shards_per_client)
    if total > len(y):
        raise UsageError(f"{total} shards were requested of {len(y)} samples: use fewer clients or fewer shards per client")
    rng = stream(seed, "partition")
    found, counts = np.unique(y, return_counts=True)
    size = _largest_shard(counts, total)
    pieces: list[np.ndarray] = []
    for label, held in zip(found, _share(counts // size, total), strict=True):
        members = rng.permutation(np.flatnonzero(y == label))
        pieces += [members[k * size : (k + 1) * size] for k in range(held)]
    assignment = rng.permutation(total).reshape(num_clients, shards_per_client)
    return _warn_if_unused("shards", [np.sort(np.concatenate([pieces[k] for k in client])) for client in assignment], len(y))


@named
def classes(labels: Any, num_clients: int, classes_per_client: int = 2, seed: int = 0) -> Split:
    """Every client holds exactly `classes_per_client` classes, with equally many samples of each (Table V of the paper: 2, 5, 8, 10).

    The class with the fewest samples per client determines that number; the remaining samples of the other classes are not used.
    """
    y = _classes(labels, num_clients, seed)
    found = np.unique(y)
    k = integer("classes_per_client", classes_per_client)
    if k > len(found):
        raise UsageError(f"classes_per_client is {k} but the data has {len(found)} classes: use at most {len(found)}")
    rng = stream(seed, "partition")
    slots = _share(np.full(len(found), num_clients), num_clients * k)  # how many clients hold each class
    left = slots.copy()
    chosen = []
    for _ in range(num_clients):
        # Choosing the classes with the most free places, with random ties, guarantees that the remaining clients can be served.
        held = np.lexsort((rng.random(len(found)), -left))[:k]
        left[held] -= 1
        chosen.append(held)
    return _warn_if_unused("classes", _assign_samples(y, found, chosen, rng, shuffled=True), len(y))


@named
def anchored(labels: Any, num_clients: int, seed: int = 0) -> Split:
    """Client i holds class i mod C and another random class, with equally many samples of each, as in the script of the paper's authors.

    The class held by the most clients determines that number; the remaining samples of the other classes are not used.
    """
    y = _classes(labels, num_clients, seed)
    found = np.unique(y)
    if len(found) < 2:
        raise UsageError("anchored gives every client two classes, but the data has only one; use iid")
    rng = stream(seed, "partition")
    anchor = np.arange(num_clients) % len(found)
    other = (anchor + rng.integers(1, len(found), size=num_clients)) % len(found)
    chosen = list(np.stack([anchor, other], axis=1))
    return _warn_if_unused("anchored", _assign_samples(y, found, chosen, rng, shuffled=False), len(y))


def _assign_samples(y: np.ndarray, found: np.ndarray, chosen: list[np.ndarray], rng: np.random.Generator, shuffled: bool) -> Split:
    """Give every client equally many samples of each of its classes, as many as the class with the fewest samples per client allows.

    `chosen` holds the classes of each client, as indices into `found`.
    """
    slots = np.bincount(np.concatenate(chosen), minlength=len(found))
    counts = np.array([(y == label).sum() for label in found])
    size = int((counts[slots > 0] // slots[slots > 0]).min())
    if size == 0:
        raise UsageError(f"{len(chosen)} clients with {len(chosen[0])} classes each need more samples than the data has: use fewer clients")
    pools = [rng.permutation(np.flatnonzero(y == label)) for label in found]
    taken = np.zeros(len(found), dtype=int)
    split = []
    for client in rng.permutation(len(chosen)) if shuffled else range(len(chosen)):
        held = chosen[client]
        split.append(np.sort(np.concatenate([pools[c][taken[c] * size : (taken[c] + 1) * size] for c in held])))
        taken[held] += 1
    return split


@named
def dirichlet(labels: Any, num_clients: int, alpha: float = 0.5, min_samples: int = 1, tries: int = 100, seed: int = 0) -> Split:
    """Split each class by proportions drawn from Dirichlet(alpha); a small alpha gives very uneven splits.

    Repeats the draw, at most `tries` times, until every client has at least `min_samples` samples.
    """
    y = _classes(labels, num_clients, seed)
    number("alpha", alpha, low=0, high=1e9, open_low=True)
    integer("min_samples", min_samples)
    members = [np.flatnonzero(y == label) for label in np.unique(y)]
    for attempt in range(integer("tries", tries, high=100_000)):
        rng = stream(seed, "partition", attempt)
        shuffled: list[tuple[np.ndarray, np.ndarray]] = []  # per class: its shuffled samples and where to cut them
        for pool in members:
            cuts = (np.cumsum(rng.dirichlet(np.full(num_clients, alpha)))[:-1] * len(pool)).astype(int)
            shuffled.append((rng.permutation(pool), cuts))
        sizes = sum(np.diff(cuts, prepend=0, append=len(pool)) for pool, cuts in shuffled)
        if np.min(sizes) >= min_samples:
            pieces = zip(*(np.split(pool, cuts) for pool, cuts in shuffled), strict=True)
            return [np.sort(np.concatenate(of_client)) for of_client in pieces]
    raise UsageError(
        f"dirichlet found no split in {tries} tries that gives each of {num_clients} clients at least {min_samples} sample(s): "
        f"raise alpha (now {alpha:g}), use fewer clients or lower min_samples"
    )


@named
def iid(labels: Any, num_clients: int, seed: int = 0) -> Split:
    """Shuffle the samples and split them evenly (sizes differ by at most one)."""
    samples = len(_samples(labels, num_clients, seed))
    return [np.sort(part) for part in np.array_split(stream(seed, "partition").permutation(samples), num_clients)]


def by_ids(ids: Any) -> Split:
    """One client per distinct id (a writer, a phone, a hospital), sorted by id."""
    values = labels_of(ids, "ids")
    if values.ndim != 1 or values.size == 0:
        raise UsageError(f"by_ids needs one id per training sample, got an array of shape {values.shape}")
    _, inverse = np.unique(values, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    return list(np.split(order, np.cumsum(np.bincount(inverse))[:-1]))


def _natural(ids: Any = None) -> Split:
    """Use the client ids that come with the data."""
    if ids is None:
        raise UsageError("partition 'natural' needs data with client ids; use shards, classes, dirichlet or iid")
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
    """Check the labels, of any kind, and that every client can have at least one sample."""
    y = labels_of(labels, "labels")
    if y.ndim == 0 or len(y) == 0:
        raise UsageError(f"a partition needs one label for every sample, got an array of shape {y.shape}")
    integer("seed", seed, low=0)
    if integer("num_clients", num_clients) > len(y):
        raise UsageError(f"{num_clients} clients are too many for {len(y)} samples: some would have no data; use fewer clients")
    return y


def _classes(labels: Any, num_clients: int, seed: int) -> np.ndarray:
    """Check that the labels are one class per sample."""
    y = _samples(labels, num_clients, seed)
    if y.dtype.kind == "f":
        raise UsageError(
            "this partition groups samples by class, but the labels are real numbers; "
            "use iid, by_ids, or dirichlet on binned labels such as np.digitize(y, edges)"
        )
    if y.ndim != 1:
        raise UsageError(f"this partition needs one label for every sample, got an array of shape {y.shape}: use iid or by_ids")
    return y


def _warn_if_unused(name: str, split: Split, samples: int) -> Split:
    """Return the split; warn if it leaves more than a few samples unused."""
    used = sum(map(len, split))
    if samples - used > NOTABLE * samples:
        warn_caller(
            f"{name} uses {used:,} of {samples:,} samples ({100 * used / samples:.1f} %): "
            "all clients have equally many samples, and the rest is not used; dirichlet and iid use every sample"
        )
    return split


def _largest_shard(counts: np.ndarray, total: int) -> int:
    """Return the largest shard size that still gives `total` single-class shards."""
    low, high = 1, int(counts.max())
    if int((counts // low).sum()) < total:
        raise UsageError(f"the classes cannot be cut into {total} shards: use fewer clients or fewer shards per client")
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if int((counts // middle).sum()) >= total else (low, middle - 1)
    return low


def _share(capacity: np.ndarray, total: int) -> np.ndarray:
    """Distribute `total` places over the classes, in proportion to their capacities and never above them."""
    ideal = capacity * (total / capacity.sum())
    share = np.floor(ideal).astype(int)
    for c in np.argsort(-(ideal - share), kind="stable")[: total - int(share.sum())]:
        share[c] += 1
    return np.asarray(share)
