"""The server step, the same in the simulator and in every form of the Flower deployment.

`request` is what the active clients must do in round t; `apply` aggregates their updates and advances the global model.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UsageError
from ..fingerprint.values import attribute_values
from ..registry import is_built_in
from .averaging import RunningMean, at_least_float32
from .base import Algorithm, Step, checked_instructions, declared, pack, trait, unpack
from .client_memory import Budget, ClientMemory
from .client_numbers import on_device
from .finite import check_global_model, check_updates, good_clients
from .server_optimizers import Moments, ServerOptimizer
from .updates import ClientUpdates, Request

Rate = Callable[[int, int], float]  # of the round and the number of active clients
Rates = Callable[[np.ndarray], np.ndarray]  # the participation rates of the active clients of this round


class Server:
    """An algorithm, its state, the model's buffers, the rates, the server optimizer and the averaged model of one run.

    share          [N] the clients' weights among all clients, sum 1
    steps_to_K     the equivalent number of gradients for a number of local steps (more than one per step with local momentum)
    optimizer      how the change that the algorithm proposes is applied; None: unchanged
    warm_start     all clients participate in round 0, whether they are available or not
    average        evaluate a running mean of the global models, see `RunningMean`; 0: the global model itself
    """

    def __init__(
        self,
        algorithm: Algorithm[Any],
        w: Tensor,
        buffers: dict[str, Tensor],
        share: Tensor,
        *,
        local_lr: Rate,
        global_lr: Rate,
        update: str = "sum",
        steps_to_K: Callable[[Tensor], Tensor] = lambda steps: steps,
        optimizer: ServerOptimizer | None = None,
        warm_start: bool = False,
        average: float = 0.0,
    ) -> None:
        self.algorithm, self.buffers, self.share, self.optimizer, self.warm_start = algorithm, buffers, share, optimizer, warm_start
        if optimizer is not None and not trait(algorithm, "has_direction"):
            raise UsageError(f"{type(algorithm).__name__} does not move the model along a direction: use server_optimizer='none'")
        self.local_lr, self.global_lr, self.update, self.steps_to_K = local_lr, global_lr, update, steps_to_K
        self.send: tuple[str, ...] | None = None  # the names that the first round asked for
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}  # by the number of clients, if all count equally
        self._built_in = is_built_in(type(algorithm))
        self._equal = self._weights_may_be_kept(share)
        self.participation_rates: Rates | None = None  # set by the run, which knows when clients participate
        with _named(algorithm, "init", 0):
            self.state: Any = algorithm.init(w, len(share))
        check_state(self.state, w, algorithm)
        self._attributes = attribute_values(algorithm)  # `init` may set some: it is called again before a run resumes
        self.moments: Moments = {} if optimizer is None else optimizer.init(w)
        self.running_mean = RunningMean(average, w, buffers) if average else None

    @property
    def w(self) -> Tensor:
        return self.state.w  # type: ignore[no-any-return]

    @property
    def model(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The model that the run evaluates and returns, and its buffers: the global model, or the running mean."""
        return (self.w, self.buffers) if self.running_mean is None else (self.running_mean.w, self.running_mean.buffers)

    def request(self, t: int, active: np.ndarray, numbers: Tensor | None = None) -> Request:
        """The request to the clients `active` in round t; `numbers` holds them on the device, if they are there already."""
        numbers = on_device(active, self.w.device) if numbers is None else numbers
        with _named(self.algorithm, "instructions", t):
            given = checked_instructions(self.algorithm.instructions(self.state, numbers), self.w, len(active), self.algorithm)
        self.send = given.send if self.send is None else self.send
        if given.send != self.send:  # an engine is chosen once for the run, and must be able to collect them
            raise UsageError(
                f"{type(self.algorithm).__name__}.instructions: send must be the same in every round, got {self.send} and {given.send}"
            )
        eta_L, eta = self.local_lr(t, len(active)), self.global_lr(t, len(active))
        enough = declared(self.algorithm, "mean_suffices") and self.update == "sum" and not given.send
        return Request(t, active, self._share(numbers), self.w, self.buffers, given, eta_L, eta, mean_suffices=enough, numbers=numbers)

    def _weights_may_be_kept(self, share: Tensor) -> bool:
        """Do all clients count equally? A custom algorithm gets new tensors in every round, since it may change them in place."""
        return self._built_in and bool((share == share[:1]).all())

    def _share(self, numbers: Tensor) -> Tensor:
        """The weights of these clients among all clients, [m]."""
        if not self._equal:
            return self.share[numbers]
        if len(numbers) not in self._weights:  # found once, because they depend only on how many clients there are
            share = self.share[numbers]
            self._weights[len(numbers)] = share, share / share.sum()
        return self._weights[len(numbers)][0]

    def _among_active(self, share: Tensor) -> Tensor:
        """The weights of clients with these shares among themselves, sum 1."""
        known = self._weights.get(len(share))
        return known[1] if known is not None and known[0] is share else share / share.sum()

    def apply(self, request: Request, updates: ClientUpdates) -> tuple[Step, Tensor]:
        """Aggregate the clients' updates and advance the global model by one round; returns what `aggregate` was given.

        Raises `Diverged` if an update or the new model is not finite; the state must then be discarded.
        """
        check_updates(request, good_clients([updates])[0])
        found = self.advance(request, updates)
        check_global_model(self.w, request)
        return found

    def advance(self, request: Request, updates: ClientUpdates) -> tuple[Step, Tensor]:
        """`apply` without the checks, which several runs may share."""
        active = on_device(request.active, self.w.device) if request.numbers is None else request.numbers
        weights = self._among_active(request.share)
        K = self.steps_to_K(updates.K)
        g = updates.g if self.update == "sum" else updates.g / K[:, None].to(updates.g.dtype)
        forced = self.warm_start and request.t == 0
        weights, share = updates.summed(weights), updates.summed(request.share)
        values = (request.t, request.eta, request.eta_L, K, weights, share, self.update, updates.sent, forced)
        stale = None if request.staleness is None else on_device(request.staleness, self.w.device)
        step = Step(*values, participation_rates=self._participation_rates(request.active, forced), staleness=stale)
        w = self.w if self.optimizer is None else self.w.clone()  # a custom `aggregate` may change state.w in place
        with _named(self.algorithm, "aggregate", request.t):
            returned = self.algorithm.aggregate(self.state, active, g, step)  # type: ignore[func-returns-value]
        if returned is not None and returned is not self.state:
            name = type(self.algorithm).__name__
            raise UsageError(f"{name}.aggregate returned {type(returned).__name__}: it must change the state in place and return nothing")
        if not self._built_in:
            check_state(self.state, w, self.algorithm)
            check_attributes(self.algorithm, self._attributes)
        if self.optimizer is not None:
            self.state.w = w - self.optimizer.step(self.moments, w - self.w)  # the proposed change, eta_t v_t
        self.buffers = average_buffers(updates.buffers, weights)
        if self.running_mean is not None:
            self.running_mean.add(self.w, self.buffers)
        return step, g

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a checkpoint must hold."""
        moments = {f"optimizer.{name}": value for name, value in self.moments.items()}
        buffers = {f"buffer.{name}": value for name, value in self.buffers.items()}
        return pack(self.state) | moments | buffers | ({} if self.running_mean is None else self.running_mean.tensors())

    def restore(self, tensors: dict[str, Tensor], where: object) -> None:
        """Continue from what `tensors` returned, found in `where`."""
        unpack(self.state, tensors, where)
        self.moments = {name: _restored(f"optimizer.{name}", value, tensors, where) for name, value in self.moments.items()}
        self.buffers = {name: tensors[f"buffer.{name}"].to(self.w.device) for name in self.buffers}
        if self.running_mean is not None:
            self.running_mean.restore({name: _restored(name, value, tensors, where) for name, value in self.running_mean.tensors().items()})

    def _participation_rates(self, active: np.ndarray, forced: bool) -> Tensor | None:
        if not trait(self.algorithm, "needs_participation_rates"):
            return None
        if self.participation_rates is None:
            raise UsageError(f"{type(self.algorithm).__name__} needs the clients' participation rates, which are not known here")
        found = on_device(self.participation_rates(active), self.w.device)
        return torch.ones_like(found) if forced else found  # a forced client participates with probability 1

    def limit_memory(self, budget: Budget | None = None, folder: Path | None = None) -> None:
        """How much memory per-client state may take, and the folder for what does not fit."""
        for value in vars(self.state).values():
            if isinstance(value, ClientMemory):
                value.budget = budget or dataclasses.replace(value.budget, folder=folder)

    def grow(self, num_clients: int, share: Tensor) -> None:
        """Extend the state to more clients: per-client memory gets new rows, other tensors are unchanged."""
        grown = self.algorithm.init(self.w, num_clients)
        for name, value in vars(self.state).items():
            if isinstance(value, ClientMemory):
                getattr(grown, name).restore(*value.tensors().values())
            elif value.shape == getattr(grown, name).shape:
                setattr(grown, name, value)
            else:
                algorithm = type(self.algorithm).__name__
                raise UsageError(
                    f"{algorithm}: state.{name} has one entry per client and cannot grow with them: use mf.memory, "
                    "or set needs_population = True and give num_clients"
                )
        self.state, self.share, self._weights = grown, share, {}
        self._attributes = attribute_values(self.algorithm)
        self._equal = self._weights_may_be_kept(share)


@contextlib.contextmanager
def _named(algorithm: object, method: str, t: int) -> Iterator[None]:
    """Errors inside a custom algorithm say where they happened."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        error.add_note(f"(in {type(algorithm).__name__}.{method}, round {t})")
        raise


