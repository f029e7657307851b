"""A command line with the files and runs in its folder."""

import shlex
from dataclasses import dataclass, field
from random import Random

from . import fuzz_settings as toml

Option = tuple[str, ...]  # --name and its values, or a single word


@dataclass(frozen=True)
class Line:
    """A command with its options, and the files and runs in its folder.

    wrong     the parts that must be refused; if empty, the command may succeed or be refused
    damage    seed of the damage to the first of `copies`
    """

    command: str
    options: list[Option]
    lines: list[str] = field(default_factory=list)
    encoding: int | None = None  # seed of the encoding of `lines` in settings.toml; None: no such file
    beside: dict[str, bytes] = field(default_factory=dict)
    copies: tuple[str, ...] = ()
    damage: int | None = None
    claims: tuple[Option, ...] = ()  # options that must be refused if they are the last of their name
    in_file: tuple[tuple[str, int], ...] = ()  # lines that must be refused if the file contains them this many times

    @property
    def argv(self) -> list[str]:
        return [*([self.command] if self.command != "(none)" else []), *(word for option in self.options for word in option)]

    @property
    def files(self) -> dict[str, bytes]:
        return self.beside | ({} if self.encoding is None else {"settings.toml": toml.encoded(Random(self.encoding), self.lines)})

    @property
    def wrong(self) -> str:
        if any(option[0] in ("--help", "-h", "--version") for option in self.options):
            return ""
        last = {option[0].partition("=")[0]: option for option in self.options}
        found = [" ".join(option) for option in self.claims if option in (last.get(option[0]), last.get(option[0].partition("=")[0]))]
        file_used = any(option == ("settings.toml",) for option in self.options) and self.encoding is not None
        content = self.files.get("settings.toml", b"")  # it may be damaged
        given = {name.lstrip("-").replace("-", "_") for name in last}
        found += [
            f"{text} in the file"
            for text, times in self.in_file
            if file_used and self.lines.count(text) >= times and _bytes(text) in content and not _wins(given, text)
        ]
        return "; ".join(found)

    def shell(self) -> str:
        """Return the commands that reproduce it in a shell."""
        used = " ".join(self.argv)
        files = [f"settings.toml (as bytes): {content!r}" for name, content in self.files.items() if name == "settings.toml"]
        files += [f"{name}: {content.decode()!r}" for name, content in self.files.items() if name != "settings.toml" and name in used]
        runs = [f"runs in the folder: {', '.join(self.copies)}"] if self.copies else []
        return "\n".join([*files, *runs, f"mimicfl {shlex.join(self.argv)}"])


def _wins(given: set[str], text: str) -> bool:
    """Return whether an option on the command line overrides this line of the file."""
    name = text.partition(" ")[0].replace("-", "_")
    pair = {
        "rounds": "uploads",
        "uploads": "rounds",
        "epochs": "steps",
        "steps": "epochs",
        "num_clients": "clients",
        "plugins": "plugin",
    }.get(name)
    return name in given or pair in given


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
