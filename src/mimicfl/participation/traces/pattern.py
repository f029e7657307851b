"""`trace:FILE`: availability as recorded on real devices."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from ...errors import UsageError, flag, number, one_of, shown
from ...seeds import stream
from ...text import counted
from ..patterns import Pattern, register
from .foreign import RULES
from .formats import FORMATS, read_trace
from .intervals import MOST_SECONDS, Trace, around, merged

MOST_REPETITIONS = 100_000
AT_ONCE = 4096  # clients whose schedule is computed together, to bound the memory


@register("trace")
@dataclass(frozen=True, eq=False)
class FromTrace(Pattern):
    """Clients are available when the devices of a trace were. Round t starts at t * round seconds.

    file       our neutral CSV or Parquet, FLASH's raw or processed JSON, or FedScale's pickle; `format` if it is not recognised
    round      seconds per round; 270 is FLASH's deadline
    when       a client is available if its device is at the `start` of the round, or `throughout` the round
    wrap       repeat a device's trace after its period; false: it is not available from then on
    devices    which device a client gets: `seeded` (drawn without replacement), `order`, or a list of device names, one per client
    resample   draw devices with replacement, for more clients than devices
    never      `keep` devices that are never available, or `drop` them
    offset     seconds of the trace that are skipped; 0 is midnight where the trace has times of day
    rule       when a device of a raw FLASH trace is available: `locked`, `idle` or `charging` (see docs/availability.md)
    """

    file: str = ""
    round: float = 270.0
    when: str = "start"
    wrap: bool = True
    devices: str | Sequence[str] = "seeded"
    resample: bool = False
    never: str = "keep"
    offset: float = 0.0
    rule: str = "locked"
    format: str = "auto"

    def __post_init__(self) -> None:
        if not self.file or not isinstance(self.file, (str, Path)):
            raise UsageError("name a trace file, as in trace:phones.csv")
        object.__setattr__(self, "file", str(self.file))
        number("round", self.round, low=0, open_low=True), number("offset", self.offset, low=0)
        one_of("when", self.when, ["start", "throughout"]), one_of("never", self.never, ["keep", "drop"])
        one_of("rule", self.rule, RULES), one_of("format", self.format, FORMATS)
        flag("wrap", self.wrap), flag("resample", self.resample)
        listed = isinstance(self.devices, (list, tuple)) and self.devices
        if not listed and self.devices not in ("seeded", "order"):
            raise UsageError(f'devices must be seeded, order or a list of names such as ["a","b"], got {shown(self.devices)}')

    @cached_property
    def trace(self) -> Trace:
        """Read when it is first needed."""
        try:
            stamp = Path(self.file).stat()
        except OSError as error:
            raise UsageError(f"cannot read a trace from {self.file}: {error.strerror or error}") from None
        trace = _read(self.file, self.format, self.rule, stamp.st_mtime_ns, stamp.st_size)
        if self.never == "drop":
            if trace.never.all():
                raise UsageError(f"no device of {self.file} is ever available, so never=drop leaves none")
            trace = trace.take(np.flatnonzero(~trace.never))
        return trace

    @property
    def round_seconds(self) -> float | None:
        return float(self.round)

    def chosen(self, num_clients: int, seed: int) -> np.ndarray:
        """The device of each client, [N]."""
        have = len(self.trace)
        if not isinstance(self.devices, str):
            return self._named(num_clients)
        if self.resample and self.devices == "seeded":
            return stream(seed, "trace devices").integers(0, have, size=num_clients)
        if num_clients > have and not self.resample:
            named = counted(have, "device")
            raise UsageError(f"the trace has {named} for {num_clients} clients; lower the number of clients, or give resample=true")
        if self.devices == "order":
            return np.arange(num_clients) % have
        return stream(seed, "trace devices").permutation(have)[:num_clients]

    def _named(self, num_clients: int) -> np.ndarray:
        if len(self.devices) != num_clients:
            raise UsageError(f"devices names {len(self.devices)} devices for {num_clients} clients; name one per client")
        number_of = {name: i for i, name in enumerate(self.trace.names)}
        if unknown := [name for name in map(str, self.devices) if name not in number_of]:
            raise UsageError(f"the trace has no device {shown(unknown[0])}; it has, for example, {shown(self.trace.names[0])}")
        return np.array([number_of[str(name)] for name in self.devices])

    def rates(self, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray | None:
        if not self.wrap:  # after the end of the trace no client is available
            return None
        devices, of_client = np.unique(self.chosen(num_clients, seed), return_inverse=True)
        return frequencies(self.trace.take(devices), self.round, self.when, self.offset)[of_client]

    def draw(self, rounds: int, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray:
        return sampled(self.trace, rounds, self.round, self.when, self.wrap, self.offset, self.chosen(num_clients, seed))


@lru_cache(maxsize=2)  # the runs of a comparison share the trace
def _read(file: str, form: str, rule: str, changed: int, size: int) -> Trace:
    return read_trace(file, form, rule)


def sampled(
    trace: Trace,
    rounds: int,
    seconds: float,
    when: str = "start",
    wrap: bool = True,
    offset: float = 0.0,
    devices: np.ndarray | None = None,
) -> np.ndarray:
    """Which devices are available in rounds of this many seconds, bool [rounds, devices]; all devices, or these.

    An interval holds from its start up to, but not including, its end.
    """
    devices = np.arange(len(trace)) if devices is None else devices
    available = np.empty((rounds, len(devices)), dtype=bool)
    for first in range(0, len(devices), AT_ONCE):
        part = trace.take(devices[first : first + AT_ONCE])
        available[:, first : first + len(part)] = _sampled(part, rounds, seconds, when, wrap, offset)
    return available


def _sampled(trace: Trace, rounds: int, seconds: float, when: str, wrap: bool, offset: float) -> np.ndarray:
    device, start, end = merged(*_unrolled(trace, offset, offset + rounds * seconds, wrap))
    begin = np.ceil((start - offset) / seconds)
    stop = (np.ceil if when == "start" else np.floor)((end - offset) / seconds)
    begin, stop = (np.clip(each, 0, rounds).astype(np.int64) for each in (begin, np.maximum(begin, stop)))
    size, n = (rounds + 1) * len(trace), len(trace)
    steps = np.bincount(begin * n + device, minlength=size) - np.bincount(stop * n + device, minlength=size)
    return np.asarray(np.cumsum(steps.reshape(rounds + 1, n), axis=0)[:rounds] > 0)


def _unrolled(trace: Trace, since: float, until: float, wrap: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The intervals between two times, with the trace repeated as often as needed."""
    if wrap:
        _check_repetitions(trace, since, until)
    first = np.floor(since / trace.period).astype(int) if wrap else np.zeros(len(trace), dtype=int)
    last = np.ceil(until / trace.period).astype(int) if wrap else np.ones(len(trace), dtype=int)
    parts = []
    for cycle in range(int(first.min()), int(last.max())):
        rows = ((cycle >= first) & (cycle < last))[trace.device]
        shift = cycle * trace.period[trace.device[rows]]
        parts.append((trace.device[rows], trace.start[rows] + shift, trace.end[rows] + shift))
    device, start, end = (np.concatenate(part) for part in zip(*parts, strict=True))
    near = (end > since) & (start < until)
    device, start, end = device[near], start[near], end[near]
    order = np.lexsort((start, device))
    return device[order], start[order], end[order]


