"""`History`: the result of a run."""

import copy
import html
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..clients import params
from ..display import curves, schedule_image, table
from ..errors import UsageError, nearest
from ..fingerprint import Fingerprint
from ..tasks.metrics import higher_is_better
from .client_ids import by_id
from .columns import head, primary
from .curves import first_to_reach
from .rows import Row
from .store import RunFolder

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


@dataclass
class History:
    """The rows of a run (one dict per round), its final parameters and which clients participated.

    A row holds: round, active (number of active clients), clients (their numbers; in a federation, their ids if these are numbers from 0 to
    N - 1, else numbers in the order in which they joined), empty, local_lr, global_lr, train_loss, test_loss, test_accuracy,
    class_accuracy, seconds, and running totals: uploads (model uploads as the paper counts them), vectors_up, vectors_down, bytes_up,
    bytes_down. Diagnosed rounds have `diagnosis`, see `mimicfl.metrics.diagnostics`.
    """

    rows: list[Row] = field(repr=False)
    params: Tensor = field(repr=False)  # [d]
    num_clients: int
    client_accuracy: list[float | None] = field(default_factory=list, repr=False)  # on each client's training samples, after the last round
    client_scores: list[float | None] = field(default_factory=list, repr=False, kw_only=True)  # main metric on its own test samples
    class_counts: np.ndarray | None = field(default=None, repr=False)  # [N, classes]
    buffers: dict[str, Tensor] = field(default_factory=dict, repr=False)
    config: dict[str, Any] = field(default_factory=dict, repr=False)
    template: nn.Module | Callable[[], nn.Module] | None = field(default=None, repr=False)  # or a function that creates it
    fingerprint: Fingerprint = field(default_factory=Fingerprint, repr=False)  # empty in records and in runs of earlier versions
    environment: dict[str, Any] = field(default_factory=dict, repr=False)  # versions, hardware and engine, where read from disk
    directions: dict[str, bool] = field(default_factory=dict, repr=False)  # of the task's metrics, by column: is a larger value better?
    shown_as: dict[str, Any] = field(default_factory=dict, repr=False)  # title and line of a custom algorithm, where read from disk
    params_round: int = -1  # number of rounds in `params`; less than all rows if an unfinished run was read between two checkpoints

    def __post_init__(self) -> None:
        if self.params_round < 0:
            self.params_round = len(self.rows)

    def __repr__(self) -> str:
        ends = [f"{key} {self.last(key):.4g}" for key in ("test_accuracy", "test_loss", "distance") if self.last(key) is not None]
        named = [str(self.config[key]) for key in ("algorithm", "availability") if self.config.get(key)]
        behind = [f"params after {self.params_round} rounds"] if self.params_round < len(self.rows) else []
        return f"History({', '.join([*named, f'{len(self.rows)} rounds', f'{self.num_clients} clients', *ends, *behind])})"

    def _repr_html_(self) -> str:
        """In a notebook: the last values, the curve, and the participation."""
        metric, xs, ys = self.curve()
        facts = [(name, f"{value:.4g}") for name in ("test_accuracy", "test_loss", "distance") if (value := self.last(name)) is not None]
        facts += [("uploads", self.last("uploads")), ("MB up", f"{(self.last('bytes_up') or 0) / 1e6:.2f}")] if self.rows else []
        chart = curves([(repr(self), "", xs, ys)], "model uploads", head(metric))
        schedule = schedule_image(self.active, "active") if self.rows and self.num_clients else ""
        return f"<code>{html.escape(repr(self))}</code>{table([], facts)}{chart}{schedule}"

    def curve(self) -> tuple[str, list[int], list[float]]:
        """The main metric: its column, the uploads of the rounds in which it was measured, and its values."""
        columns = dict.fromkeys(column for row in self.rows for column in row)  # a round that is not evaluated lacks some
        metric = primary({column: self.last(column) for column in columns}, self.config) or "test_loss"
        rows = [row for row in self.rows if row.get(metric) is not None]
        return metric, [row["uploads"] for row in rows], [row[metric] for row in rows]

    def model(self) -> nn.Module:
        """A new module with the trained parameters and buffers."""
        if self.template is None:
            raise ValueError(
                "this run was started from Python objects, which its folder does not store; load history.params into your own module"
            )
        empty = copy.deepcopy(self.template) if isinstance(self.template, nn.Module) else self.template()
        module = params.load(empty, self.params)
        for name, value in module.named_buffers():
            if name in self.buffers:
                value.copy_(self.buffers[name])
        return module

    @property
    def active(self) -> np.ndarray:
        """Which clients were active in which round, bool [rounds, clients]."""
        active = np.zeros((len(self.rows), self.num_clients), dtype=bool)
        for t, row in enumerate(self.rows):
            active[t, row["clients"]] = True
        return active

    @property
    def available(self) -> np.ndarray:
        """The former name of `active`, from before rounds had a selection and a deadline."""
        return self.active

    def last(self, key: str) -> Any:
        """The last value of a column that is not None, or None."""
        return next((row[key] for row in reversed(self.rows) if row.get(key) is not None), None)

    def time_to(self, key: str, target: float, against: str = "virtual_seconds") -> float | None:
        """The cost until a column first reaches the target: virtual seconds, or `round`, `uploads`, `bytes_up` or any other column.

        None if the run never reaches it: the time is then censored at the end of the run. Columns of which smaller values are better,
        such as losses, perplexity and RMSE, must fall to the target; others must rise to it.
        `round` is the number of the round, counted from 0.
        """
        if self.rows and against not in self.rows[-1]:
            raise UsageError(f"the rows have no column {against!r}; virtual seconds need a speed, a bandwidth or a trace")
        if self.rows and not any(key in row for row in self.rows):
            raise UsageError(f"the rows have no column {key!r}; {nearest(key, self.rows[-1])}")
        row = first_to_reach(self.rows, target, key, higher_is_better(key, self.directions))
        if row is not None and row.get(against) is None:
            raise UsageError(f"the column {against!r} has no value in round {row['round']}, which reaches the target; use round")
        return None if row is None else float(row[against])

    def to_pandas(self) -> "pandas.DataFrame":
        """The rows as a data frame (needs pandas)."""
        import pandas

        return pandas.DataFrame(self.rows).set_index("round")

    def plot(self) -> "Figure":
        """Plot the main metric against model uploads as a matplotlib figure. `mimicfl report` compares several runs."""
        from matplotlib.figure import Figure

        metric, uploads, values = self.curve()
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(uploads, values, label=str(self.config.get("algorithm", "")))
        axes.set(xlabel="model uploads", ylabel=head(metric), title=str(self.config.get("availability", "")))
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.legend(frameon=False)
        return figure


