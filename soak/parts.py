"""The parts of the soak, by name; a module is imported only in the process that runs it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """module     has the function `trials`
    spread     several processes may run it side by side
    patience   minutes without an outcome after which its process counts as hung
    """

    module: str
    spread: bool = True
    patience: float = 10.0


PARTS = {
    "command lines": Entry("soak.fuzz_lines"),
    "API calls": Entry("soak.fuzz_calls"),
    "engine comparisons": Entry("soak.engines"),
    "kills": Entry("soak.kills", patience=15.0),
    "long runs": Entry("soak.long", spread=False, patience=30.0),  # it measures memory and time: one at a time
}
