"""The client's side: a ClientApp from a model and data, trained by the same code as in the simulator."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from ..data.clients import Clients, Holdout
from ..data.dataset import Data
from ..errors import UsageError
from ..local.losses import as_loss
from ..local.lr import schedule
from ..local.train import train_client
from ..local.update import LocalSGD
from ..metrics.evaluate import evaluate as score
from ..params import Workspace, flatten
from .held import Held
from .masked import CONFIGS, guarded
from .wire import METRICS, OURS, UPDATE, metrics, tensor, words
from .wire import config as told

CPU = torch.device("cpu")


def client_id(context: Context) -> str:
    """The id under which the server keeps what belongs to this client: of the node config, else the node id."""
    for key in ("client-id", "partition-id"):
        if key in context.node_config:
            return str(context.node_config[key])
    return f"node-{context.node_id}"


def hello(message: Message, context: Context) -> Message:
    """Answer the server's question who this is."""
    return Message(RecordDict({OURS: told({"client-id": client_id(context)})}), reply_to=message)


def identify(app: ClientApp) -> ClientApp:
    """Let an app of your own answer that question: `app = identify(ClientApp())`."""
    app.query()(hello)
    return app


def client_app(
    model: Callable[[], nn.Module],
    data: Callable[[Context], Any],
    *,
    local: LocalSGD | None = None,
    loss: Any = None,
    state: str | Path | None = None,
    secure_only: bool = False,
    device: str = "cpu",
) -> ClientApp:
    """A ClientApp that trains `model()` on `data(context)`.

    data     gives this client's samples: a `Data`, or (x, y), or (x_train, y_train, x_test, y_test)
    local    what a client does in a round; its rate is used where the server sends none
    state    folder for what the client keeps itself (client form of MimiC); `state-dir` in the node config wins
    secure_only   train in rounds of secure aggregation only: a server that asks for a plain update gets none
    """
    work = local or LocalSGD()
    if work.lists:
        raise UsageError(f"{next(iter(work.lists))} must be one number here: every client of a network has a LocalSGD of its own")
    app = ClientApp()
    app.query()(hello)
    where = torch.device(device)

    @app.train(mods=[guarded])  # type: ignore[untyped-decorator, unused-ignore]
    def train(message: Message, context: Context) -> Message:
        config, letter = words(message.content, "config"), message.content
        if secure_only and CONFIGS not in letter:
            raise UsageError("this client takes part in secure rounds only, and the server asks for a plain update")
        samples = as_data(data(context))
        module = fill(model(), message.content.array_records["arrays"]).to(where)
        frame = Workspace(module, where)
        frame.module.train()
        t, client = int(config["server-round"]) - 1, client_id(context)
        lr = float(config["lr"]) if "lr" in config else schedule(work.lr)(t, 1)
        clients = Clients(samples, [np.arange(len(samples.x_train))], where, frame.w.dtype)
        shift: Tensor | float = 0.0
        if "shift" in letter:
            shift = tensor(letter, "shift", "shift").to(where)
        held = Held.open(state_folder(context, state), words(letter, OURS), client, frame.w) if OURS in letter else None
        if held is not None and not held.settle(letter):
            return Message(RecordDict({OURS: told({"lost": 1})}), reply_to=message)
        shift, mu = work.decayed(frame.w.clone(), shift, float(config.get("proximal-mu", 0.0)))
        seed = int(config.get("seed", 0))
        g, total, K = train_client(frame, clients, 0, work, as_loss(loss or samples.loss), seed, (t, client_number(client)), lr, shift, mu)
        worth = float(work.worth(torch.tensor(K))) if work.momentum else K
        sent = g if held is None else held.corrected(g, worth)
        figures = {"num-examples": len(samples.x_train), "steps": worth, "train-loss": float(total) / K}
        said = {"client-id": client} | ({} if held is None else held.says())
        answer = RecordDict({UPDATE: update_record(sent, frame), METRICS: metrics(figures), OURS: told(said)})
        return Message(answer, reply_to=message)

    @app.evaluate()  # type: ignore[untyped-decorator, unused-ignore]
    def evaluate(message: Message, context: Context) -> Message:
        samples = as_data(data(context))
        module = fill(model(), message.content.array_records["arrays"]).to(where)
        dtype = flatten(module).dtype
        found = score(module, Holdout(samples, where, dtype), as_loss(loss or samples.loss), samples.num_classes)
        accuracy = {} if found.accuracy is None else {"accuracy": found.accuracy}
        figures = {"num-examples": len(samples.x_test), "loss": found.loss} | accuracy
        return Message(RecordDict({METRICS: metrics(figures)}), reply_to=message)

    return app


def model_arrays(module: nn.Module) -> tuple[ArrayRecord, list[str]]:
    """A module as a record, each tensor once, and the names of what is not trained: frozen parameters and buffers."""
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    frozen = [name for name, p in parameters.items() if not p.requires_grad]
    return ArrayRecord({name: Array(value.detach().cpu().numpy()) for name, value in {**parameters, **buffers}.items()}), [
        *frozen,
        *buffers,
    ]


def fill(module: nn.Module, arrays: ArrayRecord) -> nn.Module:
    """Load a record into a module, by name."""
    held = dict(module.named_parameters()) | dict(module.named_buffers())
    if wrong := held.keys() ^ arrays.keys():
        raise UsageError(f"the server's model is not this client's: {min(wrong)!r} is on one side only")
    with torch.no_grad():
        for name, tensor in held.items():
            value = torch.from_numpy(np.array(arrays[name].numpy()))
            if value.shape != tensor.shape:
                raise UsageError(f"the server's model is not this client's: {name!r} has shape {tuple(value.shape)} there")
            tensor.copy_(value)
    return module


def update_record(g: Tensor, frame: Workspace) -> ArrayRecord:
    """The update, and with it every array that is carried beside it."""
    _, beside = model_arrays(frame.module)
    named = dict(frame.module.named_parameters()) | dict(frame.module.named_buffers())
    arrays = {"g": Array(g.detach().cpu().numpy())}
    return ArrayRecord(arrays | {name: Array(named[name].detach().cpu().numpy()) for name in beside})


def as_data(given: Any) -> Data:
    if isinstance(given, Data):
        return given
    if isinstance(given, tuple) and len(given) in (2, 4):
        return Data(*given) if len(given) == 4 else Data(*given, *given)
    raise UsageError(f"the data function must give a Data, (x, y) or (x_train, y_train, x_test, y_test), got {type(given).__name__}")


def client_number(client: str) -> int:
    """The number that keys this client's chance: its own id where that is a number, as in the simulator."""
    return int(client) if client.isdigit() else int.from_bytes(hashlib.blake2b(client.encode(), digest_size=4).digest(), "big")


def state_folder(context: Context, given: str | Path | None) -> Path:
    chosen = context.node_config.get("state-dir", given)
    if not chosen:
        raise UsageError("this client must keep a correction: give its SuperNode a folder, --node-config 'state-dir=\"/var/lib/mimicfl\"'")
    return Path(str(chosen))
