"""All metadata is in pyproject.toml, except the README: a package index shows it without the files that its links point to."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
ABSOLUTE = re.compile(r"[a-z][a-z0-9+.-]*:|#", re.IGNORECASE)


def for_index(text: str, repository: str = "", version: str = "") -> str:
    """The README with absolute links into the repository; without a repository, such links become plain text and pictures are left out."""

    def link(found: re.Match[str]) -> str:
        picture, words, target = found.groups()
        if ABSOLUTE.match(target):
            return found[0]
        if not repository:
            return "" if picture else words
        return f"{picture}[{words}]({repository.rstrip('/')}/{'raw' if picture else 'blob'}/v{version}/{target})"

    return LINK.sub(link, text)


def readme() -> str:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
    version = re.search(r'__version__ = "(.+)"', (ROOT / "src/mimicfl/_version.py").read_text(encoding="utf-8"))
    return for_index((ROOT / "README.md").read_text(encoding="utf-8"), declared.get("Repository", ""), version[1] if version else "")


if __name__ == "__main__":
    setup(long_description=readme(), long_description_content_type="text/markdown")
