"""The batched cohort: the active clients of one or many runs, stacked, as one program."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ...data.clients import Clients, Holdout
from ...local.losses import Loss
from ..jobs import Jobs, Needs
from ..lane_cohort import LaneCohort
from ..lanes import Lanes, work_off
from .program import Program
from .step import Stack

MODELS_AT_ONCE = 2**17  # test samples times models in one pass


class BatchedCohort(LaneCohort):
    """Any module that `vmap(grad)` takes. `lanes` clients train side by side; `compiled` hands the traced step to the compiler."""

    name = "batched"
    cannot = "it cannot be stacked"

    def __init__(
        self, model: nn.Module, clients: Clients, loss: Loss, precision: str = "fp32", lanes: int = 0, compiled: bool = False
    ) -> None:
        super().__init__(model, clients, loss, precision, lanes, compiled)
        self.stack = Stack(model, clients.data, loss, clients.device, precision)
        self.program: Program | None = None

    def like(self, model: nn.Module) -> "BatchedCohort":
        return BatchedCohort(model, self.clients, self.loss, self.precision)

    def _build(self, needs: Needs, w: Tensor) -> None:
        lanes = Lanes(self.width, needs, w)
        self.program = Program(self.stack, lanes, self.clients.x, self.clients.y, self.width, self.compiled)

    def _run(self, jobs: Jobs) -> tuple[Tensor, Tensor]:
        assert self.program is not None
        return work_off(jobs, self.program.lanes, self.program.advance)

    def _drop(self) -> None:
        self.program = None

    @torch.no_grad()
    def outputs(self, w: Tensor, buffers: Sequence[dict[str, Tensor]], samples: Holdout) -> Tensor:
        """Test outputs [r, n, ...] of r models [r, d]."""
        at_once = max(1, MODELS_AT_ONCE // max(1, len(w)))
        return torch.cat([self.stack.outputs(w, x) for x in samples.x.split(at_once)], dim=1)
