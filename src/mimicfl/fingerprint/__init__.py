"""`Fingerprint` identifies a run by hashes of everything that its result depends on."""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

Parts = dict[str, str]
OPTIONAL = ("callback", "diagnosis", "device")  # not needed to read a finished run


def digest(value: Any) -> str:
    """Hash a JSON-serialisable value to sixteen hex digits."""
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
        """Equal for runs that can train in one batch; their seeds, trainable weights, clients, algorithms and rates may differ."""
        parts = tuple(self.run[part] for part in ("data", "model", "frozen weights", "loss", "precision", "device"))
        return (*parts, self.run.get("transform", ""))  # the data's own part does not cover its transform

    @property
    def result(self) -> Parts:
        """The parts that determine the numerical results of a run."""
        return {part: value for part, value in self.run.items() if part not in OPTIONAL}

    def to_json(self) -> str:
        return json.dumps({"run": self.run, "experiment": self.experiment})

    @classmethod
    def from_json(cls, text: str) -> "Fingerprint":
        """Parse the output of `to_json`; return an empty fingerprint if the text has another format."""
        try:
            held = json.loads(text)
            run, experiment = ({str(key): str(value) for key, value in held[name].items()} for name in ("run", "experiment"))
        except (ValueError, TypeError, KeyError, AttributeError):
            return cls()
        return cls(run, experiment)

    def differences(self, other: "Fingerprint", complete: bool) -> list[str]:
        """Return the names of the parts in which another run differs. If that run is complete, ignore parts needed only for training."""
        parts = {**self.run, **other.run}  # a part that only some runs have, such as the stages of a round, counts as None elsewhere
        found = [part for part in parts if self.run.get(part, NONE) != other.run.get(part, NONE)]
        ignored = [part for part in found if part in OPTIONAL and (part == "device" or self.run[part] == NONE)] if complete else []
        return [part for part in found if part not in ignored]
