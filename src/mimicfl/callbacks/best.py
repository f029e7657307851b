"""Keep the best model of a run."""

from dataclasses import dataclass, field

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import one_of
from ..files import write_tensors
from .interface import Callback, RoundInfo, RunInfo
from .stopping import improves, larger_is_better, measured

FILE = "best.safetensors"


@dataclass(frozen=True)
class Best:
    """The best model of a run so far."""

    round: int
    value: float
    params: Tensor = field(repr=False)  # [d]


@dataclass
class BestModel(Callback):
    """Keep the parameters after the round with the best metric: in `found`, by the name of the run, and in its folder if it has one.

    The file `best.safetensors` holds `params` and, as metadata, the round and the value. `metric` and `mode` as in `EarlyStopping`. A run
    that resumes continues with this file; without one, the best of the remaining rounds is kept.
    """

    part_of_result = False
    metric: str = "test_accuracy"
    mode: str = "auto"
    found: dict[str, Best] = field(default_factory=dict, init=False, repr=False)  # shared by the copies of this callback

    def __post_init__(self) -> None:
        one_of("mode", self.mode, ("auto", "max", "min"))
        self._run = RunInfo()
        self._best: float | None = None

    def begin(self, run: RunInfo) -> None:
        self._run, self._best = run, None
        kept = self._stored(run)
        if kept is None:
            return
        if kept.round < len(run.rows):
            self._best, self.found[run.name] = kept.value, kept
            return
        for row in run.rows:  # the file holds a later round, which will be repeated
            if self._improves(value := row.get(self.metric)):
                self._best = value

    def _improves(self, value: float | None) -> bool:
        return value is not None and improves(larger_is_better(self.metric, self.mode, self._run), value, self._best)

    def _stored(self, run: RunInfo) -> Best | None:
        """The best model so far, from the folder of a run that resumes."""
        if run.folder is None or not run.rows or not (run.folder / FILE).is_file():
            return None
        try:
            with safe_open(run.folder / FILE, framework="pt") as file:
                facts = file.metadata()
                return Best(int(facts["round"]), float(facts[self.metric]), file.get_tensor("params"))
        except (OSError, ValueError, KeyError, TypeError, SafetensorError):  # another metric, or a damaged file
            return None

    def each_round(self, now: RoundInfo) -> None:
        value = measured(now.row, self.metric, "the best model")
        if value is None or not self._improves(value):
            return
        self._best = value
        best = self.found[self._run.name] = Best(now.row["round"], value, now.params)
        if self._run.folder is not None:
            facts = {"round": str(best.round), self.metric: repr(value)}
            write_tensors(self._run.folder / FILE, {"params": best.params}, facts)
