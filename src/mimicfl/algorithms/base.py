"""The interface of algorithms: a state of tensors, instructions for the active clients, and an aggregation.

The paper's letters are used here: w_t the model [d], g_i client i's update [m, d], S_t the active clients, eta_t the
global rate, K the local steps. Per-client memory has one row per client, [N, d].
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from ..errors import UsageError, number, shown
from ..registry import Registry, is_built_in
from .client_memory import ClientMemory


@dataclass
class State:
    """Everything an algorithm remembers, tensors and `ClientMemory` only: it is saved and restored field by field."""

    w: Tensor  # [d] the global model


S = TypeVar("S", bound=State)


@dataclass(frozen=True)
class Instructions:
    """What the server asks of the clients in S_t: local steps from `start` along h = grad f_i(w) + shift + mu (w - start)."""

    shift: Tensor | float = 0.0  # [m, d], rows follow `active`, or [d] for all of them
    mu: float = 0.0
    start: Tensor | None = None  # [m, d] or [d], where the clients start; None: at the global model w_t
    send: tuple[str, ...] = ()  # vectors [d] that every client sends besides g, by name; `Step.sent` holds them


@dataclass(frozen=True)
class Step:
    """What the server knows about a round besides the updates."""

    t: int
    eta: float  # eta_t, the global rate
    eta_L: float  # the local rate the clients used
    K: Tensor  # [m] local steps each client took; with local momentum, the equivalent number of gradients
    weights: Tensor  # [m] weights among the active clients, sum 1: 1/|S_t|, or by samples
    share: Tensor  # [m] weights among all N clients: 1/N each, or by samples
    update: str = "sum"  # g_i is the sum of the K local gradients, or their mean
    sent: Mapping[str, Tensor] = field(default_factory=dict)  # [m, d] each, what `Instructions.send` asked for
    forced: bool = False  # all clients were made to participate (warm start): the round says nothing about their availability
    participation_rates: Tensor | None = field(default=None, kw_only=True)  # [m] float64, for algorithms that need them
    staleness: Tensor | None = field(default=None, kw_only=True)  # [m] server steps since each client got its model; None: all 0

    def mean(self, rows: Tensor) -> Tensor:
        """The weighted mean over the active clients, [m, d] -> [d]."""
        return self.weights @ rows

    def per_step(self, g: Tensor) -> Tensor:
        """The mean local gradient of each client, [m, d], whatever unit g is in."""
        return g if self.update == "mean" else g / self.K[:, None].to(g.dtype)

    def change(self, g: Tensor) -> Tensor:
        """Each client's start minus its final model, [m, d], whatever unit g is in."""
        return self.eta_L * (g * self.K[:, None].to(g.dtype) if self.update == "mean" else g)


class Algorithm(Generic[S]):
    """Base class of all algorithms: implement `aggregate`, and `init` or `instructions` where the defaults do not fit.

    title, color, dashed   how tables and figures show it; the class name and a free colour if not given
    uploads, downloads     model-sized vectors that a client sends and receives per round; `uploads` counts g and the names in
                           `Instructions.send`
    needs_population       it uses the number of clients N, so a deployment must know it. False: clients may join at any time,
                           and everything kept per client must be in `memory`
    sends_g                False: it uses only the vectors in `Instructions.send`, and clients need not send g
    has_direction          it moves the model by w - eta v; False: it sets the model differently, and server optimizers do not apply
    needs_steps            it uses K, the number of local steps, so every client must report it
    mean_suffices          `aggregate` uses g only in `step.mean(g)`, so that machines that train clients may send the mean over their
                           clients instead of a row per client. Not inherited: a subclass may use more
    conserved              the per-client memory whose sum over all clients must not change, or ""
    needs_participation_rates  it uses `Step.participation_rates`, known or estimated
    paper_rank             its place in the tables of the MimiC paper, from 1; 0 if it is not there
    authors                for algorithms of the paper: the option with which its authors' script runs it (`preset="authors"`)

    A class without this base class is accepted if it has the three methods `init`, `instructions` and `aggregate`.
    """

    title: ClassVar[str] = ""
    color: ClassVar[str] = ""
    dashed: ClassVar[bool] = False
    emphasized: ClassVar[bool] = False  # drawn with a thicker line
    uploads: ClassVar[int] = 1
    downloads: ClassVar[int] = 1
    needs_population: ClassVar[bool] = True
    needs_steps: ClassVar[bool] = False
    mean_suffices: ClassVar[bool] = False
    conserved: ClassVar[str] = ""
    has_direction: ClassVar[bool] = True
    needs_participation_rates: ClassVar[bool] = False
    sends_g: ClassVar[bool] = True
    paper_rank: ClassVar[int] = 0
    authors: ClassVar[str] = ""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "task" in vars(cls):  # its name until version 0.2: without an error, the clients would train without the instructions
            raise UsageError(f"{cls.__name__}.task is now called instructions, and mimicfl.Task mimicfl.Instructions; rename both")

    @property
    def has_client_form(self) -> bool:
        """Can every client keep its own part of the state, so that the server needs only a sum?"""
        return False

    def init(self, w: Tensor, num_clients: int) -> S:
        """The state before the first round."""
        return State(w)  # type: ignore[return-value]

    def instructions(self, state: S, active: Tensor) -> Instructions:
        """What the clients in S_t are asked to do."""
        return Instructions()

    def aggregate(self, state: S, active: Tensor, g: Tensor, step: Step) -> None:
        """Update the state in place with the updates g [m, d] of the active clients."""
        raise NotImplementedError


def is_algorithm(thing: object) -> bool:
    own = getattr(thing, "aggregate", None)
    missing = getattr(own, "__func__", own) is Algorithm.aggregate  # inherited from the base class, which has none
    return all(callable(getattr(thing, name, None)) for name in ("init", "instructions", "aggregate")) and not missing


def trait(algorithm: object, name: str) -> Any:
    """An attribute of an algorithm or of its class; the default of `Algorithm` if it has none."""
    return getattr(algorithm, name, False if name == "has_client_form" else getattr(Algorithm, name))


def declared(algorithm: object, name: str) -> Any:
    """A class attribute that subclasses do not inherit: what holds for an algorithm may not hold for a variant of it."""
    kind = algorithm if isinstance(algorithm, type) else type(algorithm)
    return vars(kind).get(name, getattr(Algorithm, name))


def paper_algorithms() -> tuple[str, ...]:
    """The names of the algorithms that the MimiC paper compares, in the order of its tables."""
    ranks = {name: declared(factory, "paper_rank") for name, factory in ALGORITHMS.factories.items()}
    return tuple(sorted((name for name, rank in ranks.items() if rank), key=ranks.__getitem__))


ALGORITHMS: Registry[Algorithm[Any]] = Registry(
    "algorithm", ("algorithm",), is_algorithm, "a name or an object with init, instructions and aggregate"
)
SHOWN_AS: dict[str, type] = {"title": str, "color": str, "dashed": bool, "emphasized": bool}  # attributes that tables and figures show


def shown_as(name: str) -> dict[str, Any]:
    """How tables and figures show a registered custom algorithm; nothing for names that the package knows, or that nobody registered."""
    factory = ALGORITHMS.factories.get(name)
    if factory is None or is_built_in(factory):
        return {}
    return {key: kind(trait(factory, key) or "") for key, kind in SHOWN_AS.items()} | {"title": title_of(factory) or name}


def title_of(factory: object) -> str:
    """The title that an algorithm declares, or its class name; empty for functions without a title."""
    own = str(trait(factory, "title"))
    return own or (factory.__name__ if isinstance(factory, type) and issubclass(factory, Algorithm) else "")


register, spell = ALGORITHMS.register, ALGORITHMS.spell


def make(spec: "str | Algorithm[Any]") -> Algorithm[Any]:
    """An algorithm from its name (`mimic`, `fedprox:mu=0.1`), or the object unchanged."""
    if isinstance(spec, str):
        return ALGORITHMS.make(spec)
    if isinstance(spec, type) or not is_algorithm(spec):
        raise UsageError(f"algorithm must be {ALGORITHMS.wanted}, got {spec!r}")
    return spec


def memory(w: Tensor, num_clients: int) -> ClientMemory:
    """One zero vector per client, [N, d]; memory is allocated once a client has participated."""
    return ClientMemory(w, num_clients)


