"""`History`: what a run leaves behind."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import params
from ..fingerprint import Fingerprint
from .store import Row as Row
from .store import RunFolder

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


@dataclass
class History:
    """Rows (one dict a round), the final parameters, and who was there.

    A row holds: round, active (how many), clients (which), empty, local_lr, global_lr, train_loss, test_loss,
    test_accuracy, class_accuracy, seconds, and running totals: uploads (model uploadings as the paper counts them),
    vectors_up, vectors_down, bytes_up, bytes_down. Diagnosed rounds have `diagnosis`, see `mimicfl.metrics.diagnostics`.
    """

    rows: list[Row] = field(repr=False)
    params: Tensor = field(repr=False)  # [d]
    num_clients: int
    client_accuracy: list[float] = field(default_factory=list, repr=False)  # on each client's own samples, after the last round
    class_counts: np.ndarray | None = field(default=None, repr=False)  # [N, classes]
    buffers: dict[str, Tensor] = field(default_factory=dict, repr=False)
    config: dict[str, Any] = field(default_factory=dict, repr=False)
    template: nn.Module | Callable[[], nn.Module] | None = field(default=None, repr=False)  # or what makes it, when it is wanted
    fingerprint: Fingerprint = field(default_factory=Fingerprint, repr=False)  # empty in records and in runs of earlier versions
    environment: dict[str, Any] = field(default_factory=dict, repr=False)  # versions and hardware, where read from disk
    params_round: int = -1  # how many rounds `params` have seen: all, or fewer where an unfinished run was read between two checkpoints

    def __post_init__(self) -> None:
        if self.params_round < 0:
            self.params_round = len(self.rows)

    def __repr__(self) -> str:
        ends = [f"{key} {self.last(key):.4g}" for key in ("test_accuracy", "test_loss", "distance") if self.last(key) is not None]
        named = [str(self.config[key]) for key in ("algorithm", "availability") if self.config.get(key)]
        behind = [f"params after {self.params_round} rounds"] if self.params_round < len(self.rows) else []
        return f"History({', '.join([*named, f'{len(self.rows)} rounds', f'{self.num_clients} clients', *ends, *behind])})"

    def model(self) -> nn.Module:
        """The trained module, a new copy."""
        if self.template is None:
            raise ValueError(
                "this run was made of Python objects, which its folder does not hold: load history.params into your own module"
            )
        empty = copy.deepcopy(self.template) if isinstance(self.template, nn.Module) else self.template()
        module = params.load(empty, self.params)
        for name, value in module.named_buffers():
            if name in self.buffers:
                value.copy_(self.buffers[name])
        return module

    @property
    def available(self) -> np.ndarray:
        """Who was there, bool [rounds, clients]."""
        available = np.zeros((len(self.rows), self.num_clients), dtype=bool)
        for t, row in enumerate(self.rows):
            available[t, row["clients"]] = True
        return available

    def last(self, key: str) -> Any:
        """The last value of a column that is not None."""
        return next((row[key] for row in reversed(self.rows) if row.get(key) is not None), None)

    def to_pandas(self) -> "pandas.DataFrame":
        """The rows as a data frame (needs pandas)."""
        import pandas

        return pandas.DataFrame(self.rows).set_index("round")

    def plot(self) -> "Figure":
        """Accuracy (or loss) against uploads, as a matplotlib figure."""
        from ..report.figures import curves

        return curves([self])


def read(folder: RunFolder) -> History:
    """The history of a run folder, finished or not."""
    final = folder.load("final")
    tensors, facts = final or ({}, {})
    if final is None:
        saved, facts = folder.load("checkpoint") or ({}, {})
        tensors = {"params": saved["state.w"]} if "state.w" in saved else {}
    counts = tensors.get("class_counts")
    accuracy = tensors.get("client_accuracy")
    folder.check_config(facts)
    rows = folder.rows_of(facts) if final else folder.rows(facts)
    busiest = max((max(row["clients"], default=-1) for row in rows), default=-1) + 1
    return History(
        rows=rows,
        params=tensors.get("params", torch.empty(0)),
        num_clients=max(busiest, len(counts) if counts is not None else _clients(folder)),
        client_accuracy=[] if accuracy is None else accuracy.tolist(),
        class_counts=None if counts is None else counts.numpy(),
        buffers={key.removeprefix("buffer."): value for key, value in tensors.items() if key.startswith("buffer.")},
        config=folder.config,
        fingerprint=Fingerprint.from_json(facts.get("run", "")),
        environment=folder.environment(),
        params_round=min(int(facts.get("round", len(rows))), len(rows)),
    )


def _clients(folder: RunFolder) -> int:
    number = folder.config.get("num_clients", 0)
    return number if isinstance(number, int) else 0
