"""The batched cohort: the active clients of one or many runs, stacked, as one program."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ...data.clients import Clients, Holdout
from ...local.losses import Loss
from ..cohort import Answers, Ask
from ..jobs import Jobs, Needs, hand_out, list_jobs
from ..lanes import Lanes, width, work_off
from ..support import Unsupported, halving, unmoved_buffers
from .program import Program
from .step import Stack

MODELS_AT_ONCE = 2**17  # test samples times models in one pass


class BatchedCohort:
    """Any module that `vmap(grad)` takes. `lanes` clients train side by side; `compiled` hands the traced step to the compiler."""

    name = "batched"

    def __init__(
        self, model: nn.Module, clients: Clients, loss: Loss, precision: str = "fp32", lanes: int = 0, compiled: bool = False
    ) -> None:
        unmoved_buffers(model, clients, loss)
        self.clients, self.loss, self.precision, self.compiled, self.width = clients, loss, precision, compiled, lanes
        self.stack = Stack(model, clients.data, loss, clients.device, precision)
        self.needs: Needs | None = None
        self.program: Program | None = None

    @property
    def label(self) -> str:
        """What a resumed run needs to know to end bit-equal."""
        return f"{self.name}:{self.width}{':compiled' if self.compiled else ''}"

    def like(self, model: nn.Module) -> "BatchedCohort":
        return BatchedCohort(model, self.clients, self.loss, self.precision, compiled=False)

    def prepare(self, needs: Needs) -> None:
        """Build for jobs of this size from the first: building again would take as long."""
        self.needs = needs

    def train(self, asks: Sequence[Ask]) -> list[Answers]:
        needs = Needs.of(asks)
        if self.needs is None or not self.needs.covers(needs):
            self.forget()
            self.needs = needs if self.needs is None else self.needs.merged(needs)
        jobs = list_jobs(asks, self.needs.batch)
        self.width = self.width or width([len(jobs)], self.clients.device)
        g, total = halving(self, lambda: self._work_off(jobs))
        return hand_out(asks, jobs, g, total)

    def _work_off(self, jobs: Jobs) -> tuple[Tensor, Tensor]:
        if self.program is None:
            assert self.needs is not None
            lanes = Lanes(self.width, self.needs, jobs.w)
            try:
                self.program = Program(self.stack, lanes, self.clients.x, self.clients.y, self.width, self.compiled)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever the transforms cannot do, and however they say so
                raise Unsupported(f"it cannot be stacked ({_first_line(error)})") from error
        return work_off(jobs, self.program.lanes, self.program.advance)

    def forget(self) -> None:
        """Give the memory of lanes and graphs back."""
        self.program = None
        if self.clients.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def outputs(self, w: Tensor, buffers: Sequence[dict[str, Tensor]], samples: Holdout) -> Tensor:
        """Test outputs [r, n, ...] of r models [r, d]."""
        at_once = max(1, MODELS_AT_ONCE // max(1, len(w)))
        return torch.cat([self.stack.outputs(w, x) for x in samples.x.split(at_once)], dim=1)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:160]
