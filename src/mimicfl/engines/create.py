"""Create an engine from its name, or from the label in a checkpoint (`batched:64:compiled`)."""

from typing import Any

from torch import nn

from ..clients.losses import Loss
from ..data.clients import Clients
from ..settings import engine_parts
from .plain import PlainEngine


def create(label: str, model: nn.Module, clients: Clients, loss: Loss, precision: str, lanes: int = 0, compiled: bool = False) -> Any:
    """The engine for this model. `lanes` and `compiled` are used where the label leaves them open."""
    name, asked, wanted = engine_parts(label)
    what, lanes, compiled = (model, clients, loss), asked or lanes, compiled or wanted
    if name == "plain":
        return PlainEngine(*what)
    if name == "native":
        if clients.device.type == "cuda":
            from .native.gpu.engine import NativeGpuEngine

            return NativeGpuEngine(*what)
        from .native.engine import NativeEngine

        return NativeEngine(*what)
    if name == "workers":
        from .workers import WorkersEngine

        return WorkersEngine(*what)
    if name == "batched":
        from .stacked.batched.engine import BatchedEngine

        return BatchedEngine(*what, precision, lanes, compiled)
    from .stacked.streams import StreamsEngine

    return StreamsEngine(*what, precision, min(lanes, StreamsEngine.MOST), compiled)
