"""The documentation site builds without a warning, every page can be reached, and it loads nothing from other servers."""

import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.browser import chromium, needs_chromium
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site; every warning is an error."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


def links(page):
    """What a page links to and loads, as (attribute, address)."""
    return [(name, unescape(value)) for name, value in re.findall(r'\b(href|src)="([^"]*)"', page.read_text(encoding="utf-8"))]


@pytest.mark.slow
def test_every_page_is_reached_from_the_first(site):
    seen, waiting = set(), [site / "index.html"]
    while waiting:
        page = waiting.pop()
        if page in seen:
            continue
        seen.add(page)
        for _, address in links(page):
            parts = urlsplit(address)
            if not parts.scheme and parts.path.endswith(".html"):
                target = (page.parent / unquote(parts.path)).resolve()
                assert target.is_file(), f"{page}: {address}"
                waiting.append(target)
    assert {page for page in site.rglob("*.html") if page.name != "404.html"} == seen


@pytest.mark.slow
def test_the_site_works_offline(site):
    for page in site.rglob("*.html"):
        loaded = [address for name, address in links(page) if name == "src"] + re.findall(r'<link [^>]*href="([^"]*)"', page.read_text())
        assert [address for address in loaded if address.startswith(("http:", "https:", "//"))] == [], page
    assert not re.search(r"\bmermaid\b", (site / "design.html").read_text().split("<article")[1])  # it would be loaded from a server


@pytest.mark.slow
@needs_chromium
def test_search_works_from_the_disk(site, tmp_path):
    page = chromium((site / "index.html").as_uri() + "?q=dropout", tmp_path, "--dump-dom", budget=20000)
    assert re.search(r"\d+ matching documents", page)


@pytest.mark.slow
def test_lists_below_a_paragraph_are_lists(site):
    page = (site / "algorithms" / "mimic.html").read_text()
    assert re.search(r"What to know\.</strong></p>\s*<ol>", page)


@pytest.mark.slow
def test_docstrings_are_shown_as_tables(site):
    """simulate's docstring lists its arguments in aligned columns, which Markdown would join to one paragraph."""
    page = (Path(site) / "api.html").read_text()
    assert "<code>rounds</code>, <code>uploads</code></td>" in page
    assert "&gt;&gt;&gt; <" not in re.sub(r"<pre.*?</pre>", "", page, flags=re.DOTALL)


@pytest.mark.slow
def test_long_signatures_have_a_line_per_argument(site):
    """mkdocstrings formats them only if a formatter is installed."""
    signature = re.search(r"<pre>.*?simulate.*?</pre>", (Path(site) / "api.html").read_text(), re.DOTALL)
    assert signature[0].count("\n") > 10
    assert "ruff" in (ROOT / "pyproject.toml").read_text().partition("\nsite = ")[2].splitlines()[0]
