"""Finds the source files that importing plugins would run, without running them.

A finished sweep is repeated from its memo only if this code has not changed. A hash of the code does not cover everything that the result
may depend on, such as other libraries, environment variables or the clock. The code is therefore searched for names that may use them. If
one is found, the code is doubtful: the plugins are imported and every run is inspected. Unseeded random numbers are doubtful as well: the
inspection refuses runs that differ in every process. Files that Python itself opens are not doubtful, because they are recorded when the
plugins run (opened.py).
"""

import ast
import hashlib
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from ..fingerprint.installed import is_installed


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Except for the names in OUTSIDE, what these libraries return depends only on their arguments.
LIBRARIES = _words("""
    __future__ abc bisect collections contextlib copy csv dataclasses decimal enum fractions functools heapq io itertools json math mimicfl
    numbers numpy operator os pathlib random re statistics string sys tomllib torch types typing typing_extensions warnings
""")
BEFORE_PLUGINS = ("mimicfl", "numpy", "torch")  # imported before the plugins, whose files therefore cannot shadow them
# Built-in functions; `model.eval()` and `re.compile` are harmless.
FUNCTIONS = _words("__import__ breakpoint compile eval exec globals hash id input locals vars")
# Names with which code reads files that Python opens, which is recorded.
READS = _words("FileIO genfromtxt load loadtxt memmap open open_code open_memmap read_bytes read_text")
READABLE = re.compile(r"[^\s:,=]*\.(csv|json|jsonl|npy|npz|pt|pth|toml|tsv|txt)")  # libraries may open other files outside of Python
# Names with which code reads other files, the environment, the clock or the machine.
OUTSIDE = _words("""
    DataSource Explicit FileOpener FromFile FromTrace NpzFile PackageImporter PyTorchFileReader __builtins__ __dict__ __getattribute__
    __loader__ __spec__ __version__ argv attrgetter compare cpp_extension current_device cwd device_count environ environb exists
    expanduser expandvars export frame from_file fromfile fromregex get_device_capability get_device_name get_device_properties
    get_num_interop_threads get_num_threads getatime getctime getcwd getenv getmtime getsize get_type_hints glob home hub is_available
    is_dir is_file is_symlink isdir isfile islink iterdir jit lexists listdir load_file load_inline load_library load_state_dict_from_url
    load_url lstat make mem_get_info methodcaller read read_trace readlink rglob
    samefile scandir stat sweep walk
""")
SYSTEM = _words("_os _sys builtins os sys")  # only their `path` is harmless
CLOCK = _words("now today")  # np.datetime64("now")
# Packages of mimicfl that are not doubtful; others read runs and settings.
OF_MIMICFL = _words("algorithms callbacks clients errors registry seeds tasks theory")
PACKAGE = Path(__file__).parent.parent
# These draw the same numbers in every process if they get a seed; other names of modules called `random` are doubtful.
SEEDED = _words("Generator MT19937 PCG64 PCG64DXSM Philox Random RandomState SFC64 SeedSequence default_rng seed")
A_FILE = re.compile(r"\S*\.[A-Za-z]\w{0,7}")  # the code may join it to a path
OTHER_MODULES = (".pyc", ".so", ".pyd")  # modules without source


class Doubt(Exception):
    """The result may depend on more than the source files found."""


@dataclass(frozen=True)
class Code:
    files: dict[str, str] = field(default_factory=dict)  # a hash of every source file, by its path
    reads: bool = False  # may read other files


def plugin_code(plugins: Sequence[str]) -> Code | None:
    """The source files of the plugins; None if their results may depend on anything else."""
    try:
        own = [Path(name).resolve().parent for name in plugins if name.endswith(".py")]
        search = _Search(list(dict.fromkeys([*own, *(Path(each).resolve() for each in sys.path)])))
        for name in plugins:
            if name.endswith(".py"):
                search.read(Path(name).resolve(), package="")
            else:
                search.module(name)
    except (Doubt, OSError, SyntaxError, ValueError, RecursionError):
        return None
    return Code({str(file): content for file, content in sorted(search.found.items())}, search.reads)


def imported_as_found(code: Collection[str], earlier: Collection[str]) -> bool:
    """Whether the user's modules that were imported since `earlier`, a list of module names, are exactly those in `code`.

    A module that was imported before is doubtful: its file may have changed since. Files of plugins are imported again if they change.
    """
    for name, module in list(sys.modules.items()):
        file = _file_of(module)
        if file is None or is_installed(file) or name.partition(".")[0] in BEFORE_PLUGINS or module is sys.modules["__main__"]:
            continue
        known = str(file) in code
        if known == (name in earlier) and not (known and name.startswith("mimicfl_plugin_")):
            return False
    return True


def _file_of(module: ModuleType) -> Path | None:
    name = getattr(module, "__file__", None)
    return Path(name).resolve() if isinstance(name, str) else None


class _Search:
    def __init__(self, folders: list[Path]) -> None:
        self.folders = folders
        self.found: dict[Path, str] = {}
        self.reads = False

    def read(self, file: Path, package: str) -> None:
        """Add a source file and the modules of the user that it imports."""
        if file in self.found:
            return
        text = file.read_bytes()
        self.found[file] = hashlib.sha256(text).hexdigest()
        for node in _executed(ast.parse(text)):
            self.reads |= _check(node, [file.parent, Path.cwd()])
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.module(alias.name)
            elif isinstance(node, ast.ImportFrom):
                source = _absolute(node, package)
                self.module(source)
                for name in {alias.name for alias in node.names} - {"*"}:
                    self.module(f"{source}.{name}", optional=True)  # a name in the module, or a module

    def module(self, name: str, optional: bool = False) -> None:
        """Add the files of a module of the user: `a.b` runs a/__init__.py and a/b.py."""
        folders, parts = self.folders, name.split(".")
        for depth, part in enumerate(parts):
            if depth == 0 and part in LIBRARIES:
                if part == "mimicfl":
                    inner = set(parts[1:2]) - OF_MIMICFL
                    if any(_places(PACKAGE / each) for each in inner):
                        raise Doubt
                elif any(_places(folder / part) for folder in folders if not is_installed(folder)):
                    raise Doubt  # a file of the user with the name of a library
                return
            places = [place for folder in folders for place in _places(folder / part)]
            if not places and optional and depth == len(parts) - 1:
                return
            if len(places) != 1 or is_installed(places[0]):
                raise Doubt
            [place], package = places, ".".join(parts[: depth + 1])
            if place.is_dir():
                folders = [place]
                if (place / "__init__.py").is_file():
                    self.read(place / "__init__.py", package)
            else:
                folders = []
                self.read(place, package.rpartition(".")[0])


def _absolute(node: ast.ImportFrom, package: str) -> str:
    """The module that `from ..a import b` names."""
    parts = package.split(".") if package else []
    if node.level > len(parts):
        raise Doubt
    return ".".join([*parts[: len(parts) - node.level + 1 if node.level else 0], *filter(None, [node.module])])


def _places(path: Path) -> list[Path]:
    """The folder or file of a module at this path without ending."""
    endings = [each for each in path.parent.glob(f"{path.name}.*") if each.name.endswith(OTHER_MODULES)] if path.parent.is_dir() else []
    if endings or path.parent.is_file():  # no source, or an archive
        raise Doubt
    return [each for each in (path, path.with_name(f"{path.name}.py")) if (each.is_dir() if each == path else each.is_file())]


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those below `if __name__ == "__main__"`, which an import does not run."""
    pending = [tree]
    while pending:
        node = pending.pop()
        yield node
        main = isinstance(node, ast.If) and ast.unparse(node.test) in ("__name__ == '__main__'", "'__main__' == __name__")
        pending += node.orelse if main and isinstance(node, ast.If) else ast.iter_child_nodes(node)


def _check(node: ast.AST, folders: list[Path]) -> bool:
    """Whether this may read a file; refuses code that may depend on anything else, or that may do something else in every process."""
    if _unseeded(node) or any(_indirect(node, child) for child in ast.iter_child_nodes(node)):
        raise Doubt
    names: list[str] = []
    if isinstance(node, ast.Name):
        names = [node.id]
        if node.id in FUNCTIONS:
            raise Doubt
    elif isinstance(node, ast.Attribute):
        names = [node.attr]
        if (_last_name(node.value) in SYSTEM and node.attr != "path") or node.attr in SYSTEM:
            raise Doubt
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        names = [part for alias in node.names for part in alias.name.split(".")]
        narrow = any(alias.name in ("os", "sys") and alias.asname for alias in node.names)
        if narrow or (isinstance(node, ast.ImportFrom) and node.module in ("os", "sys") and names != ["path"]):
            raise Doubt
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        names = [node.value]
        readable = READABLE.fullmatch(node.value) is not None
        if node.value in CLOCK or (_names_a_file(node.value, folders) and not readable):
            raise Doubt
        if readable:
            return True
    if OUTSIDE & set(names):
        raise Doubt
    return bool(READS & set(names))


def _indirect(node: ast.AST, child: ast.AST) -> bool:
    """Can `child`, a part of `node`, reach a name that does not appear in the code? `getattr(os, "envi" + "ron")` reads the environment."""
    if not isinstance(child, ast.Name) or child.id not in (*SYSTEM, "getattr"):
        return False
    if child.id != "getattr":
        return not isinstance(node, ast.Attribute)
    spelt = isinstance(node, ast.Call) and node.func is child and len(node.args) > 1 and isinstance(node.args[1], ast.Constant)
    return not spelt


def _unseeded(node: ast.AST) -> bool:
    """Does this use random numbers that differ in every process?"""
    if isinstance(node, ast.Call):
        given = [value for value in (*node.args, *(each.value for each in node.keywords)) if ast.unparse(value) != "None"]
        return _last_name(node.func) in SEEDED and not given
    if isinstance(node, ast.Attribute):
        return _last_name(node.value) == "random" and node.attr not in SEEDED
    if isinstance(node, ast.ImportFrom) and (node.module or "").rpartition(".")[2] == "random":
        return not {alias.asname or alias.name for alias in node.names} <= SEEDED
    imported = node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else []
    return any(alias.name.rpartition(".")[2] == "random" and alias.asname not in (None, "random") for alias in imported)


def _last_name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _names_a_file(text: str, folders: list[Path]) -> bool:
    """Also as a part of a spec, such as "trace: phones.csv"."""
    parts = [part.strip(" \"'") for part in {text, *re.split("[:,=]", text)} if part.strip("./ \"'")]
    if any(A_FILE.fullmatch(part) for part in parts):
        return True
    try:
        return any((folder / part).exists() for folder in folders for part in parts)
    except (OSError, ValueError):  # too long, or with a NUL
        return False
