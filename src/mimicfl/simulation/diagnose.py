"""Attach diagnostics to a run: how far the applied directions are from the true gradient, see `mimicfl.metrics.diagnostics`."""

from typing import Any

from ..clients.losses import built_in_name
from ..errors import UsageError
from ..metrics.diagnostics import Diagnostics, parse_diagnose
from ..theory.population import Population
from .run import Run


def attach_diagnostics(run: Run, diagnose: Any) -> None:
    """Diagnose the run as often as `diagnose` says."""
    settings = parse_diagnose(diagnose)
    if settings is None:
        return
    if run.participation.arrivals is not None:
        raise UsageError("diagnose needs synchronous rounds; remove asynchronous")
    if run.participation.stages.selection.needs_model:
        raise UsageError("diagnose needs a schedule that is known before the run; use a selection that does not depend on the model")
    problem = run.problem
    if problem.local.extras:
        extras = " and ".join(problem.local.extras)
        raise UsageError(f"diagnose needs plain SGD, whose steps are gradients of the loss: remove {extras}")
    kind = built_in_name(problem.loss)
    population = Population(problem.template, problem.clients, problem.loss, problem.share)
    low = 0.0 if kind else None  # the built-in losses are never negative
    if problem.optimum is not None:
        values, g = population.gradients(problem.optimum)
        if float(population.mean(g).norm()) <= 1e-5 * float(g.norm(dim=1).max()):  # with other splits or weights the minimum differs
            low = float(population.share @ values)
    batches = [problem.local.batch_sizes(int(size))[0] for size in problem.clients.sizes]
    run.diagnostics = Diagnostics(settings, population, run.active, batches, kind, low, run.seed)
