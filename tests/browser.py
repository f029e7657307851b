"""Headless Chromium for the tests of pages."""

import os
import shutil
import signal
import subprocess
import time

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian package: chromium)")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE = 120  # seconds in which a page is shown, on a busy machine


def chromium(address, folder, *options, budget=4000):
    """Open a page with a profile of its own, for a budget of virtual milliseconds, and return what Chromium prints.

    On a busy machine, Chromium sometimes prints everything and then never ends, so that it is killed once it has printed everything.
    """
    folder.mkdir(exist_ok=True)
    out, errors = folder / "printed.html", folder / "errors.txt"
    for attempt in range(4):
        profile = f"--user-data-dir={folder / f'profile{attempt}'}"
        command = [CHROMIUM, *FLAGS, f"--virtual-time-budget={budget}", profile, *options, address]
        with (
            out.open("wb") as first,
            errors.open("wb") as second,
            subprocess.Popen(command, stdout=first, stderr=second, start_new_session=True) as browser,
        ):
            limit = time.monotonic() + PATIENCE * (1 + attempt)
            while not (done := complete(out, errors)) and browser.poll() is None and time.monotonic() < limit:
                time.sleep(0.05)
            try:
                code = browser.wait(1 if done else 0)
            except subprocess.TimeoutExpired:
                os.killpg(browser.pid, signal.SIGKILL)
                code = 0 if done else None
        assert not code, errors.read_text(errors="replace")
        if code == 0:
            return out.read_text()
    raise AssertionError(f"Chromium did not end in {attempt + 1} attempts at {address}")


def complete(out, errors):
    """Whether Chromium has printed the whole page, or said that the screenshot is written."""
    return out.read_text(errors="replace").endswith("</html>\n") or "bytes written to file" in errors.read_text(errors="replace")