def _check_repetitions(trace: Trace, since: float, until: float) -> None:
    """Refuse times that only a mistake in their unit can explain."""
    if until > MOST_SECONDS:
        raise UsageError(f"the run ends after {until:.3g} s of the trace, more than {MOST_SECONDS:.0e} s; lower round or offset")
    k = int(trace.period.argmin())
    if (until - since) / trace.period[k] > MOST_REPETITIONS:
        raise UsageError(
            f"the trace of device {trace.names[k]} lasts {trace.period[k]:.3g} s, and the run {until - since:.3g} s, which repeats it more "
            f"than {MOST_REPETITIONS:,} times; are its times in seconds?"
        )


def frequencies(trace: Trace, seconds: float, when: str = "start", offset: float = 0.0) -> np.ndarray:
    """The share of the rounds in which each device is available if its trace is repeated forever, [devices].

    Modulo the period of a device, rounds start at the points offset + k g, each equally often, where g is the greatest common divisor of
    the period and the length of a round. Available are those that lie in an interval, or also end in it with `when="throughout"`.
    """
    periods, which = np.unique(trace.period, return_inverse=True)
    grid = np.array([_common_divisor(period, seconds) for period in periods.tolist()])[which]  # [devices]
    device, start, end = around(*merged(trace.device, trace.start, trace.end), trace.period)
    g, o = grid[device], offset % grid[device]
    first = np.ceil((start - o) / g)
    after = np.ceil((end - o) / g) if when == "start" else np.floor((end - seconds - o) / g) + 1
    found = np.bincount(device, np.maximum(after - first, 0), minlength=len(trace)) * grid / trace.period
    always = np.bincount(device, end - start, minlength=len(trace)) >= trace.period
    return np.where(always, 1.0, found)


def _common_divisor(a: float, b: float) -> float:
    """The greatest number that divides both; floats are fractions, so there is one."""
    x, y = Fraction(a), Fraction(b)
    while y:
        x, y = y, x % y
    return float(x)
