"""What a cell still has to run, given what is recorded: tuning, extensions of the grid, then the runs that are compared."""

import statistics
from dataclasses import dataclass

from ..settings import Experiment
from .grid import EXTENSIONS, Config, best_of
from .records import Results
from .suite import Cell


@dataclass(frozen=True)
class CellProgress:
    """The progress of a cell."""

    configs: list[Config]  # tried or to be tried
    extended: int  # how many of them the grid did not have at first
    chosen: Config | None  # None until the tuning is complete
    missing: list[Experiment]  # that can be run now
    stage: str  # "tuning", "final" or "complete"
    done: int  # recorded runs that count
    total: int  # runs of the cell as far as known


def score(cell: Cell, config: Config, results: Results) -> float:
    """The mean validation accuracy of a configuration over the tuning seeds; a diverged run scores zero."""
    return statistics.fmean(0.0 if "diverged" in results[key] else float(results[key]["tail"]) for key in cell.tuning(config))


def progress_of(cell: Cell, results: Results) -> CellProgress:
    """Follow the protocol through the recorded runs. The same records always lead to the same next runs."""
    configs = cell.grid.configs()
    first = len(configs)
    for extension in range(EXTENSIONS + 1):
        tuning = {key: e for config in configs for key, e in cell.tuning(config).items()}
        if missing := [e for key, e in tuning.items() if key not in results]:
            total = len(tuning) + cell.part.seeds
            return CellProgress(configs, len(configs) - first, None, missing, "tuning", len(tuning) - len(missing), total)
        best = configs[best_of({k: score(cell, config, results) for k, config in enumerate(configs)})]
        more = cell.grid.beyond(best, configs) if extension < EXTENSIONS else []
        if not more:
            break
        configs = configs + more
    final = cell.final(best)
    missing = [e for key, e in final.items() if key not in results]
    done = len(tuning) + len(final) - len(missing)
    return CellProgress(configs, len(configs) - first, best, missing, "final" if missing else "complete", done, len(tuning) + len(final))
