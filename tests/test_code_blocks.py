"""Every code block of the documentation works.

`python` and `bash` blocks run, page by page, in the order of the page and in one new folder, each as a whole, as if pasted. A block whose
first line names a file, such as `# grid.toml`, is written to that file first. `console` blocks need a network, a GPU, other machines or
many minutes: their mimicfl commands must parse. Settings must be valid.
"""

import contextlib
import io
import re
import shlex
import shutil

import pytest

from mimicfl.cli.main import parser
from mimicfl.experiments.grid import read_sweep
from mimicfl.settings import read_toml
from tests.conftest import ROOT
from tests.pages import PAGES, all_blocks, blocks, name_of, run

LANGUAGES = {"python", "bash", "console", "toml", "text", "mermaid", "bibtex", "sh", "ini", ""}
LONG = {"docs/results.md"}  # its commands take minutes; they are parsed instead
DATED = {page for page in PAGES if ROOT / "records" in page.parents} | {ROOT / "CHANGELOG.md"}  # what was true on their day
FILE = re.compile(r"(?:#!.*\n)?# ([\w-]+\.\w+)\b")
SLURM = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_CPUS_PER_TASK": "1"}  # for the job scripts


def runs(page):
    return page not in DATED and name_of(page) not in LONG and any(word in ("python", "bash") for word, _ in all_blocks(page))


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if runs(page)], ids=name_of)
def test_blocks_run(page, tmp_path):
    if ROOT / "examples" in page.parents:  # its commands run beside the files that it explains
        shutil.copytree(page.parent, tmp_path, dirs_exist_ok=True)
    for number, (language, text) in enumerate(all_blocks(page)):
        named = FILE.match(text)
        file = tmp_path / (named[1] if named else f"block{number}.{language}")
        if language in ("python", "toml") or named:
            file.write_text(text)
        if language == "python":
            run(["python", file.name], tmp_path)
        elif language == "bash" and text.startswith("#!"):
            run(["bash", "-e", file.name], tmp_path, **SLURM)
        elif language == "bash":
            run(["bash", "-ec", "\n".join(line for line in text.splitlines() if not is_make(line))], tmp_path)


def is_make(line):
    """Whether a command is `make`, which is not run: its target must exist."""
    if line.startswith("make "):
        assert f"\n{line.split()[1]}:" in (ROOT / "Makefile").read_text(), line
    return line.startswith("make ")


def commands(page):
    """The commands of console blocks, and of pages whose commands take long."""
    texts = blocks(page, "console") + (blocks(page, "bash") if name_of(page) in LONG else [])
    lines = "".join(texts).replace("\\\n", " ").splitlines()
    return [shlex.split(line.removeprefix("$ ")) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page not in DATED and commands(page)], ids=name_of)
def test_other_commands_parse(page):
    for command in commands(page):
        if command[0] != "mimicfl":
            continue
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                parser().parse_args(command[1:])
        except SystemExit:
            pytest.fail(f"{shlex.join(command)}\n{said.getvalue()}")


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "toml")], ids=name_of)
def test_settings_are_valid(page, tmp_path):
    for text in blocks(page, "toml"):
        file = tmp_path / "settings.toml"
        file.write_text(text)
        if "[grid]" in text:
            assert read_sweep(file)
        else:
            read_toml(file)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_of_a_known_language(page):
    """A misspelt language would keep a block from being tested, and so would an indented or a tilde fence."""
    assert {word for word, _ in all_blocks(page)} <= LANGUAGES
    assert len(re.findall(r"^ *(?:```|~~~)", page.read_text(), re.MULTILINE)) == 2 * len(all_blocks(page))


def test_pages_of_all_folders_are_collected():
    names = set(map(name_of, PAGES))
    assert {"README.md", "docs/tutorials/sweep.md", "benchmarks/README.md", "records/benchmark/README.md"} <= names
    assert {name_of(page) for page in PAGES if runs(page)} >= {"README.md", "docs/averaged-models.md", "examples/flower_lora/README.md"}
