"""The batched engine stacks the active clients of one or more runs and trains them with one program."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ....clients.losses import Loss
from ....data.clients import Clients, Holdout
from ....data.samples import parts
from ..jobs import Jobs, Needs, Results
from ..lane_engine import LaneEngine
from ..lanes import Lanes
from ..layout import Layout
from .convolution import by_pieces, is_wide
from .program import Program
from .step import Stack

# Models and samples per evaluation pass. The number of models is fixed so that a model's outputs do not depend on the others.
MODELS, SAMPLES = 8, 2**14


class BatchedEngine(LaneEngine):
    """Trains any module that `vmap(grad)` supports, `lanes` clients in parallel; `compiled` compiles the traced step."""

    name = "batched"
    failure = "it cannot be stacked"

    def __init__(
        self, model: nn.Module, clients: Clients, loss: Loss, precision: str = "fp32", lanes: int = 0, compiled: bool = False
    ) -> None:
        super().__init__(model, clients, loss, precision, lanes, compiled)
        self.wide = is_wide(model, clients.device, precision)
        if by_pieces(model, clients.device, precision):
            self.layout = Layout(model, clients.device)
        self.stack = Stack(model, clients.data, loss, clients.device, precision, self.buffers, self.layout, self.wide)
        self.program: Program | None = None

    def like(self, model: nn.Module) -> "BatchedEngine":
        return BatchedEngine(model, self.clients, self.loss, self.precision)

    def _lane(self, needs: Needs) -> Needs:
        """Include the shift and the proximal term if the update is compiled: without them the compiler might sum in a different order."""
        return needs if self.layout is not None and needs.plain_sgd else replace(needs, shift=True, prox=True)

    def _build(self, needs: Needs, jobs: Jobs) -> None:
        lanes = Lanes(self.width, needs, jobs, half=self.stack.half, scale=self._scale(needs, jobs.w[0]), pieces=self.layout is not None)
        self.program = Program(self.stack, lanes, self.clients.x, self.clients.y, self.width, self.compiled)

    def _run(self, jobs: Jobs) -> Results:
        assert self.program is not None
        return self._pass(jobs, self.program.lanes, self.program.advance)

    def _drop(self) -> None:
        self.program = None

    @torch.no_grad()
    def outputs(self, w: Tensor, buffers: Sequence[dict[str, Tensor]], samples: Holdout) -> Tensor | None:
        """Test outputs [r, n, ...] of r models [r, d].

        None on a CPU, where the last bits would depend on a model's place among them, for wide models, which fill the GPU one by one,
        and for models whose outputs depend on the other samples of a pass.
        """
        if w.device.type == "cpu" or self.wide or self.batch_use.evaluation:
            return None
        held = self.buffers.of_requests(buffers)
        place = torch.arange(len(w) + -len(w) % MODELS, device=w.device).clamp_max(len(w) - 1)
        passes = []
        for models in place.split(MODELS):
            part, own = w[models], {kind: rows[models] for kind, rows in held.items()}
            passes.append(torch.cat([self.stack.outputs(part, own, x) for x in parts(samples.x, SAMPLES)], dim=1))
        return torch.cat(passes)[: len(w)]
