"""`Data` from other libraries: torch datasets and Hugging Face datasets."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from ..errors import UsageError, first_line, nearest, shown
from .arrays import is_missing
from .samples import count, named

AT_ONCE = 1024  # samples per call of collate
Collate = Callable[[list[Any]], Any]
Part = tuple[Any, Any, list[Any] | None]  # inputs, targets and client ids


def from_datasets(
    train: Any, test: Any, collate: Collate | None, targets: str | Sequence[str] | None, client: str | None
) -> dict[str, Any]:
    """The arguments of `Data` for two map-style datasets."""
    x_train, y_train, ids = _collated(train, "train", collate, targets, client)
    x_test, y_test, test_ids = _collated(test, "test", collate, targets, client)
    return {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test, "ids": ids, "test_ids": test_ids}


def _collated(dataset: Any, name: str, collate: Collate | None, targets: Any, client: str | None) -> Part:
    """Every sample of a dataset, collated in batches that are then joined."""
    xs, ys, ids = [], [], list[Any]()
    for samples in _in_batches(dataset, name):
        if client is not None:
            ids += [_client_of(sample, client, name) for sample in samples]
            samples = [{key: value for key, value in sample.items() if key != client} for sample in samples]
        if collate is None:
            _check_entries(samples, name)
        try:
            batch = collate(samples) if collate else default_collate([_with_vectors(sample) for sample in samples])
        except Exception as error:  # the user's code may raise anything
            how = "collate" if collate else "joining the samples"
            raise UsageError(f"{how} fails on samples of {name}: {first_line(error)}; pad them to one length, or pass a collate") from error
        x, y = (_entries(part, f"{what}_{name}") for what, part in zip("xy", _pair(batch, targets, name), strict=True))
        if (found := count(x)) != len(samples):
            raise UsageError(f"collate must keep the number of samples, got {found} rows for {len(samples)} samples of {name}")
        xs.append(x)
        ys.append(y)
    return _joined(xs, f"x_{name}"), _joined(ys, f"y_{name}"), ids if client is not None else None


def _in_batches(dataset: Any, name: str) -> Iterator[list[Any]]:
    try:
        size = len(dataset)
    except (TypeError, NotImplementedError):
        raise UsageError(
            f"{name} has no length: mimicfl needs map-style datasets, with __len__ and __getitem__; read an iterable one into a list first"
        ) from None
    if not size:
        raise UsageError(f"{name} is empty: give at least one sample")
    for begin in range(0, size, AT_ONCE):
        yield [_sample(dataset, k, name) for k in range(begin, min(begin + AT_ONCE, size))]


def _sample(dataset: Any, k: int, name: str) -> Any:
    try:
        return dataset[k]
    except Exception as error:  # the user's code may raise anything
        raise UsageError(f"sample {k} of {name} cannot be read: {type(error).__name__}: {first_line(error)}") from error


def _with_vectors(sample: Any) -> Any:
    """A pair whose lists of numbers are vectors: torch collates them position by position, as if every number were an input."""
    if not isinstance(sample, (tuple, list)):
        return sample
    return tuple(np.array(each) if isinstance(each, list) and each and isinstance(each[0], (int, float, list)) else each for each in sample)


def _check_entries(samples: list[Any], name: str) -> None:
    """Torch collates the entries of the first sample and drops what only others have."""
    held = [set(sample) for sample in samples if isinstance(sample, Mapping)]
    if different := set().union(*held) - set.intersection(*held) if held else set():
        entry = min(map(str, different))
        raise UsageError(f"every sample of {name} needs the same entries, but {entry!r} is missing in some; fill it in or drop it")


def _client_of(sample: Any, client: str, name: str) -> Any:
    if not isinstance(sample, Mapping) or client not in sample:
        raise UsageError(f"client={client!r} names an entry of every sample, but the samples of {name} have no such entry")
    return _id(sample[client], client)


def _id(value: Any, client: str) -> Any:
    if isinstance(value, (Mapping, list, tuple)) or (isinstance(value, (Tensor, np.ndarray)) and len(value.reshape(-1)) != 1):
        raise UsageError(f"the client column {client!r} must hold one number or string per sample, got {shown(value)}")
    found = value.item() if isinstance(value, (Tensor, np.ndarray, np.generic)) else value
    if is_missing(found):
        raise UsageError(f"the client column {client!r} has samples without a client; fill them in or drop these samples")
    return found


def _pair(batch: Any, targets: Any, name: str) -> tuple[Any, Any]:
    """Inputs and targets of a collated batch."""
    if isinstance(batch, Mapping):
        if targets is None:
            raise UsageError(f"the samples of {name} are dicts: pass targets='...' to say which entry is the target, of {list(batch)}")
        batch = _entries(batch, name)
        y = _columns(batch, targets)
        wanted = [targets] if isinstance(targets, str) else list(targets)
        if not (x := {key: value for key, value in batch.items() if key not in wanted}):
            raise UsageError(f"the samples of {name} hold nothing besides {' and '.join(wanted)}; add the inputs of the model")
        return x, y
    if targets is not None:
        raise UsageError(f"targets={shown(targets)} names an entry of a dict, but the samples of {name} are not dicts")
    if not isinstance(batch, (list, tuple)) or len(batch) < 2:
        raise UsageError(f"samples of {name} must be pairs (inputs, target), or dicts with targets='...', got {type(batch).__name__}")
    inputs = batch[0] if len(batch) == 2 else tuple(batch[:-1])
    return tuple(inputs) if isinstance(inputs, list) else inputs, batch[-1]


def _entries(x: Any, name: str) -> Any:
    """The inputs or targets of a batch as tensors."""
    if isinstance(x, Mapping):
        return {key: _as_tensor(value, f"{name}[{key!r}]") for key, value in x.items()}
    return tuple(_as_tensor(value, f"{name}[{k}]") for k, value in enumerate(x)) if isinstance(x, tuple) else _as_tensor(x, name)


def _as_tensor(value: Any, name: str) -> Tensor:
    """One entry of a batch. Torch collates samples that are lists, also of lists, to a list with one entry per position."""
    try:
        return _stacked(value)
    except Exception as error:  # text and other objects
        raise UsageError(f"{name} must hold numbers: {first_line(error)}; convert them in the dataset, or pass a collate") from None


def _stacked(value: Any) -> Tensor:
    """Lists of tensors [B] as one tensor [B, positions, ...]."""
    if isinstance(value, list) and value and all(isinstance(each, (Tensor, list)) for each in value):
        return torch.stack([_stacked(each) for each in value], dim=1)
    return torch.as_tensor(value)


def _joined(batches: list[Any], name: str) -> Any:
    """The batches one after another; each must have the same entries and shapes."""
    held = [named(batch, name) for batch in batches]
    for later in held[1:]:
        if different := held[0].keys() ^ later.keys():
            raise UsageError(f"every batch needs the same entries, but {min(different)} is missing in some batches; fill it in or drop it")
        for key, first in held[0].items():
            if later[key].shape[1:] != first.shape[1:]:
                found = f"{tuple(first.shape[1:])} and {tuple(later[key].shape[1:])}"
                raise UsageError(f"collate must give every batch the same shapes, but {key} is {found}; pad to one fixed length")
    joined = [torch.cat([each[key] for each in held]) for key in held[0]]
    first = batches[0]
    if isinstance(first, Mapping):
        return dict(zip(first, joined, strict=True))
    return tuple(joined) if isinstance(first, tuple) else joined[0]


def from_huggingface(dataset: Any, test: Any, inputs: Any, target: Any, client: str | None) -> dict[str, Any]:
    """The arguments of `Data` for a `datasets.DatasetDict` with train and test, or two `datasets.Dataset`."""
    if test is None:
        if not isinstance(dataset, Mapping) or not {"train", "test"} <= set(dataset):
            raise UsageError("give a dataset with the parts train and test, as dataset.train_test_split(0.1) makes it, or test=...")
        dataset, test = dataset["train"], dataset["test"]
    found: dict[str, Any] = {}
    for part, held in (("train", dataset), ("test", test)):
        if not hasattr(held, "column_names") or not hasattr(held, "__getitem__"):
            raise UsageError(f"{part} must be a datasets.Dataset, got {type(held).__name__}; for torch datasets use from_datasets")
        found[f"x_{part}"], found[f"y_{part}"] = _columns(held, inputs), _columns(held, target)
        if client is not None:
            found["ids" if part == "train" else "test_ids"] = [_id(value, client) for value in _column(held, client, raw=True)]
    return found


def _columns(held: Any, wanted: Any) -> Any:
    """One column as an array, several as a dict of arrays."""
    if isinstance(wanted, str):
        return _column(held, wanted)
    if not isinstance(wanted, Sequence) or not wanted or not all(isinstance(name, str) for name in wanted):
        raise UsageError(f"columns must be a name or a list of names, got {shown(wanted)}")
    return {name: _column(held, name) for name in wanted}


def _column(held: Any, name: str, raw: bool = False) -> Any:
    known = list(getattr(held, "column_names", None) or held)
    if name not in known:
        raise UsageError(f"the dataset has no column {name!r}; {nearest(name, known)}")
    try:
        values = held[name]
        values = values if isinstance(values, (Tensor, np.ndarray)) else list(values)
    except KeyError:
        raise UsageError(f"the format of the dataset leaves out column {name!r}; use with_format without columns=...") from None
    if raw or isinstance(values, (Tensor, np.ndarray)):
        return values
    if values and isinstance(values[0], Tensor):
        values = [value.numpy() for value in values]
    try:
        return np.array(values)
    except ValueError:
        raise UsageError(
            f"column {name!r} has rows of different lengths: pad them to one length, as in tokenizer(..., padding='max_length', "
            "truncation=True), or use from_datasets with a collate"
        ) from None
