"""A round that has just ended, as a user's own function sees it: what it measures joins the row, and it may end the run."""

import copy
import json
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .. import params
from ..errors import UsageError
from ..metrics.history import Row

if TYPE_CHECKING:
    from .run import Run

# Keys that some rows have, and columns beside the rows in a data frame of many runs.
TAKEN = ("stopped", "distance", "diagnosis", "run", "algorithm", "availability", "seed")
EachRound = Callable[["Moment"], Mapping[str, Any] | None]


class Moment:
    """What `each_round` is called with.

    row      the round's row, a copy
    rounds   how many there will be
    params   the global model as a vector [d], a copy on the CPU
    model()  the same as a module of its own, in evaluation mode, on the run's device
    stop()   the run ends with this round
    """

    def __init__(self, run: "Run", row: Row) -> None:
        self._run, self.row, self.rounds, self.stopped = run, dict(row), run.rounds, False

    @property
    def params(self) -> Tensor:
        w: Tensor = self._run.state.w
        return w.detach().cpu().clone()

    def model(self) -> nn.Module:
        module = params.load(copy.deepcopy(self._run.template).to(self._run.device), self._run.state.w)
        for name, value in module.named_buffers():
            if name in self._run.buffers:
                value.copy_(self._run.buffers[name])
        return module.eval()

    def stop(self) -> None:
        self.stopped = True


def look(each_round: EachRound, run: "Run", row: Row) -> bool:
    """Let the user look; what comes back joins the row. Is the run to end here?"""
    moment = Moment(run, row)
    found = each_round(moment)
    if found is not None and not isinstance(found, Mapping):
        raise UsageError(f"each_round gives a dict of what it measured, or nothing, got {found!r}; to end the run it calls .stop()")
    for key, value in (found or {}).items():
        if key in row or key in TAKEN or not isinstance(key, str):
            raise UsageError(f"each_round gave {key!r}, which rows have already: choose another name")
        try:
            plain = value.tolist() if hasattr(value, "tolist") else value  # tensors and numbers of NumPy
            row[key] = None if isinstance(plain, float) and not math.isfinite(plain) else json.loads(json.dumps(plain, allow_nan=False))
        except (TypeError, ValueError, RuntimeError):
            raise UsageError(f"each_round gave {key}={value!r}: give numbers, strings or lists of them") from None
    return moment.stopped
