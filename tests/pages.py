"""The pages of the documentation, their code blocks, and how commands on them are run."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests import fork_server
from tests.conftest import ROOT

MADE = {"build", "dist", "runs"}  # by programs
FOLDERS = [each for each in ROOT.iterdir() if each.is_dir() and not each.name.startswith(".") and each.name not in {"src", *MADE}]
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in folder.rglob("*.md"))])  # in src: templates of pages


def all_blocks(page):
    """The code blocks of a page in their order, as (language, text)."""
    return re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def blocks(page, language):
    """The code blocks of a page in one language."""
    return [text for word, text in all_blocks(page) if word == language]


def name_of(page):
    """A page's path in the repository, as the name of its test."""
    return page.relative_to(ROOT).as_posix()


def run(command, folder, **extra):
    """Run a command with default settings, including the engine, and return its output. `python` and `mimicfl` start by forking."""
    environment = {key: value for key, value in os.environ.items() if key != "MIMICFL_ENGINE"}
    path = [str(fork_server.programs()), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment |= {"OMP_NUM_THREADS": "1", "PATH": os.pathsep.join(path)} | extra
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, shell=isinstance(command, str))
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout
