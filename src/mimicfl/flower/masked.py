"""The client's side of a secure round: Flower's SecAgg+ with masks of full strength, after checks of what the server asks.

Masks are drawn from SHAKE-256 with the whole 256-bit seed. Flower folds the seed to 32 bits for a Mersenne Twister, which anyone
who sees a masked vector could search through. Everything is imported when the first secure letter comes, since a ClientApp is a
new process for every message.
"""

import functools
import hashlib
import importlib.util
import math
from types import ModuleType
from typing import Any

import numpy as np
from flwr.app import Context, Message

from ..errors import UsageError
from .held import is_lost
from .wire import OURS, UPDATE

CONFIGS = "secaggplus_configs"  # the record by which a letter of the protocol is known


def mask(seed: bytes, modulus: int, shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    """Numbers uniform on 0..modulus-1 (a power of two, at most 2^32) that nobody can tell from chance without the seed."""
    counts = [math.prod(shape) for shape in shapes]
    stream = np.frombuffer(hashlib.shake_256(b"mimicfl mask" + seed).digest(4 * sum(counts)), dtype="<u4")
    parts = np.split(stream.astype(np.int64) & (modulus - 1), np.cumsum(counts)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


@functools.cache
def own_copy(name: str) -> ModuleType:
    """A copy of a module of Flower's whose masks are ours; the original, which other apps may use, is left alone."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "pseudo_rand_gen"):
        raise UsageError("this version of flwr draws its masks elsewhere: secure aggregation needs flwr 1.41 or 1.42")
    module.pseudo_rand_gen = mask  # type: ignore[attr-defined]
    return module


class _Lost(Exception):
    def __init__(self, reply: Message) -> None:
        self.reply = reply


def guarded(message: Message, context: Context, call_next: Any) -> Message:
    """The client's mod: plain letters pass; those of a secure round go through the protocol, after checks of what is asked."""
    asked = message.content.config_records.get(CONFIGS)
    if asked is None:
        return call_next(message, context)  # type: ignore[no-any-return]
    from flwr.common.secure_aggregation.secaggplus_constants import Key, Stage

    stage = asked.get(Key.STAGE)
    if stage == Stage.SETUP:
        n, threshold = asked.get(Key.SAMPLE_NUMBER), asked.get(Key.THRESHOLD)
        if not isinstance(n, int) or not isinstance(threshold, int) or threshold < 2 or 2 * threshold <= n:
            raise UsageError(f"the server asks for a threshold of {threshold!r} among {n!r}: this client takes part above one half only")
    if stage == Stage.UNMASK:
        active, dead = (set(asked.get(key, [])) for key in (Key.ACTIVE_NODE_ID_LIST, Key.DEAD_NODE_ID_LIST))  # type: ignore[arg-type]
        if active & dead:
            raise UsageError("the server asks for both secrets of one client, which would unmask it: refused")

    def train(inner: Message, inner_context: Context) -> Message:
        reply = call_next(inner, inner_context)
        if is_lost(reply.content):
            raise _Lost(reply)
        return _as_fit_result(reply, inner)

    try:
        return own_copy("flwr.client.mod.secure_aggregation.secaggplus_mod").secaggplus_mod(message, context, train)  # type: ignore[no-any-return]
    except _Lost as lost:
        return lost.reply


def _as_fit_result(reply: Message, message: Message) -> Message:
    """The update in the form that the protocol masks; no metrics, since they would travel in clear."""
    from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
    from flwr.compat.common.recorddict_compat import fitres_to_recorddict

    arrays = [reply.content.array_records[UPDATE]["g"].numpy()]
    result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters(arrays), 1, {})
    content = fitres_to_recorddict(result, False)
    content[OURS] = reply.content[OURS]
    return Message(content, reply_to=message)
