"""`client_app`: a ClientApp from a model and data; it trains with the code of the simulator."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from ..clients.local_sgd import LocalSGD
from ..clients.local_update import check_send
from ..clients.losses import Loss, criterion_of
from ..clients.lr import schedule
from ..clients.params import Workspace, travelling
from ..clients.train import train_client
from ..data.clients import Clients, Holdout
from ..data.dataset import Data
from ..engines.cost import threads_for
from ..engines.torch_settings import own_threads
from ..errors import UsageError
from ..metrics.evaluate import Score
from ..metrics.evaluate import evaluate as score
from .client_state import ClientState
from .compression import Compression
from .models import frozen_digest, load_arrays, trained_arrays
from .residual import Residual
from .secagg_client import CONFIGS, secagg_mod
from .wire import METRICS, MIMICFL, SENT, UPDATE, as_array, config_record, metric_record, read_config, tensor

CPU = torch.device("cpu")


def client_id(context: Context) -> str:
    """The id of this client: `client-id` or `partition-id` of the node config, else the node id."""
    for key in ("client-id", "partition-id"):
        if key in context.node_config:
            return str(context.node_config[key])
    return f"node-{context.node_id}"


def hello(message: Message, context: Context) -> Message:
    """Reply to the server's id query with this client's id."""
    return Message(RecordDict({MIMICFL: config_record({"client-id": client_id(context)})}), reply_to=message)


def identify(app: ClientApp) -> ClientApp:
    """Make your own ClientApp reply to the server's id query: `app = identify(ClientApp())`."""
    app.query()(hello)
    return app


def client_app(
    model: Callable[[], nn.Module],
    data: Callable[[Context], Any],
    *,
    local: LocalSGD | None = None,
    loss: Any = None,
    task: Any = None,
    metrics: Any = None,
    state: str | Path | None = None,
    secure_only: bool = False,
    device: str = "cpu",
) -> ClientApp:
    """A ClientApp that trains `model()` on `data(context)`.

    data          returns this client's samples: a `Data`, or (x, y), or (x_train, y_train, x_test, y_test)
    local         local training; its learning rate is used if the server sends none
    loss, task, metrics   the learning task, as in `mimicfl.simulate`; the task's metrics are reported by evaluations
    state         folder for the client state (client and secure forms of MimiC); `state-dir` in the node config takes precedence
    secure_only   participate in secure aggregation only: requests for a plain update are refused
    """
    training = local or LocalSGD()
    if training.lists:
        raise UsageError(f"{next(iter(training.lists))} must be one number: every client of a network has its own LocalSGD")
    app = ClientApp()
    app.query()(hello)
    where = torch.device(device)
    threads = Threads()

    @app.train(mods=[secagg_mod])  # type: ignore[untyped-decorator, unused-ignore]
    def train(message: Message, context: Context) -> Message:
        config, content = read_config(message.content, "config"), message.content
        if secure_only and CONFIGS not in content:
            raise UsageError("this client participates in secure rounds only, but the server requests a plain update; use form='secure'")
        samples = as_data(data(context))
        module = load_arrays(model(), message.content.array_records["arrays"]).to(where)
        if config.get("frozen", "") != (frozen_digest(module) if "frozen" in config else ""):
            raise UsageError("the frozen parameters differ from the server's; load the same pretrained weights in the model function")
        workspace = Workspace(module, where)
        workspace.module.train()
        t, client = int(config["server-round"]) - 1, client_id(context)
        lr = float(config["lr"]) if "lr" in config else schedule(training.lr)(t, 1)
        clients = Clients(samples, [np.arange(samples.num_train)], where, workspace.input_dtype)
        shift: Tensor | float = 0.0
        if "shift" in content:
            shift = tensor(content, "shift", "shift").to(where)
        stored = None
        if MIMICFL in content:
            stored = ClientState.open(state_folder(context, state), read_config(content, MIMICFL), client, workspace.w)
        if stored is not None and not stored.reconcile(content):
            return Message(RecordDict({MIMICFL: config_record({"lost": 1})}), reply_to=message)
        shift, mu = training.decayed(workspace.w.clone(), shift, float(config.get("proximal-mu", 0.0)))
        seed = int(config.get("seed", 0))
        names, key = tuple(config.get("send", ())), (t, client_number(client))
        if training.loop is None:
            check_send(names)
        measure = criterion_of(samples, loss or None, task, metrics)
        with own_threads(threads.of_plain(workspace, clients, measure, training.batch_size or samples.num_train)):
            found = train_client(workspace, clients, 0, training, measure, seed, key, lr, shift, mu, names)
        g, total, K = found.g, found.total, found.steps
        worth = float(training.worth(torch.tensor(K))) if training.momentum else K
        sent = g if stored is None else stored.corrected(g, worth)
        reported = {"num-examples": samples.num_train, "steps": worth, "train-loss": float(total) / K}
        control = {"client-id": client} | ({} if stored is None else stored.status())
        records: dict[str, Any] = {METRICS: metric_record(reported), MIMICFL: config_record(control)}
        if names:
            records[SENT] = ArrayRecord({name: as_array(vector) for name, vector in found.sent.items()})
        if stored is None and config.get("reply") == "weights":  # asked for in Flower's own loop, whose wrappers compare weights
            return Message(RecordDict(records | {"arrays": model_arrays(workspace.module)[0]}), reply_to=message)
        if "compress" in config:
            update = compressed_record(
                sent, workspace, Residual(context, own_folder(context, state), config, client), str(config["compress"])
            )
        else:
            update = update_record(sent if config.get("send-update", True) else None, workspace)
        return Message(RecordDict(records | ({UPDATE: update} if update else {})), reply_to=message)

    @app.evaluate()  # type: ignore[untyped-decorator, unused-ignore]
    def evaluate(message: Message, context: Context) -> Message:
        samples = as_data(data(context))
        module = load_arrays(model(), message.content.array_records["arrays"]).to(where)
        workspace = Workspace(module, where)
        measure = criterion_of(samples, loss or None, task, metrics)
        found = score(workspace.module, Holdout(samples, where, workspace.input_dtype), measure, samples.num_classes)
        return Message(RecordDict({METRICS: metric_record({"num-examples": samples.num_test} | score_metrics(found))}), reply_to=message)

    return app


