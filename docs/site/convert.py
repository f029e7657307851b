"""Files of the repository as Markdown pages: source code, notebooks, flowcharts."""

import html
import json
import re
from pathlib import Path
from typing import Any

LANGUAGES = {".py": "python", ".toml": "toml", ".cff": "yaml", ".yml": "yaml", ".sh": "bash", ".csv": "text", ".bib": "bibtex"}
WIDTH, HEIGHT, GAP_X, GAP_Y = 104, 32, 20, 34  # of a box in a flowchart, and between boxes

LIST_ITEM = re.compile(r"(?:[-*]|1\.) ")
BELONGS = re.compile(r"\s|[-*] |\d+\. |<")  # a line of a list, or markup that begins a block


def as_markdown(file: Path) -> str:
    """The page that shows a file."""
    if file.suffix == ".md":
        return file.read_text(encoding="utf-8")
    if file.suffix == ".ipynb":
        return notebook(json.loads(file.read_text(encoding="utf-8")), file.name)
    return f"# {file.name}\n\n{fenced(file.read_text(encoding='utf-8'), LANGUAGES.get(file.suffix, 'text'))}\n"


def fenced(text: str, language: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def notebook(cells: dict[str, Any], name: str) -> str:
    """A notebook with its stored outputs."""
    parts = [part for cell in cells["cells"] for part in _cell(cell)]
    parts.insert(1, f"*This page is a notebook, `notebooks/{name}`; open it with Jupyter to run it.*")
    return "\n\n".join(parts) + "\n"


def _cell(cell: dict[str, Any]) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    return [fenced(source, "python"), *[shown for output in cell["outputs"] if (shown := _output(output))]]


def _output(output: dict[str, Any]) -> str:
    """An output: as HTML where it has that form, else its picture or its text."""
    if output["output_type"] == "stream":
        return fenced("".join(output["text"]), "text") if output["name"] == "stdout" else ""
    data = output.get("data", {})
    if "text/html" in data:
        return f'<div class="output" markdown="0">\n{_one_block("".join(data["text/html"]))}\n</div>'
    if "image/png" in data:
        return f'<img alt="output" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
    return fenced("".join(data.get("text/plain", "")), "text") if "text/plain" in data else ""


def _one_block(text: str) -> str:
    """HTML without empty lines, which would end the block in Markdown."""
    return "\n".join(line for line in text.splitlines() if line.strip())


def drawn_diagrams(markdown: str) -> str:
    """Replace each mermaid flowchart by a drawing, since mermaid itself would be loaded from another server."""
    return re.sub(r"```mermaid\nflowchart TD\n(.*?)```", lambda match: flowchart(match[1]), markdown, flags=re.DOTALL)


def flowchart(text: str) -> str:
    """An SVG of `a --> b` lines, drawn in layers: each box below everything that points to it."""
    arrows = [tuple(part.strip() for part in line.split("-->")) for line in text.strip().splitlines()]
    layers = _layers(arrows)
    width = max(map(len, layers)) * (WIDTH + GAP_X)
    place = {
        name: ((width - len(layer) * (WIDTH + GAP_X)) / 2 + GAP_X / 2 + k * (WIDTH + GAP_X), row * (HEIGHT + GAP_Y) + 4)
        for row, layer in enumerate(layers)
        for k, name in enumerate(layer)
    }
    lines = "".join(_arrow(*place[a], *place[b]) for a, b in arrows)
    boxes = "".join(_box(name, x, y) for name, (x, y) in place.items())
    height = len(layers) * (HEIGHT + GAP_Y) - GAP_Y + 8
    return f'<svg class="flowchart" role="img" viewBox="0 0 {width:g} {height:g}" width="{width:g}"><g>{lines}</g>{boxes}</svg>'


def _layers(arrows: list[tuple[str, ...]]) -> list[list[str]]:
    """The longest path to a box gives its layer; within a layer, a box is near those that point to it."""
    names = sorted({name for arrow in arrows for name in arrow})
    depth = dict.fromkeys(names, 0)
    for _ in names:
        for a, b in arrows:
            depth[b] = max(depth[b], depth[a] + 1)
    layers: list[list[str]] = []
    for level in range(max(depth.values()) + 1):
        above = layers[-1] if layers else []

        def pull(name: str, above: list[str] = above) -> float:
            places = [above.index(a) for a, b in arrows if b == name and a in above]
            return sum(places) / len(places) if places else len(above) / 2

        layers.append(sorted((name for name in names if depth[name] == level), key=pull))
    return layers


def _box(name: str, x: float, y: float) -> str:
    text = f'<text x="{x + WIDTH / 2:g}" y="{y + HEIGHT / 2 + 4:g}">{html.escape(name)}</text>'
    return f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>{text}'


def _arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    x, to_x, y = x + WIDTH / 2, to_x + WIDTH / 2, y + HEIGHT
    middle = (y + to_y) / 2
    return f'<path d="M{x:g} {y:g}C{x:g} {middle:g} {to_x:g} {middle:g} {to_x:g} {to_y - 2:g}"/>'


def spaced_lists(markdown: str) -> str:
    """Add the blank line that Python-Markdown needs before a list that follows a paragraph; GitHub needs none."""
    lines: list[str] = []
    inside = False  # a code block
    for line in markdown.split("\n"):
        if not inside and LIST_ITEM.match(line) and lines and lines[-1].strip() and not BELONGS.match(lines[-1]):
            lines.append("")
        inside ^= line.lstrip().startswith("```")
        lines.append(line)
    return "\n".join(lines)
