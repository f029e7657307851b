"""MimiC's client form over Flower's SecAgg+: the server learns the sum of the corrected updates and who was part of it.

A round survives clients that drop out at any stage. Flower's workflow demands the key shares of everybody it first addressed, and
gives up when one has gone before sharing; here the set shrinks from stage to stage, as in the protocol of Bonawitz et al. (2017),
and the threshold stays the number it was at the beginning. The argument is in docs/flower.md.
"""

import logging
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.common import FitIns, Parameters, bytes_to_ndarray
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage

from ..errors import UsageError, number
from .ledger import ClientForm
from .masked import own_copy
from .post import Sent, reason
from .wire import Layout, Refused, Update, words

if TYPE_CHECKING:
    from .loop import Loop

log = logging.getLogger("flwr")
STAGES = {Stage.SETUP: "setup", Stage.SHARE_KEYS: "sharing keys", Stage.COLLECT_MASKED_VECTORS: "training", Stage.UNMASK: "unmasking"}
_server: Any = own_copy("flwr.server.workflow.secure_aggregation.secaggplus_workflow")


class SecureForm(ClientForm):
    """`threshold` is the share of the clients asked that must see a round through: above one half, or it proves nothing.

    `clip` bounds |g + c| in every coordinate; a client beyond it refuses to answer, rather than send something else.
    """

    name = "secure"

    def __init__(self, *, threshold: float = 2 / 3, clip: float = 8.0, update: str = "sum", num_clients: int | None = None) -> None:
        super().__init__(update=update, num_clients=num_clients)
        self.threshold = number("threshold", threshold, low=0.5, high=1, open_low=True)
        self.clip = number("clip", clip, low=0, open_low=True)

    def begin(self, layout: Layout, arrays: ArrayRecord) -> None:
        super().begin(layout, arrays)
        if self.buffers:
            name = next(iter(self.buffers))
            raise UsageError(f"secure aggregation sums parameters only, this model carries {name!r} beside them: use GroupNorm")

    def _more(self) -> dict[str, float]:
        return {"clip": self.clip}

    def run_round(self, loop: "Loop", clients: dict[str, int]) -> None:
        """One round; if too few see it through, nothing is learned and nothing changes."""
        now, s = loop.now, loop.s
        asked, letters = s.ask(now.t, list(clients), self.arrays(), loop.train_config)
        now.sent = {client: Sent(clients[client], client, "secure", now.t, asked) for client in letters}
        now.eta_L = asked.eta_L
        needed = max(2, math.ceil(self.threshold * len(clients) - 1e-9))  # above one half, since the threshold is
        if len(clients) < 3:
            now.failed |= dict.fromkeys(clients, f"secure aggregation needs at least 3 clients, {len(clients)} are there")
            return
        round_ = SecureRound(self, loop, {node: letters[client] for client, node in clients.items()}, needed)
        v = round_.run()
        names = {node: client for client, node in clients.items()}
        counted = sorted(names[node] for node in round_.counted) if v is not None else []
        now.failed |= {client: round_.why.get(client, "the secure round was refused") for client in clients if client not in counted}
        if v is None:
            return
        for client in counted:
            self.echo[client] = self.ticket
            now.updates[client] = Update(torch.empty(0))
        now.eta = asked.eta_L if s.global_lr is None else s.global_lr(now.t, len(counted))
        self.count(now.t, counted, v.to(self.w.dtype), now.eta)