class Threads:
    """The number of threads with which the simulator's engine plain would train: its sums, and so their bits, depend on it."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, int], int] = {}  # by PyTorch's own number and the batch size: one app has one model

    def of_plain(self, workspace: Workspace, clients: Clients, loss: Loss, batch_size: int) -> int:
        key = torch.get_num_threads(), batch_size
        if key not in self.found:
            self.found[key] = threads_for(workspace.module, clients, loss, batch_size)
        return self.found[key]


def model_arrays(module: nn.Module) -> tuple[ArrayRecord, list[str]]:
    """The arrays that travel, and the names of those among them that are not trained: the buffers."""
    return trained_arrays(module), list(travelling(module)[1])


def update_record(g: Tensor | None, workspace: Workspace) -> ArrayRecord:
    """The update, unless the algorithm does not use it, and the buffers."""
    update = {} if g is None else {"g": as_array(g)}
    return ArrayRecord(update | {name: as_array(value) for name, value in travelling(workspace.module)[1].items()})


def compressed_record(g: Tensor, workspace: Workspace, residual: Residual, spec: str) -> ArrayRecord:
    """The compressed update, and the buffers. Keeps what the compression leaves out."""
    compression = Compression.parse(spec)
    assert compression is not None
    arrays, left_out = compression.apply(residual.add(g.detach().cpu().numpy()))
    residual.keep(left_out)
    return ArrayRecord({name: Array(value) for name, value in arrays.items()} | dict(update_record(None, workspace)))


def score_metrics(found: Score) -> dict[str, float]:
    """An evaluation as metrics of Flower: loss, accuracy, and what the task measures, without the prefix `test_` of the columns."""
    columns = {"loss": found.loss, "accuracy": found.accuracy} | {key.removeprefix("test_"): v for key, v in found.metrics.items()}
    return {key: float(value) for key, value in columns.items() if value is not None}


def as_data(given: Any) -> Data:
    """What a data function returned, as `Data`; without test samples, the training samples are used for both."""
    if isinstance(given, Data):
        return given
    if isinstance(given, tuple) and len(given) in (2, 4):
        return Data(*given) if len(given) == 4 else Data(*given, *given)
    raise UsageError(f"the data function must return a Data, (x, y) or (x_train, y_train, x_test, y_test), got {type(given).__name__}")


def client_number(client: str) -> int:
    """The number that seeds this client's batches: its id if that is a number, as in the simulator, else a hash of it."""
    return (
        int(client)
        if client.isascii() and client.isdigit()
        else int.from_bytes(hashlib.blake2b(client.encode(), digest_size=4).digest(), "big")
    )


def own_folder(context: Context, given: str | Path | None) -> Path | None:
    """The folder for the client state: `state-dir` of the node config, else the one given to `client_app`; None if there is none."""
    folder = context.node_config.get("state-dir", given)
    return Path(str(folder)) if folder else None


def state_folder(context: Context, given: str | Path | None) -> Path:
    """The folder for the client state, which the form needs."""
    folder = own_folder(context, given)
    if folder is None:
        raise UsageError("this form stores a correction at the client: start the SuperNode with --node-config 'state-dir=\"/some/folder\"'")
    return folder
