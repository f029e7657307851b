"""The drawings of docs/design.md, made from the code: which packages import which, and the path of `mimicfl compare`.

python docs/graph.py        # rewrites the drawings in docs/design.md
"""

import ast
import contextlib
import functools
import io
import os
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "mimicfl"
DESIGN = ROOT / "docs" / "design.md"
COMPARE = "compare --algorithms mimic --seeds 1 --rounds 2 --epochs 1 --clients 4 --engine plain --availability always"
# Where the path leads: functions of other modules are details.
PATH = ("cli.main", "cli.train", "experiments", "simulation", "problem", "algorithms.server", "algorithms.mimic", "engines.select")
PATH += ("engines.plain", "metrics.recorder", "report.report")
PROPERTIES = ("t", "w", "rounds", "due", "stopped", "fingerprint", "main")  # and the tracer's own start
Graph = dict[str, set[str]]


@functools.cache
def imports() -> Graph:
    """Which module imports which, including imports for types only and imports inside functions."""
    files = {_name(file): file for file in sorted(SOURCE.rglob("*.py"))}
    return {name: _imported(name, file, set(files)) for name, file in files.items()}


def _name(file: Path) -> str:
    parts = [*file.relative_to(SOURCE.parent).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(name: str, file: Path, known: set[str]) -> set[str]:
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = ".".join([*package[: len(package) - node.level + 1], *(node.module or "").split(".")]).rstrip(".")
            found |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names}
    return (found & known) - {name}


def package(module: str) -> str:
    """`mimicfl.engines.native.trace` belongs to the package `engines`."""
    return module.split(".")[1] if "." in module else "mimicfl"


def packages() -> Graph:
    found: Graph = {}
    for module, used in imports().items():
        found.setdefault(package(module), set()).update(package(other) for other in used)
    return {name: used - {name} for name, used in found.items()}


def cycle(graph: Graph) -> list[str]:
    """A cycle in the graph, or nothing."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for other in sorted(graph.get(node, ())):
            if found := visit(other, [*path, node]):
                return found
        done.add(node)
        return []

    return next((found for node in sorted(graph) if (found := visit(node, []))), [])


def drawn(graph: Graph) -> str:
    """The packages as a flowchart; imports that follow from others are left out."""
    small = {name for name in graph if (SOURCE / f"{name}.py").exists()} - {"problem", "plugins"} | {"mimicfl"}
    kept = {name: {other for other in used if other not in small} for name, used in graph.items() if name not in small}

    def reach(node: str) -> set[str]:
        return set().union(*[{other} | reach(other) for other in kept[node]])

    lines = [
        f"    {name} --> {other}"
        for name, used in sorted(kept.items())
        for other in sorted(used)
        if not any(other in reach(between) for between in used - {other})
    ]
    return "\n".join(["```mermaid", "flowchart TD", *lines, "```"])


def path_of_compare() -> str:
    """The functions that a small comparison calls, each where it is called first, indented by its caller."""
    import mimicfl.cli.train  # noqa: F401  (commands import their modules when they are called, which is not part of the path)
    from mimicfl.cli.main import main

    seen: set[str] = set()
    lines: list[str] = []
    stack: list[bool] = []

    def called(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            shown = _label(frame)
            fresh = shown is not None and shown not in seen
            if shown is not None and fresh:
                seen.add(shown)
                lines.append("    " * sum(stack) + shown)
            stack.append(bool(fresh))
        elif event == "return" and stack:
            stack.pop()

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        here = os.getcwd()
        os.chdir(folder)
        sys.setprofile(called)
        try:
            code = main(COMPARE.split())
        finally:
            sys.setprofile(None)
            os.chdir(here)
    assert code == 0
    return "\n".join(["```text", f"mimicfl {COMPARE}", "", *lines, "```"])


def _label(frame: FrameType) -> str | None:
    """`simulation.round_loop: round_loop`, for public functions of the modules on the path."""
    module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_qualname
    own = module.removeprefix("mimicfl.")
    if own == module or not any(own == part or own.startswith(f"{part}.") for part in PATH):
        return None
    if "<" in name or any(part.startswith("_") for part in name.split(".")) or name.rpartition(".")[2] in PROPERTIES:
        return None
    return f"{own}: {name}"


def with_drawings(text: str) -> str:
    """The text of docs/design.md with its drawings made anew."""
    for name, drawing in (("imports", drawn(packages())), ("compare", path_of_compare())):
        begin, end = f"<!-- {name}: made by docs/graph.py -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{drawing}\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    DESIGN.write_text(with_drawings(DESIGN.read_text(encoding="utf-8")), encoding="utf-8")