def read(folder: RunFolder) -> History:
    """Read the history of a run folder, finished or not."""
    final = folder.load("final")
    tensors, facts = final or ({}, {})
    if final is None:
        saved, facts = folder.load("checkpoint") or ({}, {})
        tensors = _model_in(saved)
    counts = tensors.get("class_counts")
    accuracy, scores = tensors.get("client_accuracy"), tensors.get("client_scores")
    folder.check_config(facts)
    rows = folder.rows_of(facts) if final else folder.rows(facts)
    busiest = max((max(row["clients"], default=-1) for row in rows), default=-1) + 1
    num_clients = max(busiest, len(counts) if counts is not None else _clients(folder))
    return History(
        rows=by_id(rows, num_clients),
        params=tensors.get("params", torch.empty(0)),
        num_clients=num_clients,
        client_accuracy=_known(accuracy),
        client_scores=_known(scores),
        class_counts=None if counts is None else counts.numpy(),
        buffers={key.removeprefix("buffer."): value for key, value in tensors.items() if key.startswith("buffer.")},
        config=folder.config,
        fingerprint=Fingerprint.from_json(facts.get("run", "")),
        environment=folder.environment() | {"engine": facts.get("engine", "")},
        directions={key: value for key, value in _facts(facts.get("directions", "{}")).items() if isinstance(value, bool)},
        shown_as=_facts(facts.get("shown as", "{}")),
        params_round=min(int(facts.get("round", len(rows))), len(rows)),
    )


def _model_in(saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """The model of a checkpoint, under the names of a final file: the running mean, if the run evaluates one."""
    w, buffer = ("average.w", "average.buffer.") if "average.w" in saved else ("state.w", "buffer.")
    buffers = {f"buffer.{name.removeprefix(buffer)}": value for name, value in saved.items() if name.startswith(buffer)}
    buffers = {name: value.to(saved[name].dtype) if name in saved else value for name, value in buffers.items()}
    return buffers | ({"params": saved[w]} if w in saved else {})


def _known(values: Tensor | None) -> list[float | None]:
    """A stored value per client; nan, which stands for no value, as None."""
    return [] if values is None else [None if math.isnan(value) else value for value in values.tolist()]


def _clients(folder: RunFolder) -> int:
    number = folder.config.get("num_clients", 0)
    return number if isinstance(number, int) else 0


def _facts(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}
