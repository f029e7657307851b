"""Downloads with a progress bar and timeouts. A failed download leaves no partial file."""

import io
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
from pathlib import Path

from ..errors import UsageError

TIMEOUT = 30  # seconds without data before a download fails
CHUNK = 1 << 16


def cache_dir() -> Path:
    """Return the folder for verified datasets and compiled code: $MIMICFL_CACHE, else mimicfl in the user's cache folder."""
    try:
        if named := os.environ.get("MIMICFL_CACHE"):
            return Path(named).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mimicfl"
    except RuntimeError as error:  # unknown user, or a user without a home folder
        raise UsageError(f"the cache folder cannot be found ({error}); set MIMICFL_CACHE to an existing folder") from None


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def http(address: str, target: Path) -> Path:
    """Download one file to `target`. The file appears there only when it is complete."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    partial = target.with_name(target.name + ".part")
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT) as reply, partial.open("wb") as file, Progress(*columns) as bar:
            size = int(reply.headers.get("Content-Length") or 0)
            task = bar.add_task(target.name, total=size or None)
            while chunk := reply.read(CHUNK):
                file.write(chunk)
                bar.advance(task, len(chunk))
        if size and partial.stat().st_size != size:
            raise OSError(f"{address} ended after {partial.stat().st_size} of {size} bytes")
        partial.replace(target)
    except urllib.error.HTTPError as error:
        with error:  # it holds the connection, which Python 3.14 wants closed
            raise OSError(f"{address} cannot be downloaded ({error.code} {error.reason})") from None
    finally:
        partial.unlink(missing_ok=True)
    return target


def by_command(command: list[str], folder: Path, pattern: str) -> Path:
    """Run a download command of a package manager in `folder` and return the downloaded file."""
    if shutil.which(command[0]) is None:
        raise OSError(f"{command[0]} is not installed")
    say(f"running: {' '.join(command)}")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    found = sorted(folder.glob(pattern))
    if done.returncode or not found:
        last = (done.stderr.strip().splitlines() or ["no file was downloaded"])[-1]
        raise OSError(f"{' '.join(command)} failed: {last}")
    return found[0]


def unpack_deb(package: Path) -> dict[str, bytes]:
    """Return the files of a Debian package (a tar.xz inside an ar archive) by base name, using only the standard library."""
    content = package.read_bytes()
    position = 8  # after the magic "!<arch>\n"
    while position + 60 <= len(content):
        header = content[position : position + 60]
        name, size = header[:16].decode().strip().rstrip("/"), int(header[48:58])
        start = position + 60
        if name.startswith("data.tar"):
            raw = content[start : start + size]
            with tarfile.open(fileobj=io.BytesIO(lzma.decompress(raw) if name.endswith(".xz") else raw)) as tar:
                return {Path(m.name).name: tar.extractfile(m).read() for m in tar.getmembers() if m.isfile()}  # type: ignore[union-attr]
        position = start + size + size % 2
    raise OSError(f"{package} contains no data archive")
