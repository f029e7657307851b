"""Datasets by name: `load(name)` finds, downloads, verifies and caches a dataset.

>>> import mimicfl as mf
>>> data = mf.datasets.load("digits")
>>> tuple(data.x_train.shape), data.num_classes
((1442, 1, 8, 8), 10)
"""

import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file

from ..errors import UsageError, flag, nearest, one_of, shown
from ..files import WriteFailed, make_folder, remove_leftovers, write_tensors
from ..registry import Registry, parse
from . import cifar, fashion, sotu, writers
from .dataset import Data
from .download import cache_dir, say
from .synthetic import synthetic

DATASETS: Registry[Data] = Registry("dataset", ("dataset",))
register = DATASETS.register
FETCHABLE: dict[str, ModuleType] = {"fmnist": fashion, "cifar10": cifar, "mnist-writers": writers, "sotu": sotu}
ABOUT = {
    "digits": "1,797 handwritten digits, 8x8 (included in the package)",
    "fmnist": "Fashion-MNIST, 70,000 images of clothes, 28x28",
    "cifar10": "CIFAR-10, 60,000 colour photographs, 32x32",
    "mnist-writers": "MNIST with the writer of every image, 539 clients, 28x28",
    "sotu": "State of the Union addresses of 43 presidents: next-character or next-word prediction",
    "synthetic": "least squares or logistic regression with a known optimum (generated)",
}


def load(name: str, path: str | Path | None = None, fetch: bool = True, **options: Any) -> Data:
    """Load a dataset by name. `path` is the folder that holds its files; with `fetch=False` nothing is downloaded.

    `options` are passed to the dataset; `num_clients` and `seed` only if it has such options.
    """
    if path is not None and not isinstance(path, (str, Path)):
        raise UsageError(f"path must be the folder that holds the files, got {shown(path)}")
    if isinstance(name, str):
        _check_options(name, options)
    data = DATASETS.make(name, path=Path(path) if path else None, fetch=flag("fetch", fetch), **options)
    if not isinstance(data, Data):
        raise UsageError(f"dataset {name!r} must return a mimicfl.Data, got {type(data).__name__}")
    return data


def _check_options(name: str, options: dict[str, Any]) -> None:
    """Refuse unknown options. `num_clients` and `seed` are always allowed, and ignored by datasets without these options."""
    taken = inspect.signature(DATASETS.find(parse(name)[0])).parameters
    spread = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    if not spread and (unknown := options.keys() - taken.keys() - {"num_clients", "seed"}):
        raise UsageError(f"dataset {name!r} has no option {min(unknown)!r}; {nearest(min(unknown), taken)}")


def cached(name: str) -> Path:
    return cache_dir() / f"{name}.safetensors"


def obtain(name: str, path: Path | None = None, fetch: bool = True) -> dict[str, np.ndarray]:
    """Return the verified arrays of a downloadable dataset: from the cache, from local files, or from the network."""
    source = FETCHABLE[name]
    if path is not None and not path.exists():
        raise UsageError(f"{path} does not exist: give the folder that holds the files of {name}")
    if path is None and cached(name).is_file():
        return _from_cache(name)
    for place in source.places(path):
        if (arrays := source.read(place)) is not None:
            return _write_cache(name, arrays)
    failures = [f"no files of {name} in {path}"] if path else []
    for label, fetcher in source.FETCHERS.items() if fetch and path is None else ():
        try:
            say(f"{name}: fetching from {label} ...")
            return _write_cache(name, fetcher())
        except Exception as error:  # whatever fails for one source (network, archive, hash), the next one may work
            failures.append(f"{label}: {error}")
    commands = "\n  ".join(source.COMMANDS)
    reasons = "".join(f"\n  ({reason})" for reason in failures)
    raise UsageError(f"dataset {name!r} is not on this machine. Use one of these commands to get it:\n  {commands}{reasons}")


def _from_cache(name: str) -> dict[str, np.ndarray]:
    file = cached(name)
    try:
        arrays = load_file(file)
        FETCHABLE[name].verify(arrays, str(file))
    except (SafetensorError, KeyError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{file} is damaged ({error}): delete it and run 'mimicfl data fetch {name}'") from None
    return arrays


def _write_cache(name: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Write the arrays to the cache and return them. A read-only home folder does not stop a run."""
    file = cached(name)
    try:
        make_folder(file.parent)
        remove_leftovers(file.parent, [file.name])
        write_tensors(file, {key: torch.from_numpy(np.require(a, requirements=["C", "W"])) for key, a in arrays.items()})
    except WriteFailed as error:
        say(f"{name}: not cached ({error})")
    return arrays


def _fetchable(name: str, path: Path | None, fetch: bool, standardise: bool) -> Data:
    """Load a downloadable dataset. Inputs are standardised per channel, or scaled to [0, 1] if `standardise` is False."""
    flag("standardise", standardise)
    facts: dict[str, Any] = {**obtain(name, path, fetch), **FETCHABLE[name].FACTS}
    return Data(**facts | ({} if standardise else {"mean": (0.0,), "std": (1.0,)}), name=name)


@register("fmnist")
def _fmnist(path: Path | None = None, fetch: bool = True, standardise: bool = True) -> Data:
    return _fetchable("fmnist", path, fetch, standardise)


@register("cifar10")
def _cifar10(path: Path | None = None, fetch: bool = True, standardise: bool = True) -> Data:
    return _fetchable("cifar10", path, fetch, standardise)


@register("mnist-writers")
def _mnist_writers(path: Path | None = None, fetch: bool = True, test: str = "official") -> Data:
    """MNIST, a client per writer; `test="own"` holds out the last tenth of every writer as its own test samples."""
    one_of("test", test, ("official", "own"))
    found: dict[str, Any] = writers.samples(obtain("mnist-writers", path, fetch), test) | writers.FACTS
    return Data(**found, name="mnist-writers")


@register("sotu")
def _sotu(
    path: Path | None = None,
    fetch: bool = True,
    level: str = "character",
    client: str = "president",
    length: int = 0,
    vocabulary: int = 0,
) -> Data:
    """State of the Union addresses; a client is a president or an address, and each has its own test samples."""
    usual = {"character": (64, 100), "word": (20, 10_000)}.get(level, (1, 2))
    found = sotu.samples(sotu.addresses(obtain("sotu", path, fetch)), level, client, length or usual[0], vocabulary or usual[1])
    found.pop("vocabulary")
    return Data(**found, name="sotu", task="token-prediction")


@register("digits")
def _digits() -> Data:
    """Load the digits included in the package; every fifth sample of each class is a test sample."""
    with np.load(Path(__file__).parent / "files" / "digits.npz", allow_pickle=False) as file:
        images, labels = file["images"][:, None], file["labels"]
    order = np.concatenate([np.flatnonzero(labels == c)[4::5] for c in range(10)])
    test = np.zeros(len(labels), dtype=bool)
    test[order] = True
    return Data(images[~test], labels[~test], images[test], labels[test], name="digits", scale=16.0)


register("synthetic", synthetic)
