"""MimiC's client form over Flower's SecAgg+: the server learns only the sum of the corrected updates and who contributed to it.

A round survives clients that drop out at any stage. Flower's workflow requires key shares of all clients that it selected, and fails if
one of them drops out before sharing its keys. Here the set of clients shrinks from stage to stage, as in the protocol of Bonawitz et al.
(2017), while the threshold stays fixed. docs/flower.md explains why this is as secure.
"""

import logging
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.common import FitIns, Parameters, bytes_to_ndarray
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage

from ..algorithms import Instructions
from ..algorithms.updates import ClientUpdates, Request
from ..errors import UsageError, number
from .client_form import ClientForm
from .interface import RoundLoop
from .messages import RESTARTED, SentMessage, reason
from .replies import Update
from .secagg_client import FEWEST, patched_copy
from .selection import select_clients
from .wire import Layout, Refused, read_config

log = logging.getLogger("flwr")
STAGES = {Stage.SETUP: "setup", Stage.SHARE_KEYS: "key sharing", Stage.COLLECT_MASKED_VECTORS: "training", Stage.UNMASK: "unmasking"}
MOST_BYTES = 2**31 - 2**20  # of a message's records: arrays travel in pieces, but a masked vector is in a config record, in one
_server: Any = patched_copy("flwr.server.workflow.secure_aggregation.secaggplus_workflow")


class SecureForm(ClientForm):
    """The client form under secure aggregation.

    threshold   share of the selected clients that must complete a round, above one half; otherwise the round is refused
    clip        bound on |g + c| in every coordinate; a client whose update exceeds it sends none
    """

    name = "secure"
    own_exchange = True
    least_clients = FEWEST

    def __init__(self, *, threshold: float = 2 / 3, clip: float = 8.0, update: str = "sum", num_clients: int | None = None) -> None:
        super().__init__(update=update, num_clients=num_clients)
        self.threshold = number("threshold", threshold, low=0.5, high=1, open_low=True)
        self.clip = number("clip", clip, low=0, open_low=True)

    def begin(self, layout: Layout, arrays: ArrayRecord, **server: Any) -> None:
        needed = 8 * (layout.size + 1)
        if needed > MOST_BYTES:
            raise UsageError(
                f"a masked update of this model has {needed / 2**30:.1f} GiB, but a message holds at most {MOST_BYTES / 2**30:.0f} GiB "
                "outside of arrays; train fewer parameters, such as adapters, or use form 'client'"
            )
        super().begin(layout, arrays, **server)
        if self.buffers:
            name = next(iter(self.buffers))
            raise UsageError(f"secure aggregation sums parameters only, but the model has a buffer, {name!r}; use GroupNorm")

    def _extra_config(self) -> dict[str, float]:
        return {"clip": self.clip}

    def run_round(self, loop: RoundLoop) -> tuple[ArrayRecord | None, None]:
        """Run one round. If fewer clients than the threshold complete it, the server learns nothing and the state is unchanged."""
        current, s = loop.round, loop.strategy
        clients = {client: node for client, node in select_clients(loop, current.t).items() if loop.admit(client)}
        config = dict(loop.train_config) | {"server-round": current.t + 1}
        request, contents = s.request(current.t, list(clients), self.arrays(), config)
        current.sent = {client: SentMessage(clients[client], client, "secure", current.t, request) for client in contents}
        current.eta_L = request.eta_L
        least = max(FEWEST, s.failures.min_counted)
        needed = max(least, math.ceil(self.threshold * len(clients) - 1e-9))  # more than half, since the threshold is above one half
        if len(clients) < least:
            current.failed |= dict.fromkeys(clients, f"a secure round needs at least {least} clients, only {len(clients)} are available")
            return None, None
        secure = SecureRound(self, loop, {node: contents[client] for client, node in clients.items()}, needed)
        v = secure.run()
        names = {node: client for client, node in clients.items()}
        counted = sorted(names[node] for node in secure.counted) if v is not None else []
        current.failed |= {c: secure.reasons.get(c, "the secure round was refused") for c in clients if c not in counted}
        if v is None:
            return None, None
        for client in counted:
            self.reply_tokens[client] = self.token
            current.updates[client] = Update(torch.empty(0))
        current.eta = s.global_rate(current.t, len(counted), request.eta_L)
        v = v.to(self.w.dtype)
        one = torch.ones(1, dtype=v.dtype)  # the mean is applied like the update of a single client
        step = Request(current.t, np.zeros(1, dtype=np.int64), one, self.w, self.buffers, Instructions(), request.eta_L, current.eta)
        self.server.apply(step, ClientUpdates(v[None], one, torch.zeros(1)))
        self.acknowledge(current.t, counted, v)
        return self.arrays(), None


