"""What an algorithm is: a state of tensors, a task for the active clients, and an aggregation.

The paper's letters are used here: w_t the model [d], g_i client i's update [m, d], S_t the active clients, eta_t the
global rate, K the local steps. Per-client memory has one row a client, [N, d].
"""

from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from ..errors import UsageError, number
from ..registry import Registry
from ..rows import Rows


@dataclass
class State:
    """Everything an algorithm remembers, tensors and `Rows` only: it is saved and restored field by field."""

    w: Tensor  # [d] the global model


S = TypeVar("S", bound=State)


@dataclass(frozen=True)
class Task:
    """What the server asks of the clients in S_t: local steps along h = grad f_i(w) + shift + mu (w - w_t)."""

    shift: Tensor | float = 0.0  # [m, d], rows follow `active`
    mu: float = 0.0


@dataclass(frozen=True)
class Step:
    """What the server knows about a round besides the updates."""

    t: int
    eta: float  # eta_t, the global rate
    eta_L: float  # the local rate the clients used
    K: Tensor  # [m] local steps each client took; under local momentum how many gradients' worth they are
    weights: Tensor  # [m] weights among the active clients, sum 1: 1/|S_t|, or by samples
    share: Tensor  # [m] weights among all N clients: 1/N each, or by samples
    update: str = "sum"  # g_i is the sum of the K local gradients, or their mean

    def mean(self, rows: Tensor) -> Tensor:
        """The weighted mean over the active clients, [m, d] -> [d]."""
        return self.weights @ rows

    def per_step(self, g: Tensor) -> Tensor:
        """The mean local gradient of each client, [m, d], whatever unit g is in."""
        return g if self.update == "mean" else g / self.K[:, None].to(g.dtype)


@runtime_checkable
class Algorithm(Protocol[S]):
    """Implement these three. Class attributes `uploads` and `downloads` say how many model-sized vectors a client sends and
    receives a round, where that is not 1."""

    def init(self, w: Tensor, num_clients: int) -> S: ...

    def task(self, state: S, active: Tensor) -> Task: ...

    def aggregate(self, state: S, active: Tensor, g: Tensor, step: Step) -> S: ...


ALGORITHMS: Registry[Algorithm[Any]] = Registry(
    "algorithm", ("algorithm",), lambda thing: isinstance(thing, Algorithm), "a name or an object with init, task and aggregate"
)
register, spell = ALGORITHMS.register, ALGORITHMS.spell


def make(spec: "str | Algorithm[Any]") -> Algorithm[Any]:
    """An algorithm from its name (`mimic`, `fedprox:mu=0.1`), or the object as it is."""
    if isinstance(spec, str):
        return ALGORITHMS.make(spec)
    if isinstance(spec, type) or not isinstance(spec, Algorithm):
        raise UsageError(f"algorithm must be {ALGORITHMS.wanted}, got {spec!r}")
    return spec


def memory(w: Tensor, num_clients: int) -> Rows:
    """One zero row a client, [N, d], that takes room once the client has been seen."""
    return Rows(w, num_clients)


def pack(state: State) -> dict[str, Tensor]:
    """A state as named tensors, ready for a file."""
    tensors: dict[str, Tensor] = {}
    for field in fields(state):
        value = getattr(state, field.name)
        parts = {f".{key}": part for key, part in value.tensors().items()} if isinstance(value, Rows) else {"": value}
        tensors |= {f"state.{field.name}{key}": part for key, part in parts.items()}
    return tensors


def unpack(state: State, tensors: dict[str, Tensor], where: object) -> None:
    """Put saved tensors back into a state made by `init`; what does not fit is refused, with `where` it was found."""
    for field in fields(state):
        now = getattr(state, field.name)
        wanted = now.tensors() if isinstance(now, Rows) else {"": now}
        saved = {part: tensors.get(f"state.{field.name}{'.' * bool(part)}{part}") for part in wanted}
        found = [tensor for tensor in saved.values() if tensor is not None]
        fits = len(found) == len(wanted) and all(a.dtype == b.dtype for a, b in zip(found, wanted.values(), strict=True))
        if isinstance(now, Rows):
            fits = fits and found[1].shape == (len(found[0]), now.d) and bool((found[0] < len(now.slot)).all())
        elif fits:
            fits = found[0].shape == now.shape
        if not fits:
            raise UsageError(
                f"the checkpoint in {where} does not fit this version of the algorithm (state.{field.name}): choose another folder"
            )
        if isinstance(now, Rows):
            now.restore(*found)
        else:
            setattr(state, field.name, found[0].to(now.device))


def checked_task(task: Any, w: Tensor, active: int, algorithm: object) -> Task:
    """What an algorithm asks of so many clients, in the form that every engine takes; a shift for all of them is one row for each."""
    name = type(algorithm).__name__
    if not isinstance(task, Task):
        raise UsageError(f"{name}.task must return a mimicfl.Task, got {type(task).__name__}")
    mu = number(f"{name}.task: mu", task.mu, low=0)
    if not isinstance(task.shift, Tensor):
        return Task(number(f"{name}.task: shift", task.shift), mu)
    shift = task.shift.expand(active, -1) if task.shift.shape == w.shape else task.shift
    if shift.shape != (active, w.numel()) or shift.dtype != w.dtype:
        wanted = f"{w.dtype} of shape ({active}, {w.numel()}), a row for each active client, or ({w.numel()},) for all of them"
        remedy = "; of what is kept for every client take the rows of `active`" if shift.ndim == 2 and len(shift) > active else ""
        raise UsageError(f"{name}.task: shift must be {wanted}, got {shift.dtype} of shape {tuple(shift.shape)}{remedy}")
    return Task(shift, mu)
