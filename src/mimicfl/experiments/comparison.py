"""What `compare` returns."""

import numpy as np

from ..algorithms import ALGORITHMS, trait
from ..display import Line, curves, table
from ..metrics.columns import head
from ..metrics.history import History
from ..registry import parse


class Comparison(dict[str, list[History]]):
    """One history per seed for each algorithm, by its spec. A notebook shows the table and the mean curves."""

    def _repr_html_(self) -> str:
        runs = [history for histories in self.values() for history in histories]
        metrics = {history.curve()[0] for history in runs}
        if len(metrics) != 1:
            return f"<code>{len(runs)} runs</code>"
        [metric] = metrics
        rows = [(name, *_final(histories, metric), len(histories)) for name, histories in self.items()]
        chart = curves([_mean_curve(name, histories) for name, histories in self.items()], "model uploads", head(metric))
        return table(["algorithm", head(metric), "± std", "seeds"], rows) + chart


def _final(histories: list[History], metric: str) -> tuple[str, str]:
    values = [history.last(metric) for history in histories if history.last(metric) is not None]
    spread = f"{np.std(values, ddof=1):.4f}" if len(values) > 1 else "–"
    return (f"{np.mean(values):.4f}" if values else "–"), spread


def _mean_curve(name: str, histories: list[History]) -> Line:
    """The mean over seeds, over the rounds that all of them have."""
    found = [history.curve()[1:] for history in histories]
    length = min(len(xs) for xs, _ in found)
    xs, ys = (np.mean([each[k][:length] for each in found], axis=0).tolist() for k in (0, 1))
    return name, str(trait(ALGORITHMS.factories.get(parse(name)[0]), "color") or ""), xs, ys
