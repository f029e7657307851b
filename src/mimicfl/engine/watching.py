"""A run that is looked at from the side: what its directions are worth, see `mimicfl.metrics.diagnostics`."""

from typing import Any

from ..errors import UsageError
from ..local.losses import built_in_name
from ..metrics.diagnostics import Watch, plan
from ..theory.population import Population
from .run import Run


def watch(run: Run, diagnose: Any) -> None:
    """Let the run be looked at from the side, as often as `diagnose` says."""
    wanted = plan(diagnose)
    if wanted is None:
        return
    if run.local.extras:
        raise UsageError(f"diagnose is for plain SGD, whose steps are gradients of the loss: leave out {' and '.join(run.local.extras)}")
    kind = built_in_name(run.loss)
    population = Population(run.template, run.clients, run.loss, run.share)
    low = 0.0 if kind else None  # the built-in losses are never negative
    if run.optimum is not None:
        values, g = population.gradients(run.optimum)
        if float(population.mean(g).norm()) <= 1e-5 * float(g.norm(dim=1).max()):  # other splits or weights have another minimum
            low = float(population.share @ values)
    batches = [run.local.batch_sizes(int(size))[0] for size in run.clients.sizes]
    run.watch = Watch(wanted, population, run.available, batches, kind, low, run.seed)