def pack(state: State) -> dict[str, Tensor]:
    """A state as named tensors, ready for a file."""
    tensors: dict[str, Tensor] = {}
    for each in fields(state):
        value = getattr(state, each.name)
        parts = {f".{key}": part for key, part in value.tensors().items()} if isinstance(value, ClientMemory) else {"": value}
        tensors |= {f"state.{each.name}{key}": part for key, part in parts.items()}
    return tensors


def unpack(state: State, tensors: dict[str, Tensor], where: object) -> None:
    """Restore saved tensors into a state made by `init`; a mismatch is refused with a message that names `where`."""
    for each in fields(state):
        now = getattr(state, each.name)
        wanted = now.tensors() if isinstance(now, ClientMemory) else {"": now}
        saved = {part: tensors.get(f"state.{each.name}{'.' * bool(part)}{part}") for part in wanted}
        found = [tensor for tensor in saved.values() if tensor is not None]
        fits = len(found) == len(wanted) and all(a.dtype == b.dtype for a, b in zip(found, wanted.values(), strict=True))
        if isinstance(now, ClientMemory):
            fits = fits and found[1].shape == (len(found[0]), now.d) and bool((found[0] < len(now.slot)).all())
        elif fits:
            fits = found[0].shape == now.shape
        if not fits:
            raise UsageError(
                f"the checkpoint in {where} does not fit this version of the algorithm (state.{each.name}): choose another folder"
            )
        if isinstance(now, ClientMemory):
            now.restore(*found)
        else:
            setattr(state, each.name, found[0].to(now.device))


def checked_instructions(given: Any, w: Tensor, active: int, algorithm: object) -> Instructions:
    """An algorithm's instructions to `active` clients, checked; a vector [d] for all clients becomes one row per client."""
    name = type(algorithm).__name__
    if not isinstance(given, Instructions):
        raise UsageError(f"{name}.instructions must return mimicfl.Instructions, got {type(given).__name__}")
    mu = number(f"{name}.instructions: mu", given.mu, low=0)
    if isinstance(given.shift, Tensor):
        shift: Tensor | float = _checked_rows(f"{name}.instructions: shift", given.shift, w, active)
    else:
        shift = number(f"{name}.instructions: shift", given.shift)
    if given.start is not None and not isinstance(given.start, Tensor):
        raise UsageError(f"{name}.instructions: start must be a tensor or None, got {_kind(given.start)}")
    start = None if given.start is None else _checked_rows(f"{name}.instructions: start", given.start, w, active)
    return Instructions(shift, mu, start, _checked_send(given.send, algorithm))


def _checked_send(send: Any, algorithm: object) -> tuple[str, ...]:
    """The names of the vectors that clients send besides g. They are counted in bytes and uploads, so the algorithm must declare them."""
    name = type(algorithm).__name__
    if not isinstance(send, (tuple, list)) or not all(isinstance(each, str) for each in send) or len(set(send)) < len(send):
        raise UsageError(f"{name}.instructions: send must be a tuple of different names, as in send=('last_gradient',), got {shown(send)}")
    vectors = [*["g"] * bool(trait(algorithm, "sends_g")), *send]
    if send and trait(algorithm, "uploads") < len(vectors):
        what = f"clients send {' and '.join(vectors)}"
        raise UsageError(f"{name}: {what}, so uploads must be at least {len(vectors)}, got {trait(algorithm, 'uploads')}")
    return tuple(send)


def _kind(value: object) -> str:
    return "a memory of all clients: use its rows, memory[active]" if isinstance(value, ClientMemory) else shown(value)


def _checked_rows(what: str, given: Tensor, w: Tensor, active: int) -> Tensor:
    rows = given.expand(active, -1) if given.shape == w.shape else given
    if rows.shape != (active, w.numel()) or rows.dtype != w.dtype:
        wanted = f"{w.dtype} of shape ({active}, {w.numel()}), one row per active client, or ({w.numel()},) for all of them"
        remedy = "; select the rows of `active` from per-client memory" if rows.ndim == 2 and len(rows) > active else ""
        raise UsageError(f"{what} must be {wanted}, got {rows.dtype} of shape {tuple(rows.shape)}{remedy}")
    return rows
