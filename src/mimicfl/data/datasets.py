"""`load(name)`: find, fetch, verify and cache a dataset.

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

from ..errors import UsageError, flag, nearest, shown
from ..files import WriteFailed, explained, sweep, write_tensors
from ..registry import Registry, parse
from . import cifar, fashion
from .dataset import Data
from .download import cache_dir, say
from .synthetic import synthetic

DATASETS: Registry[Data] = Registry("dataset", ("dataset",))
register = DATASETS.register
FETCHABLE: dict[str, ModuleType] = {"fmnist": fashion, "cifar10": cifar}
ABOUT = {
    "digits": "1,797 handwritten digits, 8x8 (inside the package)",
    "fmnist": "Fashion-MNIST, 70,000 images of clothes, 28x28",
    "cifar10": "CIFAR-10, 60,000 colour photographs, 32x32",
    "synthetic": "least squares or logistic regression with a known optimum (made on the spot)",
}


def load(name: str, path: str | Path | None = None, fetch: bool = True, **options: Any) -> Data:
    """A dataset by name; `path` says where its files are, `fetch=False` never downloads.

    `options` are those of the dataset; `num_clients` and `seed` reach the datasets that have them.
    """
    if path is not None and not isinstance(path, (str, Path)):
        raise UsageError(f"path must be the folder that holds the files, got {shown(path)}")
    if isinstance(name, str):
        _check_options(name, options)
    data = DATASETS.make(name, path=Path(path) if path else None, fetch=flag("fetch", fetch), **options)
    if not isinstance(data, Data):
        raise UsageError(f"dataset {name!r} must be made as a mimicfl.Data, got {type(data).__name__}")
    return data


def _check_options(name: str, options: dict[str, Any]) -> None:
    """Refuse unknown options; `num_clients` and `seed` are dropped where a dataset does not take them."""
    taken = inspect.signature(DATASETS.find(parse(name)[0])).parameters
    spread = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    if not spread and (unknown := options.keys() - taken.keys() - {"num_clients", "seed"}):
        raise UsageError(f"dataset {name!r} has no option {min(unknown)!r}; {nearest(min(unknown), taken)}")


def cached(name: str) -> Path:
    return cache_dir() / f"{name}.safetensors"


def obtain(name: str, path: Path | None = None, fetch: bool = True) -> dict[str, np.ndarray]:
    """Verified arrays of a fetchable dataset: from the cache, from files on this machine, or from elsewhere."""
    source = FETCHABLE[name]
    if path is not None and not path.exists():
        raise UsageError(f"{path} does not exist: give the folder that holds the files of {name}")
    if path is None and cached(name).is_file():
        return _from_cache(name)
    for place in source.places(path):
        if (arrays := source.read(place)) is not None:
            return _keep(name, arrays)
    trouble = [f"no files of {name} in {path}"] if path else []
    for label, fetcher in source.FETCHERS.items() if fetch and path is None else ():
        try:
            say(f"{name}: fetching from {label} ...")
            return _keep(name, fetcher())
        except Exception as error:  # whatever is wrong with one source (network, archive, hash), the next may be good
            trouble.append(f"{label}: {error}")
    commands = "\n  ".join(source.COMMANDS)
    reasons = "".join(f"\n  ({reason})" for reason in trouble)
    raise UsageError(f"dataset {name!r} is not on this machine. One of these gets it:\n  {commands}{reasons}")


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


def _keep(name: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Write to the cache if it can be written; a read-only home must not stop a run."""
    file = cached(name)
    try:
        with explained(file):
            file.parent.mkdir(parents=True, exist_ok=True)
        sweep(file.parent, [file.name])
        write_tensors(file, {key: torch.from_numpy(np.require(a, requirements=["C", "W"])) for key, a in arrays.items()})
    except WriteFailed as error:
        say(f"{name}: not cached ({error})")
    return arrays


def _fetchable(name: str, path: Path | None, fetch: bool, standardise: bool) -> Data:
    """Inputs are standardised per channel, or left between 0 and 1."""
    flag("standardise", standardise)
    facts: dict[str, Any] = {**obtain(name, path, fetch), **FETCHABLE[name].FACTS}
    return Data(**facts | ({} if standardise else {"mean": (0.0,), "std": (1.0,)}), name=name)


@register("fmnist")
def _fmnist(path: Path | None = None, fetch: bool = True, standardise: bool = True) -> Data:
    return _fetchable("fmnist", path, fetch, standardise)


@register("cifar10")
def _cifar10(path: Path | None = None, fetch: bool = True, standardise: bool = True) -> Data:
    return _fetchable("cifar10", path, fetch, standardise)


@register("digits")
def _digits() -> Data:
    """The embedded digits; every fifth sample of each class is for testing."""
    with np.load(Path(__file__).parent / "files" / "digits.npz", allow_pickle=False) as file:
        images, labels = file["images"][:, None], file["labels"]
    order = np.concatenate([np.flatnonzero(labels == c)[4::5] for c in range(10)])
    test = np.zeros(len(labels), dtype=bool)
    test[order] = True
    return Data(images[~test], labels[~test], images[test], labels[test], name="digits", scale=16.0)


register("synthetic", synthetic)
