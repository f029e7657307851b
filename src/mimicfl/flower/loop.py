"""The round loop: asks who is idle, closes at the deadline or when enough answers are in, and remembers what became of everyone."""

import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from ..availability import schedule
from ..errors import Diverged, UsageError, number
from ..seeds import stream
from .journal import Journal
from .post import Post, Sent
from .record import Round, sentence
from .roster import Roster
from .server import natural
from .wire import OURS, Refused, size, words

if TYPE_CHECKING:
    from .strategy import Federated

log = logging.getLogger("flwr")
SAY_EVERY = 15.0  # seconds between two sentences about waiting


class Loop:
    """One `start`: from where the folder says to `num_rounds`."""

    def __init__(
        self,
        strategy: "Federated",
        grid: Grid,
        timeout: float,
        train_config: ConfigRecord | None,
        evaluate_config: ConfigRecord | None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
    ) -> None:
        self.s, self.grid, self.timeout = strategy, grid, number("timeout", timeout, low=0, open_low=True)
        self.train_config, self.evaluate_config = dict(train_config or {}), evaluate_config or ConfigRecord()
        self.evaluate_fn = evaluate_fn
        self.post = Post(grid, strategy.poll)
        self.clock = self.post.clock  # for deadlines; a row's seconds are real time
        self.roster = Roster(grid, self.post, strategy.ask_names)
        self.result = Result()

    def run(self, initial_arrays: ArrayRecord, num_rounds: int) -> Result:
        s = self.s
        s.begin(initial_arrays)
        layout = s.form.layout.describe()
        self.journal = Journal(s.folder, s.words)
        try:
            saved = self.journal.restore(layout)
            s.rows = self.journal.rows
            if saved is not None:
                s.form.load(*saved, s.folder)
                log.info("resumed after round %s from %s", self.journal.t, s.folder)
            else:
                self._save(layout)  # a good one from the first moment, with the experiment's name
            s.form.experiment = self.journal.experiment
            if self.journal.t < num_rounds:
                self.journal.reopen()
            self.first = self.journal.t
            self.result.arrays = s.form.arrays()
            self.present = None if s.pattern is None else schedule(s.pattern, num_rounds, s.num_clients or 1, s.seed, s.class_counts)
            if self.evaluate_fn and self.journal.t == 0:
                self._keep_score(0)
            while self.journal.t < num_rounds:
                self._round(num_rounds, layout)
            self.journal.finish(s.form.w, s.form.buffers)
            return self.result
        finally:
            self.journal.close()

    def _save(self, layout: str) -> None:
        tensors, facts = self.s.form.save()
        self.journal.save(tensors, facts, layout)

    # -- one round -----------------------------------------------------------------------------------------------

    def _round(self, num_rounds: int, layout: str) -> None:
        s, t = self.s, self.journal.t
        self.now = Round(t, time.monotonic())
        clients = self._gather(t)
        if clients or self.now.updates:
            s.form.run_round(self, clients)
        now = self.now
        if not bool(np.isfinite(s.form.w.numpy()).all()):
            raise Diverged(f"the global model is no longer finite in round {t + 1}: lower the learning rate")
        self.result.arrays = s.form.arrays()
        metrics = s.metrics(now.contents)
        if metrics is not None:
            self.result.train_metrics_clientapp[t + 1] = metrics
        if s.fraction_evaluate > 0 and clients:
            self._evaluate_at_clients(t)
        score = self._keep_score(t + 1) if self.evaluate_fn else None
        rows = {client: s.form.row(client) for client in now.updates}
        self.journal.add(row := now.row(rows, self.journal.totals, getattr(s.algorithm, "uploads", 1), dict(score or {})))
        self._save(layout)
        log.info("%s", sentence(row, num_rounds))

    def _gather(self, t: int) -> dict[str, int]:
        """Wait until there is somebody to ask, then choose whom: client -> node."""
        s = self.s
        need = max(s.wait_for if t == 0 else 1, s.min_train_nodes)
        if self.present is not None:
            need = s.num_clients or 1  # virtual clients are always online; the pattern decides who is asked
        began = said = self.clock.now()
        give_up = math.inf if s.patience is None else began + s.patience
        while True:
            self.look()
            # Whose late answer is counted in this round is not asked again in it.
            idle = {client: node for client, node in self.roster.idle().items() if client not in self.now.updates}
            now = self.clock.now()
            # At the start everybody who is online may first say who it is; later, a newcomer delays nobody.
            greeting = t == self.first and any(sent.kind == "hello" for sent in self.post.under_way.values())
            greeted = began + self.timeout if greeting else now
            if len(idle) + len(self.now.updates) >= need and now >= greeted:
                break
            if now >= give_up:
                raise UsageError(
                    f"waited {s.patience:g} s for {need} idle client(s), {len(idle)} are there: start SuperNodes, or lower wait_for; "
                    "what was trained is kept"
                )
            if now - said > SAY_EVERY:
                said = now
                log.info("round %s waits for %s idle client(s): %s are there, %s busy", t + 1, need, len(idle), len(self.post.busy))
            self.clock.wait(min(give_up, greeted if now < greeted else math.inf))
        self.now.began = time.monotonic()
        if self.present is not None:
            there = {str(i) for i in np.flatnonzero(self.present[t])}
            return {client: node for client, node in idle.items() if client in there}
        names = sorted(idle, key=natural)
        count = max(math.ceil(s.fraction_train * len(names) - 1e-9), min(s.min_train_nodes, len(names)))
        chosen = stream(s.seed, "sample", t).permutation(len(names))[:count] if count < len(names) else range(len(names))
        return {names[k]: idle[names[k]] for k in sorted(chosen)}

    def exchange(self, clients: dict[str, int]) -> None:
        """Letters out, answers in, and what they come to."""
        s, now = self.s, self.now
        deadline = self.clock.now() + self.timeout
        admitted = [client for client in clients if self._admit(client)]
        asked, letters = s.ask(now.t, admitted, s.form.arrays(), self.train_config)
        sent = {client: Sent(clients[client], client, "train", now.t, asked) for client in letters}
        # Refused late answers need no delivery after the deadline: the SuperLink may drop the message.
        ttl = self.timeout + 5 if s.late == "refuse" else None
        lost = self.post.send([(letters[client], sent[client]) for client in letters], MessageType.TRAIN, ttl)
        now.sent, now.eta_L = sent, asked.eta_L
        now.failed |= {letter.client: "the SuperLink did not take the message" for letter in lost}
        for client in letters:
            self.count_down(letters[client])
        enough = self._enough(len(sent))
        while now.waiting and now.on_time < enough:
            self.look()
            if not now.waiting or now.on_time >= enough or not self.clock.wait(deadline):
                break
        closed = "the round had enough answers" if now.on_time >= enough else "no answer in time"
        now.failed |= dict.fromkeys(now.waiting, closed)
        now.eta = s.tell(now.t, asked.eta_L, now.updates)

    def _admit(self, client: str) -> bool:
        try:
            self.s.form.row(client)
        except Refused as why:
            self.now.failed[client] = str(why)
            return False
        return True

    def _enough(self, sent: int) -> int:
        e = self.s.enough
        return sent if e is None else e if isinstance(e, int) else max(1, math.ceil(e * sent - 1e-9))

    def look(self, kind: str = "") -> list[tuple[Sent, Message]]:
        """Whatever has arrived goes where it belongs; answers of this kind are the caller's."""
        self.roster.refresh()
        mine = []
        for sent, reply in self.post.collect():
            if sent.kind == "hello":
                for letter in self.roster.hear(sent, reply):
                    if letter.t == self.now.t and letter.client in self.now.waiting:
                        self.now.failed[letter.client] = "it went away and came back"
            elif sent.kind == "train":
                self._take(sent, reply)
            elif sent.kind == kind:
                mine.append((sent, reply))
        return mine

    def _take(self, sent: Sent, reply: Message) -> None:
        now, client = self.now, sent.client
        on_time = sent.t == now.t
        told = None if reply.has_error() else words(reply.content, OURS).get("client-id")
        if self.s.ask_names and isinstance(told, str) and client == f"node-{sent.node}" != told:
            self.s.form.rename(client, told)
            self.roster.name(sent.node, told)  # its answer to the greeting had failed
            now.failed[client] = f"it says now that it is client {told}: it is asked under that name from the next round on"
            return
        if not on_time and (self.s.late == "refuse" or client in now.updates):
            if not reply.has_error():
                now.stale[client] = sent.t
            return
        try:
            update = self.s.read(sent, reply)
        except Refused as why:
            if on_time:
                now.failed[client] = str(why)
            return
        now.updates[client] = update
        now.contents.append(reply.content)
        for record in reply.content.array_records.values():
            now.bytes_up += size(record)
            now.vectors_up += 1
        if not on_time:
            now.late[client] = sent.t

    def count_down(self, letter: RecordDict) -> None:
        for record in letter.array_records.values():
            self.now.bytes_down += size(record)
            self.now.vectors_down += 1

    # -- afterwards ----------------------------------------------------------------------------------------------

    def _evaluate_at_clients(self, t: int) -> None:
        """Federated evaluation among the idle, as Flower does; whoever is silent at the deadline is left out."""
        s = self.s
        self.roster.refresh()
        idle = self.roster.idle()
        names = sorted(idle, key=natural)[: max(math.ceil(s.fraction_evaluate * len(idle)), s.min_evaluate_nodes)]
        content = RecordDict(
            {s.arrayrecord_key: self.result.arrays, s.configrecord_key: ConfigRecord(dict(self.evaluate_config) | {"server-round": t + 1})}
        )
        self.post.send([(content, Sent(idle[c], c, "evaluate", t)) for c in names], MessageType.EVALUATE, self.timeout + 5)
        deadline, replies = self.clock.now() + self.timeout, []
        while True:
            replies += [reply for sent, reply in self.look("evaluate") if sent.t == t]
            under_way = any(sent.kind == "evaluate" and sent.t == t for sent in self.post.under_way.values())
            if not under_way or not self.clock.wait(deadline):
                break
        found = s.aggregate_evaluate(t + 1, replies) if any(not r.has_error() for r in replies) else None
        if found is not None:
            self.result.evaluate_metrics_clientapp[t + 1] = found

    def _keep_score(self, server_round: int) -> MetricRecord | None:
        assert self.evaluate_fn is not None
        score = self.evaluate_fn(server_round, self.result.arrays)
        if score is not None:
            self.result.evaluate_metrics_serverapp[server_round] = score
        return score
