"""Which clients are selected in a round: waits until enough of them are idle, then samples, or follows an availability pattern."""

import logging
import math
import time
from typing import Any

import numpy as np

from ..errors import UsageError
from ..seeds import stream
from .interface import RoundLoop
from .names import natural_key
from .roster import unnamed

log = logging.getLogger("flwr")
LONGEST_QUERY = 120.0  # seconds that the first round waits for the id of a node if enough others are idle
LOG_INTERVAL = 15.0  # seconds between two log lines while waiting for clients


def select_clients(loop: RoundLoop, t: int) -> dict[str, int]:
    """Wait for enough idle clients, then select those of round t: client -> node."""
    s = loop.strategy
    if s.fraction_train == 0:
        return {}
    idle = _wait(loop, t)
    loop.round.began = time.monotonic()
    if loop.available is not None:
        return _available(loop, t, idle)
    names = sorted(idle, key=natural_key)
    chosen = sample(len(names), s.fraction_train, max(s.min_train_nodes, s.form.least_clients), (s.seed, "sample", t))
    log.info("configure_train: Sampled %s nodes (out of %s)", len(chosen), len(loop.roster.online))
    return {names[k]: idle[names[k]] for k in chosen}


def sample(total: int, fraction: float, least: int, key: tuple[Any, ...]) -> list[int]:
    """Numbers of the sampled clients, in order: a fraction of `total`, rounded down as in Flower, but at least `least` of them."""
    count = min(total, max(int(fraction * total + 1e-9), least))
    return sorted(int(k) for k in stream(*key).permutation(total)[:count]) if count < total else list(range(total))


def _wait(loop: RoundLoop, t: int) -> dict[str, int]:
    """The idle clients, once there are enough of them."""
    s, clock, roster = loop.strategy, loop.clock, loop.roster
    need = max(s.wait_for if t == 0 else 1, s.min_train_nodes, s.form.least_clients)
    connected = s.min_available_nodes
    if loop.available is not None:
        need = connected = s.num_clients or 1  # virtual clients are always online; the pattern selects them
    began = logged = clock.now()
    give_up = math.inf if s.patience is None else began + s.patience
    while True:
        loop.collect()
        # A client whose late reply is aggregated in this round is not selected again in it.
        idle = {client: node for client, node in roster.idle().items() if client not in loop.round.updates}
        online = sum(node in roster.online for node in roster.node_of.values())
        now = clock.now()
        # The first round waits until all nodes that are online are identified; later rounds do not wait for new nodes, unless one of
        # them reports the id of a client.
        identifying = t == loop.first and any(sent.kind == "hello" for sent in loop.messages.in_flight.values())
        identified_by = began + min(loop.timeout, LONGEST_QUERY) if identifying else now
        if len(idle) + len(loop.round.updates) >= need and online >= connected and now >= identified_by and not roster.probed:
            return idle
        if now >= give_up:
            raise UsageError(
                f"waited {s.patience:g} s for {max(need, connected)} idle client(s), but only {len(idle)} are available; start more "
                "SuperNodes or lower wait_for. Completed rounds are saved if a folder is set"
            )
        if now - logged > LOG_INTERVAL:
            logged = now
            log.info("round %s waits for %s idle client(s): %s idle, %s busy", t + 1, need, len(idle), len(loop.messages.busy))
        clock.wait(min(moment for moment in (give_up, identified_by, *roster.probed.values(), math.inf) if moment > now))


def _available(loop: RoundLoop, t: int, idle: dict[str, int]) -> dict[str, int]:
    """The clients that the availability pattern makes available in round t."""
    assert loop.available is not None
    chosen = {int(i) for i in np.flatnonzero(loop.available[t])}
    names = sorted(idle, key=natural_key)
    if not any(map(unnamed, names)):
        return {client: idle[client] for client in names if client.isdecimal() and int(client) in chosen}
    # The app does not report ids: its nodes are numbered in the order of their rows.
    if t == loop.first:
        log.info("the clients do not report ids: the availability pattern applies to nodes in the order of their ids")
    return {client: idle[client] for client in names if loop.admit(client) and loop.strategy.form.row(client) in chosen}