class SecureRound:
    """The four stages of one secure round. Flower's workflow uses this object in place of a grid and of a strategy."""

    def __init__(self, form: SecureForm, loop: RoundLoop, contents: dict[int, RecordDict], threshold: int) -> None:
        self.form, self.loop, self.contents = form, loop, contents
        self.names = {sent.node: client for client, sent in loop.round.sent.items()}
        # The finest quantisation that the modulus allows: the sum of all clients' levels must stay below 2^32.
        levels = 2 ** min(28, 31 - math.ceil(math.log2(len(contents) + 1)))
        workflow = _server.SecAggPlusWorkflow
        shares = {"num_shares": 1.0, "reconstruction_threshold": threshold / len(contents)}  # every client gets a share of every secret
        self.flow = workflow(**shares, max_weight=1.0, clipping_range=float(form.clip), quantization_range=levels)
        self.reasons: dict[str, str] = {}
        self.counted: set[int] = set()
        self.mean: torch.Tensor | None = None

    def run(self) -> torch.Tensor | None:
        """The mean of the corrected updates; None if the round is refused."""
        state, context = _server.WorkflowState(), self._context()
        for stage in (self.flow.setup_stage, self.flow.share_keys_stage, self.flow.collect_masked_vectors_stage, self.flow.unmask_stage):
            try:
                if not stage(self, context, state):
                    return None
            except Exception as error:  # a reply was well formed but invalid, such as an invalid key
                log.warning("secure round %s refused: %s: %s", self.loop.round.t + 1, type(error).__name__, error)
                return None
            if stage in (self.flow.setup_stage, self.flow.share_keys_stage):
                # Continue with the remaining clients: they mask only with each other. The threshold stays fixed.
                alive = state.active_node_ids
                state.sampled_node_ids = set(alive)
                state.nid_to_neighbours = {node: state.nid_to_neighbours[node] & alive for node in alive}
            if stage == self.flow.setup_stage:
                state.nid_to_fitins = {node: self.contents[node] for node in state.active_node_ids}
            if stage == self.flow.collect_masked_vectors_stage:
                self.counted = set(state.active_node_ids)
        if self.mean is None or float(self.mean.abs().max()) > 1.001 * self.form.clip:
            log.warning("secure round %s refused: its sum is out of range, so a key share must have been wrong", self.loop.round.t + 1)
            return None
        return self.mean

    def send_and_receive(self, messages: list[Message], *, timeout: float | None = None) -> list[Message]:
        """The grid's method that the workflow calls: returns the valid replies that arrive in time."""
        channel, current = self.loop.messages, self.loop.round
        stage = str(messages[0].content.config_records[RECORD_KEY_CONFIGS][Key.STAGE]) if messages else Stage.SETUP
        requests = []
        for message in messages:
            node = message.metadata.dst_node_id
            sent = SentMessage(node, self.names[node], "secure", current.t, stage)
            ttl = self.loop.timeout + 5
            requests.append((Message(message.content, node, MessageType.TRAIN, ttl=ttl, group_id=str(current.t + 1)), sent))
            self.loop.count_download(message.content)
        deadline = channel.clock.now() + self.loop.timeout
        rejected = channel.send(requests)
        waiting = {sent.client for _, sent in requests} - {sent.client for sent in rejected}
        valid: list[Message] = []
        while waiting:
            for sent, reply in self.loop.collect("secure"):
                if (sent.details, sent.t) == (stage, current.t) and sent.client in waiting:
                    waiting.discard(sent.client)
                    if self._accept(sent, reply, stage):
                        valid.append(reply)
            in_flight = {sent.client for sent in channel.in_flight.values() if (sent.details, sent.t) == (stage, current.t)}
            self.reasons |= dict.fromkeys(waiting - in_flight, f"{RESTARTED} (stage: {STAGES[stage]})")
            waiting &= in_flight
            if waiting and not channel.clock.wait(deadline):
                break
        self.reasons |= dict.fromkeys(waiting, f"no reply before the deadline (stage: {STAGES[stage]})")
        return valid

    def _accept(self, sent: SentMessage, reply: Message, stage: str) -> bool:
        """Check a reply; if it is invalid, record the reason and return False."""
        try:
            if reply.has_error():
                raise Refused(f"{reason(reply)} (stage: {STAGES[stage]})")
            if stage == Stage.COLLECT_MASKED_VECTORS:
                control = self.form.check_reply(sent.client, reply.content)
            if not self._well_formed(stage, read_config(reply.content, RECORD_KEY_CONFIGS)):
                raise Refused(f"its reply is malformed (stage: {STAGES[stage]})")
            if stage == Stage.COLLECT_MASKED_VECTORS:
                self.loop.round.bytes_up += 8 * (1 + self.form.layout.size)
                self.loop.round.vectors_up += 1
                self.form.store_reply(sent.client, control)
        except Refused as why:
            self.reasons[sent.client] = str(why)
            return False
        except Exception as error:
            self.reasons[sent.client] = f"its reply is malformed (stage: {STAGES[stage]}, {type(error).__name__})"
            return False
        return True

    def _well_formed(self, stage: str, reply: dict[str, Any]) -> bool:
        """Whether a reply has the fields and types that the workflow relies on."""
        if stage == Stage.SETUP:
            return all(isinstance(reply[key], bytes) for key in (Key.PUBLIC_KEY_1, Key.PUBLIC_KEY_2))
        if stage == Stage.COLLECT_MASKED_VECTORS:
            arrays = [bytes_to_ndarray(part) for part in reply[Key.MASKED_PARAMETERS]]
            return [a.shape for a in arrays] == [(1,), (self.form.layout.size,)] and all(a.dtype == np.int64 for a in arrays)
        if stage == Stage.SHARE_KEYS:
            nodes, shares = reply[Key.DESTINATION_LIST], reply[Key.CIPHERTEXT_LIST]
        else:
            nodes, shares = reply[Key.NODE_ID_LIST], reply[Key.SHARE_LIST]
        known = len(nodes) == len(set(nodes)) == len(shares) and set(nodes) <= self.names.keys()
        return known and all(isinstance(share, bytes) for share in shares)

    def _context(self) -> Any:
        """The parts of Flower's legacy context that the workflow uses."""
        proxies = [SimpleNamespace(node_id=node) for node in self.contents]
        empty = FitIns(Parameters([], "numpy.ndarray"), {})
        records = RecordDict({_server.MAIN_CONFIGS_RECORD: ConfigRecord({_server.WorkflowKey.CURRENT_ROUND: self.loop.round.t + 1})})
        records[_server.MAIN_PARAMS_RECORD] = self.form.layout.write(self.form.w, {})
        strategy = SimpleNamespace(configure_fit=lambda *_: [(proxy, empty) for proxy in proxies], aggregate_fit=self._store_mean)
        manager = SimpleNamespace(num_available=lambda: len(proxies))
        return SimpleNamespace(state=records, strategy=strategy, client_manager=manager)

    def _store_mean(self, _round: int, results: list[Any], _failures: list[Any]) -> tuple[None, dict[str, Any]]:
        [array] = [bytes_to_ndarray(part) for part in results[0][1].parameters.tensors]
        self.mean = torch.from_numpy(np.array(array))
        return None, {}
