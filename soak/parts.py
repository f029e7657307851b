"""The parts of the soak by name. A module is imported only in the process that runs it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """module     the module with the function `trials`
    spread     whether several processes may run it in parallel
    patience   minutes without an outcome after which its process counts as hung
    """

    module: str
    spread: bool = True
    patience: float = 40.0


PARTS = {
    "command lines": Entry("soak.fuzz_lines"),
    "API calls": Entry("soak.fuzz_calls"),
    "engine comparisons": Entry("soak.engines"),
    "kills": Entry("soak.kills", patience=40.0),
    "long runs": Entry("soak.long", spread=False, patience=60.0),  # it measures memory and time, so only one process
}
