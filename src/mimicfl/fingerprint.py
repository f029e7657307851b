"""`Fingerprint` identifies a run by hashes of everything that its result depends on."""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

Parts = dict[str, str]
OPTIONAL = ("callback", "diagnosis", "device")  # a finished run can be read without them


def digest(value: Any) -> str:
    """Sixteen hex digits for a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


NONE = digest(None)


@dataclass(frozen=True)
class Fingerprint:
    """`run` identifies one run; `experiment` is shared by runs that differ only in the seed."""

    run: Parts = field(default_factory=dict)
    experiment: Parts = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list, compare=False)  # functions without source code, identified by their bytecode

    @property
    def program(self) -> tuple[str, ...]:
        """Equal for runs that may train as one program: seed, trainable weights, clients, algorithm and rates may differ."""
        return tuple(self.run[part] for part in ("data", "model", "frozen weights", "loss", "precision", "device"))

    @property
    def result(self) -> Parts:
        """What the numbers of a run depend on."""
        return {part: value for part, value in self.run.items() if part not in OPTIONAL}

    def to_json(self) -> str:
        return json.dumps({"run": self.run, "experiment": self.experiment})

    @classmethod
    def from_json(cls, text: str) -> "Fingerprint":
        """Empty if an earlier version or another program wrote the text."""
        try:
            held = json.loads(text)
            run, experiment = ({str(key): str(value) for key, value in held[name].items()} for name in ("run", "experiment"))
        except (ValueError, TypeError, KeyError, AttributeError):
            return cls()
        return cls(run, experiment)

    def differences(self, other: "Fingerprint", complete: bool) -> list[str]:
        """The parts in which the run of a folder differs from this one; if it is complete, parts that only training needs are ignored."""
        found = [part for part in self.run if self.run[part] != other.run.get(part)]
        needless = [part for part in found if part in OPTIONAL and (part == "device" or self.run[part] == NONE)] if complete else []
        return [part for part in found if part not in needless]
