"""Generates random calls as Python expressions, so that a failing call can be pasted into an interpreter."""

from dataclasses import dataclass, field, replace
from random import Random

from .fuzz_choices import ODD
from .fuzz_signatures import CALLABLES, CALLBACKS, CALLS


@dataclass(frozen=True)
class Call:
    """A named call. `wrong` are the arguments that must be refused; if `twice`, repeating the call must give the same bits."""

    name: str
    function: str
    arguments: list[tuple[str, str]]
    claims: list[tuple[str, str]] = field(default_factory=list)
    twice: bool = False
    runs: tuple[str, ...] = ()
    damage: int | None = None

    @property
    def text(self) -> str:
        return f"{self.function}({', '.join(f'{name}={value}' if name else value for name, value in self.arguments)})"

    @property
    def wrong(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.claims if (name, value) in self.arguments)

    def having(self, arguments: list[tuple[str, str]]) -> "Call":
        return replace(self, arguments=arguments)


def generate(rng: Random) -> Call:
    name = rng.choices(list(CALLS), [entry[3] for entry in CALLS.values()])[0]
    functions, table, always, _ = CALLS[name]
    chosen = set(always) | set(rng.sample(list(table), min(len(table), rng.randrange(4))))
    values = {argument: rng.choice(table[argument][0]) for argument in table if argument in chosen}
    claims: list[tuple[str, str]] = []
    way = rng.random()
    if way < 0.4 and (bad := [argument for argument in table if table[argument][1]]):
        argument = rng.choice(bad)
        values[argument] = rng.choice(table[argument][1])
        claims = [(argument, values[argument])]
    elif way < 0.7:
        for argument in rng.sample(list(table), min(len(table), rng.randrange(1, 3))):
            values[argument] = rng.choice(ODD if argument not in CALLBACKS else [value for value in ODD if value not in CALLABLES])
    if rng.random() < 0.02:
        values["nonsense"] = "3"
    if values and way >= 0.7 and rng.random() < 0.1:
        values.pop(rng.choice(list(values)), None)
    arguments = [(argument, values[argument]) for argument in ["", *table, "nonsense"] if argument in values and (argument or "" in table)]
    function = rng.choice(functions)
    if name == "rate":
        arguments = [pair for pair in arguments if pair[0] != "decay" or function.endswith("geometric")]
        claims = [pair for pair in claims if pair in arguments]
    text = " ".join(values.values())
    runs = tuple(run for run in ("finished", "other", "stopped", "objects", "compared") if run in text or "'.'" in text)
    damaged = name == "read a damaged run" and "'finished'" in text
    twice = name in ("simulate", "run", "compare") and "out" not in values and "for part in" not in text and rng.random() < 0.2
    return Call(
        name,
        function,
        list(dict.fromkeys(arguments)),
        claims,
        twice,
        ("finished", "other") if damaged else runs,
        rng.randrange(10**9) if damaged else None,
    )
