"""The workers engine trains clients as the plain engine does, several in parallel, each in a process with one thread."""

import copy
import os
import sys
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ...clients.losses import Loss
from ...clients.params import mix_in
from ...data.clients import Clients, Holdout
from ...data.samples import Samples, tensors
from ...fingerprint.values import Values, weights_of
from ..capabilities import Unsupported
from ..interface import ClientUpdates, TrainRequest
from ..native.layers import compile_layers
from ..parallel import clients_at_once
from ..plain import PlainEngine
from .crew import Crew
from .layers import LossWithLayers, WithLayers, channels_last, compiled_workspace, takes_channels_last
from .memory import Known, Round, index_of

SUMMED = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
MOST_KNOWN = 256  # pairs of clients and settings that a crew shares, before those of earlier rounds are forgotten


class WorkersEngine:
    """Trains clients as the plain engine does, several in parallel."""

    name = label = "workers"
    room = None
    separates_runs = False

    def __init__(self, model: nn.Module, clients: Clients, loss: Loss, workers: int = 0) -> None:
        self.workers = workers or torch.get_num_threads()
        if clients.device.type != "cpu":
            raise Unsupported("worker processes run on the CPU only")
        if not hasattr(os, "fork") or sys.platform == "darwin":  # forking is not safe once Apple's libraries are loaded
            raise Unsupported("this system cannot fork")
        if self.workers < 2:
            raise Unsupported("there is only one core")
        if torch.cuda.is_available():  # PyTorch refuses backward passes in children that are forked after its first one
            raise Unsupported("PyTorch cannot train in worker processes while it sees a GPU; hide it with CUDA_VISIBLE_DEVICES=")
        self.plain = PlainEngine(model, clients, loss, compiled_workspace(model, clients))
        self.model, self.clients, self.loss = model, clients, loss
        self.crew: Crew | None = None
        module = self.plain.work.module
        layers = compile_layers(copy.deepcopy(module), clients, loss)  # a copy: recording the shapes must not change the buffers
        if (layers is None or layers.prefer_channels_last) and takes_channels_last(module, clients):
            module.register_forward_pre_hook(channels_last)
            layers = compile_layers(copy.deepcopy(module), clients, loss)  # the layout decides which layers are compiled
        if layers:
            if not isinstance(module, torch.jit.ScriptModule):  # nothing inside it can be replaced
                mix_in(module, type("WithLayers", (WithLayers,), {"layers": layers}))
            self.plain.loss = LossWithLayers(layers, loss)

    def like(self, model: nn.Module) -> "WorkersEngine":
        return WorkersEngine(model, self.clients, self.loss, self.workers)

    def train(self, requests: Sequence[TrainRequest]) -> list[ClientUpdates]:
        jobs = [(a, row) for a, request in enumerate(requests) for row in range(len(request.active))]
        jobs.sort(key=lambda job: -int(requests[job[0]].clients.sizes[requests[job[0]].active[job[1]]]))  # longest first
        crew, round = self._crew_for(requests)
        lasting = not any(_runs_own_code(request) for request in requests)
        try:
            found = crew.train(round, requests, jobs, clients_at_once(len(jobs), self.workers))
        except BaseException:
            lasting = False
            raise
        finally:
            if not lasting:
                self._disband()
        return found

    def outputs(self, w: Tensor, buffers: Sequence[dict[str, Tensor]], samples: Holdout) -> None:
        """Return None: the module itself, with all threads, is as fast."""

    def _crew_for(self, requests: Sequence[TrainRequest]) -> tuple[Crew, Round]:
        """Return the crew of the last round if it can train these requests, else a new one."""
        crew, known = self.crew, self.crew.known if self.crew else []
        new = [(request.clients, request.local) for request in requests if index_of(known, request) < 0]
        if not new and crew and crew.is_ours:
            round = Round.of(requests, known)
            if self._stamp(known) == crew.stamp and crew.has_room(round):
                return crew, round
        self._disband()
        known = [*(known if len(known) + len(new) <= MOST_KNOWN else []), *((request.clients, request.local) for request in requests)]
        known = list({(id(clients), id(local)): (clients, local) for clients, local in known}.values())
        round = Round.of(requests, known)
        restamp = partial(stamp, self.model, self.plain.work.module, self.loss, known)  # not a method: the engine must not keep itself
        self.crew = Crew(self.plain, known, restamp, round)
        return self.crew, round

    def _disband(self) -> None:
        if self.crew:
            self.crew.end()
        self.crew = None

    def _stamp(self, known: Known) -> str:
        return stamp(self.model, self.plain.work.module, self.loss, known)


def stamp(model: nn.Module, module: nn.Module, loss: Loss, known: Known) -> str:
    """Describe by value what workers share with this process, except for the trainable weights and buffers, which every round sends.

    `module` is the copy of `model` that trains; its classes may be mixed with ours. Data and frozen weights are described by how often they
    were changed in place, since hashing them would take longer than a round; frozen weights also by where they lie and by their sum, since
    changes of `weight.data` are not counted.
    """
    values = Values(by_shape=[*weights_of(model), *weights_of(module)])
    frozen = [[p._version, *_sum(p)] for p in module.parameters() if not p.requires_grad]
    changes = [frozen, *([_versions(clients.x), _versions(clients.y)] for clients, _ in known)]
    return values.of([module, [type(layer) for layer in model.modules()], loss, [local for _, local in known], changes])


def _sum(weight: Tensor) -> list[object]:
    """Where a weight lies, and the sum of its numbers, which takes one pass."""
    if weight.layout != torch.strided:
        return []
    return [weight.data_ptr(), float(weight.detach().sum(dtype=torch.float64))] if weight.dtype in SUMMED else [weight.data_ptr()]


def _runs_own_code(request: TrainRequest) -> bool:
    """Return whether clients run functions of the user, which may keep a state that no stamp shows: their workers train one round only."""
    return request.local.loop is not None or callable(request.local.optimizer) or request.clients.data.transform is not None


def _versions(samples: Samples) -> list[int]:
    return [tensor._version for tensor in tensors(samples)]
