"""The round loop: sends requests to idle clients, closes a round at its deadline or after enough replies, and records the outcome.

A round calls the strategy's `configure_train`, `aggregate_train`, `configure_evaluate` and `aggregate_evaluate` as Flower's own loop does,
so subclasses may override them.
"""

import io
import json
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy.strategy_utils import log_strategy_start_info
from torch import nn

from ..algorithms import trait
from ..callbacks.interface import RoundInfo, RunInfo
from ..errors import Diverged, UsageError, number
from ..metrics.rows import Row
from ..participation import schedule
from .exchange import Exchange
from .interface import Strategy
from .messages import SentMessage
from .models import load_arrays
from .round_record import log_line
from .run_log import RunLog

log = logging.getLogger("flwr")
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class Loop(Exchange):
    """The rounds of one strategy on one grid."""

    def __init__(self, strategy: Strategy, grid: Grid) -> None:
        super().__init__(strategy, grid)
        self.running, self.result = False, Result()
        self.evaluate_config = ConfigRecord()
        self.evaluate_fn: EvaluateFn | None = None

    def run(self, initial_arrays: ArrayRecord, num_rounds: int, timeout: float) -> Result:
        """Run all remaining rounds. Raises `Diverged` if the model is no longer finite; the last checkpoint is kept."""
        s = self.strategy
        self.timeout, self.running = number("timeout", timeout, low=0, open_low=True), True
        log.info("Starting %s strategy:", type(s).__name__)
        log_strategy_start_info(num_rounds, initial_arrays, self.train_config, self.evaluate_config)
        s.summary()
        log.info("")
        began, finished = time.monotonic(), False
        s.begin(initial_arrays)
        self.layout = s.form.layout.describe()
        self.log = RunLog(s.folder, s.config, s.keep_checkpoints)
        try:
            self._resume(num_rounds)
            self.available = None if s.pattern is None else schedule(s.pattern, num_rounds, s.num_clients or 1, s.seed, s.class_counts)
            if self.evaluate_fn and self.log.t == 0:
                log.info("Initial global evaluation results: %s", self._evaluate_on_server(0))
                self._save()
            s.callbacks.begin(RunInfo.of(self.log, s.config, num_rounds))
            while self.log.t < num_rounds and not self.log.stopped:
                self._round(num_rounds)
            if self.saved_at[0] < self.log.t:
                self._save()
            s.failures.check_end()
            self.log.finish(s.form.model, {"clients": json.dumps([])})
            finished = True
        except Diverged:
            raise
        except UsageError:  # too few clients, or nothing learned: the rounds since the last checkpoint are kept
            if hasattr(self, "saved_at") and self.saved_at[0] < self.log.t:
                self._save()
            raise
        finally:
            self.running = False
            try:
                s.callbacks.end(finished)
            finally:
                self.log.close()
        log.info("")
        log.info("Strategy execution finished in %.2fs", time.monotonic() - began)
        for line in ("", "Final results:", "", *("\t" + line.strip("\n") for line in io.StringIO(str(self.result))), ""):
            log.info("%s", line)
        return self.result

    def _resume(self, num_rounds: int) -> None:
        """Continue from the folder's checkpoint; without one, save the first."""
        s = self.strategy
        saved = self.log.resume(self.layout)
        s.rows = self.log.rows
        if saved is not None:
            self.saved_at = (self.log.t, time.monotonic())
            s.form.load(*saved, s.folder)
            s.bound.last = json.loads(saved[1].get("norms", "{}"))
            self.result.evaluate_metrics_serverapp |= _records({0: json.loads(saved[1].get("initial", "{}"))})
            for kind, target in self._results().items():
                target |= _records({row["round"] + 1: row.get("metrics", {}).get(kind, {}) for row in s.rows})
            s.failures.restore(s.rows)
            log.info("resumed after round %s from %s", self.log.t, s.folder)
        else:
            self._save()  # from the start, since clients store their state under this experiment's id
        s.form.experiment = self.log.experiment
        if self.log.folder is not None and self.log.t < num_rounds:
            self.log.folder.reopen()
        self.first = self.log.t
        self.arrays = s.hand_out()
        self.result.arrays = s.evaluated(self.arrays)

    def _results(self) -> dict[str, dict[int, MetricRecord]]:
        found = self.result
        return {
            "train": found.train_metrics_clientapp,
            "evaluate": found.evaluate_metrics_clientapp,
            "server": found.evaluate_metrics_serverapp,
        }

    def _save(self) -> None:
        tensors, facts = self.strategy.form.save()
        initial = dict(self.result.evaluate_metrics_serverapp.get(0, {}))
        facts |= {"norms": json.dumps(self.strategy.bound.last), "initial": json.dumps(initial)}
        self.log.checkpoint(tensors, facts, self.layout, self.strategy.form.changed())
        self.saved_at = (self.log.t, time.monotonic())

    def _save_if_due(self) -> None:
        rounds, seconds = self.strategy.save_every
        if self.log.t >= self.saved_at[0] + rounds and time.monotonic() >= self.saved_at[1] + seconds:
            self._save()

    def _round(self, num_rounds: int) -> None:
        s, t = self.strategy, self.log.t
        log.info("")
        log.info("[ROUND %s/%s]", t + 1, num_rounds)
        self.open_round(t)
        try:
            aggregated, metrics = s.form.run_round(self)
        except Diverged:
            raise Diverged(f"the global model is no longer finite in round {t + 1}; lower the learning rate") from None
        if aggregated is not None:
            self.arrays, self.result.arrays = aggregated, s.evaluated(aggregated)
        self._keep("train", t, metrics)
        self._evaluate_at_clients(t)
        if self.evaluate_fn:
            log.info("Global evaluation")
            log.info("\t└──> MetricRecord: %s", self._evaluate_on_server(t + 1))
        current = self.round
        rows = {client: s.form.row(client) for client in current.updates}
        row = current.row(rows, self.log, trait(s.algorithm, "uploads"))
        s.callbacks.record(row, self._info, self.log.append)
        self._save_if_due()
        log.info("%s", log_line(row, num_rounds))
        if self.log.stopped:
            log.info("a callback stopped the run after round %s", t + 1)
        s.failures.note(row)

    def _info(self, row: Row, run: RunInfo) -> RoundInfo:
        """What callbacks see of a round."""
        return RoundInfo(row, run, lambda: self.strategy.form.model[0].detach().clone(), self._module)

    def _module(self) -> nn.Module:
        if self.strategy.model is None:
            raise UsageError("the strategy knows the parameters, but not your model class; use `params`, or start the run with server_app")
        return load_arrays(self.strategy.model(), self.result.arrays).eval()

    def _keep(self, kind: str, t: int, metrics: MetricRecord | None) -> None:
        """Store the aggregated metrics of a round."""
        if metrics is not None:
            log.info("\t└──> Aggregated MetricRecord: %s", metrics)
            self._results()[kind][t + 1] = metrics
            self.round.metrics[kind] = dict(metrics)

    # -- evaluation ----------------------------------------------------------------------------------------------

    def _evaluate_at_clients(self, t: int) -> None:
        """Federated evaluation, as in Flower; clients that miss the deadline are left out."""
        self.roster.refresh()
        messages = list(self.strategy.configure_evaluate(t + 1, self.result.arrays, self.evaluate_config, self.grid))
        names = self.roster.client_of
        self.messages.send([(m, SentMessage(node := m.metadata.dst_node_id, names.get(node, ""), "evaluate", t)) for m in messages])
        deadline, replies = self.clock.now() + self.timeout, list[Message]()
        while messages:
            replies += [reply for sent, reply in self.collect("evaluate") if sent.t == t]
            waiting = any(sent.kind == "evaluate" and sent.t == t for sent in self.messages.in_flight.values())
            if not waiting or not self.clock.wait(deadline):
                break
        self._keep("evaluate", t, self.strategy.aggregate_evaluate(t + 1, replies))

    def _evaluate_on_server(self, server_round: int) -> MetricRecord | None:
        """Call `evaluate_fn` on the global model, or the running mean, and store its metrics."""
        assert self.evaluate_fn is not None
        score = self.evaluate_fn(server_round, self.result.arrays)
        if score is not None:
            self.result.evaluate_metrics_serverapp[server_round] = score
            self.round.metrics["server"] = dict(score)
        return score


def _records(metrics: dict[int, dict[str, Any]]) -> dict[int, MetricRecord]:
    """Metrics per round, as read from rows, as Flower's records; numbers that were not finite are nan."""

    def number_(value: Any) -> Any:
        return [number_(each) for each in value] if isinstance(value, list) else math.nan if value is None else value

    return {t: MetricRecord({key: number_(value) for key, value in found.items()}) for t, found in metrics.items() if found}
