"""The batched cohort: the active clients of one or many runs, stacked, as one program."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ...data.clients import Clients, Holdout
from ...local.losses import Loss
from ..jobs import Jobs, Needs
from ..lane_cohort import LaneCohort
from ..lanes import Lanes, work_off
from .program import Program
from .step import Stack

MODELS, SAMPLES = 8, 2**14  # tested in one pass; always as many, so that a model's outputs do not depend on its company


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

    def _lane(self, needs: Needs) -> Needs:
        """With both terms whatever the company asks for: in another program the compiler may sum in another order."""
        return replace(needs, shift=True, prox=True)

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
        filled = torch.cat([w, w[-1:].expand(-len(w) % MODELS, -1)])
        passes = [torch.cat([self.stack.outputs(part, x) for x in samples.x.split(SAMPLES)], dim=1) for part in filled.split(MODELS)]
        return torch.cat(passes)[: len(w)]
