"""Hooks for mkdocs: pages of the repository that lie outside docs/ join the site, and diagrams are drawn without a network.

A file outside docs/ that a page links to (an example, a notebook, a record, a source file) gets a page below `repository/`. Links stay as
they are in the repository, where they work as well; here they are translated.
"""

import os
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
from convert import as_markdown, drawn_diagrams, spaced_lists
from exports import with_exports

ROOT = Path(__file__).resolve().parent.parent.parent
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
OVERVIEW = "overview.md"  # mkdocs would make a README the front page of its section
FIRST = ("mimic", "fedavg")  # of the algorithms


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace `folder/*` in the navigation by the pages of that folder."""
    config.nav = _expanded(config.nav)
    return config


def _expanded(nav: Any) -> Any:
    if isinstance(nav, list):
        return [_expanded(entry) for entry in nav]
    if isinstance(nav, dict):
        return {title: _expanded(entry) for title, entry in nav.items()}
    if nav.endswith("/*"):
        pages = sorted((ROOT / "docs" / nav[:-2]).glob("*.md"), key=lambda page: (page.stem not in FIRST, page.stem != "mimic", page.stem))
        return [page.relative_to(ROOT / "docs").as_posix() for page in pages]
    return nav


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every file of the repository that a page links to, directly or through another such page."""
    waiting = [path for path in _nav_paths(config.nav) if path.startswith("repository/")]
    waiting += [target for page in files.documentation_pages() for target in linked(page.content_string, f"docs/{page.src_uri}")]
    while waiting:
        uri = waiting.pop()
        source = ROOT / repository_path(uri)
        if uri.startswith("repository/") and files.get_file_from_path(uri) is None and source.is_file():
            text = as_markdown(source)
            files.append(File.generated(config, uri, content=text))
            waiting += linked(text, repository_path(uri))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Translate the links, draw the diagrams, separate lists from paragraphs, and list the names of the reference."""
    here = page.file.src_uri
    source = repository_path(here)

    def translated(match: re.Match[str]) -> str:
        target = site_uri(source, match[2])
        return match[0] if target is None else f"{match[1]}{posixpath.relpath(target, posixpath.dirname(here) or '.')}{match[3]}"

    return with_exports(spaced_lists(drawn_diagrams(LINK.sub(translated, markdown))), ROOT / "src" / "mimicfl")


def linked(text: str, source: str) -> list[str]:
    """The pages, as the site names them, that the text of a repository file links to."""
    return [target for match in LINK.finditer(text) if (target := site_uri(source, match[2])) is not None]


def site_uri(source: str, link: str) -> str | None:
    """How the site names what `source` links to; None for what is not a file of the repository."""
    if "://" in link or link.startswith(("mailto:", "#", "/")):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    file = ROOT / path
    if not file.is_file():
        return None
    return f"repository/{path.replace('README.md', OVERVIEW)}" if path.endswith((".md", ".png", ".svg")) else f"repository/{path}.md"


def repository_path(uri: str) -> str:
    """The file of the repository behind a page of the site."""
    if not uri.startswith("repository/"):
        return f"docs/{uri}"
    path = uri.removeprefix("repository/").replace(OVERVIEW, "README.md")
    return path if os.path.exists(ROOT / path) else path.removesuffix(".md")


def _nav_paths(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [path for entry in (nav.values() if isinstance(nav, dict) else nav) for path in _nav_paths(entry)]
