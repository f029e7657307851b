"""Headless Chromium for the tests of pages."""

import os
import shutil
import signal
import subprocess

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
PATIENCE = 120  # seconds; on a busy machine, Chromium sometimes never ends, and then works at the second try


def chromium(address, folder, *options, budget=4000):
    """Open a page with a profile of its own, for a budget of virtual milliseconds, and return what Chromium prints."""
    for attempt in range(4):
        command = [
            CHROMIUM,
            *FLAGS,
            f"--virtual-time-budget={budget}",
            f"--user-data-dir={folder / f'profile{attempt}'}",
            *options,
            address,
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as browser:
            try:
                out, errors = browser.communicate(timeout=PATIENCE * (1 + attempt))
            except subprocess.TimeoutExpired:
                os.killpg(browser.pid, signal.SIGKILL)
                continue
        assert browser.returncode == 0, errors
        return out
    raise AssertionError(f"Chromium did not end in {attempt + 1} attempts at {address}")
