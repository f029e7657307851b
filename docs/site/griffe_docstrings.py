"""Docstrings as Markdown: aligned `name   meaning` lines become a table, doctests become code blocks."""

import re
from typing import Any

import griffe

ITEM = re.compile(r"^(\w[\w., ]{0,40}?)\s{2,}(\S.*)$")


class Docstrings(griffe.Extension):
    """Rewrites the docstring of every object that the reference shows."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """A docstring of this package, as Markdown."""
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n\n".join(_paragraph(paragraph) for paragraph in paragraphs)


def _paragraph(text: str) -> str:
    lines = text.splitlines()
    if any(line.lstrip().startswith(">>> ") for line in lines):
        return "\n".join(["```pycon", *[line.removeprefix("    ") if line.startswith("    ") else line for line in lines], "```"])
    if sum(ITEM.match(line) is not None for line in lines) >= 2 and ITEM.match(lines[0]):
        return _table(lines)
    return text


def _table(lines: list[str]) -> str:
    rows: list[list[str]] = []
    for line in lines:
        if match := ITEM.match(line):
            rows.append([", ".join(f"`{name.strip()}`" for name in match[1].split(",")), match[2]])
        else:
            rows[-1][1] += " " + line.strip()
    return "\n".join(["| | |", "|---|---|", *[f"| {name} | {meaning.replace('|', chr(92) + '|')} |" for name, meaning in rows]])