def _restored(name: str, value: Tensor, tensors: dict[str, Tensor], where: object) -> Tensor:
    """The saved tensor of this name, which must have the type and shape of `value`."""
    saved = tensors.get(name)
    if saved is None or saved.shape != value.shape or saved.dtype != value.dtype:
        raise UsageError(f"the checkpoint in {where} does not fit the settings of this run's server ({name}): choose another folder")
    return saved.to(value.device)


def average_buffers(stacked: dict[str, Tensor], weights: Tensor) -> dict[str, Tensor]:
    """Buffers [m, ...] of the active clients as one: floating ones averaged, counters take the largest."""
    merged = {}
    for name, rows in stacked.items():
        if bool((rows == rows[0]).all()):
            merged[name] = rows[0]  # constants stay bit-equal
        elif rows.is_floating_point():
            exact = at_least_float32(rows)  # in half precision the weights would not even sum to one
            merged[name] = torch.einsum("m,m...->...", weights.to(exact.dtype), exact).to(rows.dtype)
        else:
            merged[name] = rows.amax(dim=0)
    return merged


def check_state(state: Any, w: Tensor, algorithm: object) -> None:
    """An algorithm's state must be what can be saved and resumed: a dataclass of tensors."""
    name = type(algorithm).__name__
    if state is None:
        raise UsageError(f"{name}.init returned nothing: end it with `return state`")
    if not dataclasses.is_dataclass(state) or isinstance(state, type) or state.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise UsageError(f"{name}: the state must be a dataclass (not frozen) like mimicfl.State, got {type(state).__name__}")
    if undeclared := sorted(vars(state).keys() - {each.name for each in dataclasses.fields(state)}):
        raise UsageError(f"{name}: state.{undeclared[0]} is not a field of {type(state).__name__} and would not be saved: declare it there")
    for each in dataclasses.fields(state):
        if not isinstance(getattr(state, each.name), (Tensor, ClientMemory)):
            raise UsageError(f"{name}: state.{each.name} must be a tensor, so that it can be saved, got {getattr(state, each.name)!r}")
    own = getattr(state, "w", None)
    if not isinstance(own, Tensor) or own.shape != w.shape or own.dtype != w.dtype:
        found = f"{own.dtype} of shape {tuple(own.shape)}" if isinstance(own, Tensor) else "none"
        raise UsageError(f"{name}: state.w must be the model as {w.dtype} of shape {tuple(w.shape)}, got {found}")


def check_attributes(algorithm: object, before: dict[str, str]) -> None:
    """An algorithm must not change its attributes: checkpoints do not hold them, and runs may share the object."""
    after = attribute_values(algorithm)
    if changed := sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)):
        raise UsageError(
            f"{type(algorithm).__name__} changed self.{changed[0]} during the run; it would not be saved, and a resumed run would end "
            f"differently: make {changed[0]} a tensor in the state, or compute it in `init`"
        )
