"""Hold out training samples for validation, so that settings can be tuned without the test samples."""

import dataclasses

import numpy as np

from ..errors import UsageError
from ..seeds import stream
from .dataset import Data
from .samples import rows


def held_out(data: Data, share: float) -> Data:
    """The same data with a share of the training samples of each class in place of the test samples. The choice is always the same."""
    labels = data.y_train.numpy() if data.num_classes and data.y_train.ndim == 1 else np.zeros(data.num_train, dtype=int)
    held = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        own = np.flatnonzero(labels == label)
        order = stream(0, "validation", int(label)).permutation(len(own))
        held[own[order[: round(share * len(own))]]] = True
    if not held.any() or held.all():
        raise UsageError(f"validation={share:g} leaves no samples to {'train' if held.all() else 'validate'} on; give another share")
    kept, out = np.flatnonzero(~held), np.flatnonzero(held)
    return dataclasses.replace(
        data,
        x_train=rows(data.x_train, kept),
        y_train=rows(data.y_train, kept),
        x_test=rows(data.x_train, out),
        y_test=rows(data.y_train, out),
        ids=None if data.ids is None else np.asarray(data.ids)[kept],
        test_ids=None if data.test_ids is None else np.asarray(data.ids)[out],
        optimum=None,  # of other samples
        name=f"{data.name}, validation {share:g}",
    )
