"""The compile cache is private, checks every library before loading it, and removes the files of killed compiles."""

import fcntl
import os
import signal
import stat
import subprocess
import sys
import threading
import time

import pytest

import mimicfl as mf
from mimicfl.data.download import cache_dir
from mimicfl.engines.native import Unsupported, build, cache
from mimicfl.errors import UsageError
from tests.engines.native.problems import needs_compiler

pytestmark = needs_compiler
SOURCE = 'extern "C" int update() { return 1; }\n'
EVIL = 'extern "C" int update() { return 666; }\n'


@pytest.fixture(autouse=True)
def _private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MIMICFL_CACHE", str(tmp_path / "cache"))


def plant(content, mode=0o700):
    """Replace the library of SOURCE by other content."""
    target = build.library(SOURCE)
    target.unlink()
    target.write_bytes(content)
    target.chmod(mode)
    return target


@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_foreign_library_is_replaced(mode):
    evil = build.library(EVIL).read_bytes()
    target = plant(evil, mode)
    assert build.load(SOURCE).update() == 1
    assert target.read_bytes() != evil
    assert stat.S_IMODE(target.stat().st_mode) & 0o077 == 0


def test_valid_library_that_others_can_write_is_replaced():
    """Others could change it between the check and the loading."""
    target = build.library(SOURCE)
    target.chmod(0o722)
    assert build.load(SOURCE).update() == 1
    assert stat.S_IMODE(target.stat().st_mode) & 0o077 == 0


def test_library_of_another_owner_is_replaced(monkeypatch):
    target = build.library(SOURCE)
    made = target.stat().st_ino
    real = os.fstat

    def fstat(descriptor):
        info = real(descriptor)
        return os.stat_result([*info[:4], info.st_uid + 1, *info[5:]]) if stat.S_ISREG(info.st_mode) else info

    monkeypatch.setattr(os, "fstat", fstat)
    keep = target.open("rb")  # its inode is not reused while it is open
    assert build.load(SOURCE).update() == 1
    assert target.stat().st_ino != made
    keep.close()


def test_symbolic_link_is_not_followed(tmp_path):
    evil = build.library(EVIL)
    target = build.library(SOURCE)
    target.unlink()
    target.symlink_to(evil)
    assert build.load(SOURCE).update() == 1
    assert not target.is_symlink()
    assert evil.exists()


def test_pipe_in_place_of_the_library_is_replaced():
    target = build.library(SOURCE)
    target.unlink()
    os.mkfifo(target)
    assert build.load(SOURCE).update() == 1


def test_folder_in_place_of_the_library_is_refused():
    target = build.library(SOURCE)
    target.unlink()
    target.mkdir()
    with pytest.raises(Unsupported, match=r"cannot be used .* MIMICFL_CACHE"):
        build.load(SOURCE)


@pytest.mark.parametrize("damage", [lambda content: content + b"\0", lambda content: b"", lambda content: b"\x7fELF garbage"])
def test_damaged_library_is_compiled_again(damage):
    target = build.library(SOURCE)
    sound = target.read_bytes()
    plant(damage(sound))
    assert build.load(SOURCE).update() == 1
    assert target.read_bytes() == sound


def test_cache_folder_is_private(monkeypatch):
    library = build.library(SOURCE)
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700
    library.parent.chmod(0o777)
    before = os.umask(0o002)
    try:
        other = build.library(EVIL)
    finally:
        os.umask(before)
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(other.stat().st_mode) & 0o022 == 0
    library.parent.chmod(0o777)
    monkeypatch.setattr(os, "fchmod", lambda descriptor, mode: None)  # as on file systems without permissions
    with pytest.raises(Unsupported, match=r"chmod 700 .* MIMICFL_CACHE"):
        build.library(SOURCE)


def test_cache_folder_of_another_user_is_refused(monkeypatch):
    folder = build.library(SOURCE).parent
    mine = os.geteuid()
    folder.rename(folder.with_name(f"native-{mine + 1}"))
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(Unsupported, match="another user; set MIMICFL_CACHE"):
        build.load(SOURCE)


def test_cache_folder_that_is_a_link_is_refused(tmp_path):
    folder = build.library(SOURCE).parent
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Unsupported, match="symbolic link"):
        build.load(SOURCE)


def test_lock_file_that_is_a_link_does_not_truncate_its_target(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    library = build.library(SOURCE)
    library.unlink()
    (library.parent / f"{library.stem.split('-')[0]}.lock").unlink(missing_ok=True)
    (library.parent / f"{library.stem.split('-')[0]}.lock").symlink_to(victim)
    assert build.load(SOURCE).update() == 1
    assert victim.read_text() == "precious"
    (library.parent / cache.EVERY).unlink()
    (library.parent / cache.EVERY).symlink_to(victim)
    with pytest.raises(Unsupported, match="cannot be used"):
        build.library(EVIL)
    assert victim.read_text() == "precious"


def test_run_without_a_usable_cache_falls_back_with_a_remedy(tmp_path, monkeypatch, digits):
    (tmp_path / "file").write_text("")
    notices = []
    for place in (tmp_path / "file", "~no-such-user-anywhere/cache"):
        monkeypatch.setenv("MIMICFL_CACHE", str(place))
        mf.simulate(**digits, rounds=1, engine="native", notice=notices.append)
    assert all(text.startswith("engine plain: ") and "MIMICFL_CACHE" in text for text in notices)


def test_unknown_home_folder_is_a_usage_error(monkeypatch):
    monkeypatch.setenv("MIMICFL_CACHE", "~no-such-user-anywhere/cache")
    with pytest.raises(UsageError, match="set MIMICFL_CACHE"):
        cache_dir()


COMPILER = """#!/bin/sh
case "$*" in *-shared*) ;; *) exec {real} "$@" ;; esac
for output; do :; done
echo half > "$output"
echo $$ > {mark}.new
mv {mark}.new {mark}
exec sleep 1000
"""


def wait_until(happened):
    """Wait for an event of another process; the limit only ends a hanging test."""
    limit = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < limit, "it never happened"
        time.sleep(0.01)


@pytest.mark.slow
def test_files_of_a_killed_compile_are_removed_after_it_ended(tmp_path):
    folder = build.library(SOURCE).parent
    mark, fake = tmp_path / "started", tmp_path / "compiler"
    fake.write_text(COMPILER.format(real=build.compiler(), mark=mark))
    fake.chmod(0o755)
    program = f"from mimicfl.engines.native import build; build.library({SOURCE + '// killed'!r})"
    parent = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "CXX": str(fake)})
    wait_until(mark.exists)
    child = int(mark.read_text())
    try:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        [left] = folder.glob(".*.part")
        build.library(SOURCE + "// meanwhile")
        assert left.exists()  # the compiler outlived its parent and may still be writing
    finally:
        os.kill(child, signal.SIGKILL)
    with (folder / cache.EVERY).open("r+") as lock:
        wait_until(lambda: cache._try_lock(lock.fileno(), fcntl.LOCK_EX))
    build.library(SOURCE + "// afterwards")
    assert not left.exists()
    assert len(list(folder.glob("*.lock"))) == 2  # the common lock and the lock of the last compile


def test_concurrent_requests_compile_once(tmp_path, monkeypatch):
    """The second thread waits for the first and uses its library."""
    count = []
    real = build._compile
    monkeypatch.setattr(build, "_compile", lambda *given: count.append(1) or real(*given))
    barrier = threading.Barrier(2)
    found = []

    def request():
        barrier.wait()
        found.append(build.library(SOURCE + "// both"))

    threads = [threading.Thread(target=request) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 2
    assert count == [1]
