"""The public names of the package that have a place in the reference, found without importing it."""

import ast
import re
from pathlib import Path

MARK = re.compile(r"<!-- all of (\w+) -->")
REST = "<!-- everything else -->"  # public names that no section of the page lists
ENTRY = re.compile(r"^::: mimicfl\.(?:\w+\.)*(\w+)$", re.MULTILINE)


def with_exports(markdown: str, source: Path) -> str:
    """Replace each mark by entries for the names that it stands for, unless the page lists them already."""
    named = {"availability": "participation"}
    if REST in markdown:
        listed = {*ENTRY.findall(markdown), *MARK.findall(markdown)}
        rest = {name: path for name, path in exported(source / "_public.py", "mimicfl").items() if named.get(name, name) not in listed}
        packages = {name for name in rest if (source / name / "__init__.py").exists()}
        marks = [f"<!-- all of {name} -->" if name in packages else f"::: {path}" for name, path in rest.items()]
        markdown = markdown.replace(REST, "\n".join(marks))

    def entries(match: re.Match[str]) -> str:
        listed = set(ENTRY.findall(markdown))
        found = exported(source / match[1] / "__init__.py", f"mimicfl.{match[1]}")
        return "\n".join(f"::: {path}" for name, path in found.items() if name not in listed)

    return MARK.sub(entries, markdown)


def exported(file: Path, package: str) -> dict[str, str]:
    """Each name of a file's `__all__` that is a class, a function or a module, and where it is defined."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    [public] = [node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"]
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    origin = {alias.asname or alias.name: (node.module, alias.name) for node in imports for alias in node.names}
    found = {}
    for name in ast.literal_eval(public):
        module, own_name = origin.get(name, (None, name))
        if module is None:  # a module
            found[name] = f"{package}.{own_name}"
        elif _defines(file.parent / module.replace(".", "/"), own_name):
            found[name] = f"{package}.{module}.{own_name}"
    return found


def _defines(path: Path, name: str) -> bool:
    """Is the name a module in this folder, or a class or a function of this module?"""
    if path.is_dir():
        return (path / f"{name}.py").exists() or bool(re.search(rf"\b{name}\b", (path / "__init__.py").read_text(encoding="utf-8")))
    return re.search(rf"^(?:class|def) {name}\b", path.with_suffix(".py").read_text(encoding="utf-8"), re.MULTILINE) is not None