class SecureRound:
    """The four stages. It stands in for the grid that Flower's workflow talks to, and for the strategy behind it."""

    def __init__(self, form: SecureForm, loop: "Loop", letters: dict[int, RecordDict], threshold: int) -> None:
        self.form, self.loop, self.letters = form, loop, letters
        self.names = {sent.node: client for client, sent in loop.now.sent.items()}
        # As fine as the modulus allows: the sum of all clients' levels must stay below 2^32.
        levels = 2 ** min(28, 31 - math.ceil(math.log2(len(letters) + 1)))
        workflow = _server.SecAggPlusWorkflow
        shares = {"num_shares": 1.0, "reconstruction_threshold": threshold / len(letters)}  # a share for everybody
        self.flow = workflow(**shares, max_weight=1.0, clipping_range=float(form.clip), quantization_range=levels)
        self.why: dict[str, str] = {}
        self.counted: set[int] = set()
        self.mean: torch.Tensor | None = None

    def run(self) -> torch.Tensor | None:
        """The mean of the corrected updates, or None if the round was refused."""
        state, context = _server.WorkflowState(), self._context()
        for stage in (self.flow.setup_stage, self.flow.share_keys_stage, self.flow.collect_masked_vectors_stage, self.flow.unmask_stage):
            try:
                if not stage(self, context, state):
                    return None
            except Exception as error:  # what a client sent was well formed and still wrong, such as a key that is none
                log.warning("secure round %s is refused: %s: %s", self.loop.now.t + 1, type(error).__name__, error)
                return None
            if stage in (self.flow.setup_stage, self.flow.share_keys_stage):
                # Those who are still here; nobody masks with, or holds shares of, anybody else. The threshold stays.
                alive = state.active_node_ids
                state.sampled_node_ids = set(alive)
                state.nid_to_neighbours = {node: state.nid_to_neighbours[node] & alive for node in alive}
            if stage == self.flow.setup_stage:
                state.nid_to_fitins = {node: self.letters[node] for node in state.active_node_ids}
            if stage == self.flow.collect_masked_vectors_stage:
                self.counted = set(state.active_node_ids)
        if self.mean is None or float(self.mean.abs().max()) > 1.001 * self.form.clip:
            log.warning("secure round %s is refused: its sum is out of range, so a key share must have been wrong", self.loop.now.t + 1)
            return None
        return self.mean

    def send_and_receive(self, messages: list[Message], *, timeout: float | None = None) -> list[Message]:
        """What the workflow asks of a grid: answers of those who gave a good one in time."""
        post, now = self.loop.post, self.loop.now
        stage = str(messages[0].content.config_records[RECORD_KEY_CONFIGS][Key.STAGE]) if messages else Stage.SETUP
        letters = [(m.content, Sent(m.metadata.dst_node_id, self.names[m.metadata.dst_node_id], "secure", now.t, stage)) for m in messages]
        for content, _ in letters:
            self.loop.count_down(content)
        until = post.clock.now() + self.loop.timeout
        waiting = {sent.client for _, sent in letters} - {
            sent.client for sent in post.send(letters, MessageType.TRAIN, self.loop.timeout + 5)
        }
        good: list[Message] = []
        while waiting:
            for sent, reply in self.loop.look("secure"):
                if (sent.about, sent.t) == (stage, now.t) and sent.client in waiting:
                    waiting.discard(sent.client)
                    if self._fine(sent, reply, stage):
                        good.append(reply)
            if waiting and not post.clock.wait(until):
                break
        self.why |= dict.fromkeys(waiting, f"no answer in time while {STAGES[stage]}")
        return good

    def _fine(self, sent: Sent, reply: Message, stage: str) -> bool:
        try:
            if reply.has_error():
                raise Refused(f"{reason(reply)} (while {STAGES[stage]})")
            if stage == Stage.COLLECT_MASKED_VECTORS:
                self.form.hear(sent.client, reply.content)
            told = words(reply.content, RECORD_KEY_CONFIGS)
            if not self._well_formed(stage, told):
                raise Refused(f"its answer is malformed (while {STAGES[stage]})")
            if stage == Stage.COLLECT_MASKED_VECTORS:
                self.loop.now.bytes_up += 8 * (1 + self.form.layout.size)
                self.loop.now.vectors_up += 1
        except (Refused, KeyError, ValueError, TypeError) as why:
            self.why[sent.client] = str(why)
            return False
        return True

    def _well_formed(self, stage: str, told: dict[str, Any]) -> bool:
        """Is it what the workflow will rely on?"""
        if stage == Stage.SETUP:
            return all(isinstance(told[key], bytes) for key in (Key.PUBLIC_KEY_1, Key.PUBLIC_KEY_2))
        if stage == Stage.COLLECT_MASKED_VECTORS:
            arrays = [bytes_to_ndarray(part) for part in told[Key.MASKED_PARAMETERS]]
            return [a.shape for a in arrays] == [(1,), (self.form.layout.size,)] and all(a.dtype == np.int64 for a in arrays)
        shared = stage == Stage.SHARE_KEYS
        nodes, secrets = told[Key.DESTINATION_LIST if shared else Key.NODE_ID_LIST], told[Key.CIPHERTEXT_LIST if shared else Key.SHARE_LIST]
        return (
            len(nodes) == len(set(nodes)) == len(secrets) and set(nodes) <= self.names.keys() and all(isinstance(s, bytes) for s in secrets)
        )

    def _context(self) -> Any:
        """The little that the workflow wants of Flower's legacy context."""
        proxies = [SimpleNamespace(node_id=node) for node in self.letters]
        empty = FitIns(Parameters([], "numpy.ndarray"), {})
        records = RecordDict({_server.MAIN_CONFIGS_RECORD: ConfigRecord({_server.WorkflowKey.CURRENT_ROUND: self.loop.now.t + 1})})
        records[_server.MAIN_PARAMS_RECORD] = self.form.layout.write(self.form.w, {})
        strategy = SimpleNamespace(configure_fit=lambda *_: [(proxy, empty) for proxy in proxies], aggregate_fit=self._aggregated)
        manager = SimpleNamespace(num_available=lambda: len(proxies))
        return SimpleNamespace(state=records, strategy=strategy, client_manager=manager)

    def _aggregated(self, _round: int, results: list[Any], _failures: list[Any]) -> tuple[None, dict[str, Any]]:
        [array] = [bytes_to_ndarray(part) for part in results[0][1].parameters.tensors]
        self.mean = torch.from_numpy(np.array(array))
        return None, {}
