"""Ctrl-C pressed again and again: one sentence, exit code 130, never a traceback."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

PRESS = """
import atexit, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background inherit an ignored one
import mimicfl.cli.main as command
import mimicfl_command

def press(*_):
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):  # the interpreter raises KeyboardInterrupt between two instructions
        pass
"""


def pressing(rest):
    return subprocess.run([sys.executable, "-c", PRESS + rest], capture_output=True, text=True)


@pytest.mark.parametrize(("arguments", "code"), [(["data", "list"], 0), (["run", "--rounds", "none"], 2)])
def test_while_python_shuts_down(arguments, code):
    ended = pressing(f"atexit.register(press)\nsys.argv = ['mimicfl', *{arguments!r}]\nsys.exit(mimicfl_command.main())")
    assert ended.returncode == code
    assert "Traceback" not in ended.stderr


def test_a_second_interrupt_during_the_first():
    ended = pressing("command.main = press\nsys.exit(mimicfl_command.main())")
    assert ended.returncode == 130
    assert "Traceback" not in ended.stderr
    assert "stopped" in ended.stderr


def test_in_the_middle_of_training():
    """A KeyboardInterrupt inside a backward pass can make PyTorch abort, so the command ends at once."""
    ended = pressing("""
from mimicfl.engines.plain import PlainEngine
real = PlainEngine.train_one
def train_one(*given):
    try:
        press()
    except BaseException:
        print("raised in the middle", file=sys.stderr)
    return real(*given)
PlainEngine.train_one = train_one
import tempfile
with tempfile.TemporaryDirectory() as folder:
    sys.argv = ["mimicfl", "run", "--rounds", "2", "--engine", "plain", "--out", folder + "/run"]
    sys.exit(mimicfl_command.main())
""")
    assert ended.returncode == 130
    assert "stopped; resume with 'mimicfl resume" in ended.stderr
    assert "raised" not in ended.stderr
