"""`mimicfl flower new DIR`: writes a small working app, from the files in `template/`."""

import re
import string
from importlib import resources
from pathlib import Path

from ..errors import UsageError
from ..files import explained, write_text

FILES = {
    "pyproject.toml.txt": "pyproject.toml",
    "README.md.txt": "README.md",
    "try_it.py.txt": "try_it.py",
    "init.py.txt": "{package}/__init__.py",
    "task.py.txt": "{package}/task.py",
    "client_app.py.txt": "{package}/client_app.py",
    "server_app.py.txt": "{package}/server_app.py",
}


def new_app(folder: str | Path) -> Path:
    """Write an app to a new or empty folder and return its path. The app is named after the folder.

    Raises `UsageError` if the folder is not empty or its name is not usable as a package name.
    """
    target = Path(folder).resolve()
    package = re.sub(r"\W+", "_", target.name.lower()).strip("_")
    if not package.isidentifier():
        raise UsageError(f"{target.name!r} cannot name a Python package; choose a folder name that starts with a letter")
    if package in ("mimicfl", "flwr", "torch", "test", "tests"):
        raise UsageError(f"an app named {package!r} would hide the package of that name; choose another folder name")
    with explained(target):
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UsageError(f"{target} is not empty; choose a new folder")
        (target / package).mkdir(parents=True)
    for source, name in FILES.items():
        text = resources.files(__package__).joinpath("template", source).read_text(encoding="utf-8")
        filled = string.Template(text).substitute(name=package.replace("_", "-"), package=package)
        write_text(target / name.format(package=package), filled)
    return target
