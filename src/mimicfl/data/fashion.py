"""Fashion-MNIST: 60,000 + 10,000 images of clothes, 28x28, ten classes (MIT licence)."""

import gzip
import hashlib
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..errors import UsageError
from .download import by_command, http, unpack_deb

# MD5 of the decompressed files, since gzip headers differ between distributions.
FILES = {
    "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
}
ARRAYS = {"x_train": 0, "y_train": 1, "x_test": 2, "y_test": 3}
ADDRESSES = [
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
]
FACTS = {"mean": (0.2860,), "std": (0.3530,)}
COMMANDS = [
    "mimicfl data fetch fmnist                          # tries all of the following",
    "apt-get install dataset-fashion-mnist              # Debian, Ubuntu",
    "mimicfl data fetch fmnist --path FOLDER            # a folder with the four idx files, .gz or not",
]


def places(path: Path | None) -> Iterator[Path]:
    """Yield the folders that may already hold the four files."""
    roots = [path] if path else [Path("data"), Path.home() / "data"]
    for root in roots:
        yield from (root, root / "FashionMNIST" / "raw", root / "raw")
    if not path:
        yield Path("/usr/share/datasets/fashion-mnist")


def read(folder: Path) -> dict[str, np.ndarray] | None:
    """Read the four files of a folder as arrays; return None if one is missing."""
    found = [next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None) for name in FILES]
    if any(p is None for p in found):
        return None
    raw = {}
    for file, name in zip(found, FILES, strict=True):
        assert file is not None
        try:
            raw[name] = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        except (OSError, EOFError) as error:
            raise UsageError(f"{file} is damaged ({error}): delete it and run 'mimicfl data fetch fmnist'") from None
    return decode(raw, str(folder))


def decode(raw: dict[str, bytes], where: str) -> dict[str, np.ndarray]:
    for name, expected in FILES.items():
        if (found := hashlib.md5(raw[name]).hexdigest()) != expected:
            raise UsageError(f"{name} in {where} is not the official file (md5 {found}, expected {expected}): delete it and fetch again")
    x, y, tx, ty = (raw[name] for name in FILES)
    images = [np.frombuffer(b, np.uint8, offset=16).reshape(-1, 1, 28, 28) for b in (x, tx)]
    labels = [np.frombuffer(b, np.uint8, offset=8) for b in (y, ty)]
    return {"x_train": images[0], "y_train": labels[0], "x_test": images[1], "y_test": labels[1]}


def verify(arrays: dict[str, np.ndarray], where: str) -> None:
    """Check cached arrays against the official hashes, which include the idx headers."""
    for key, (name, expected) in zip(ARRAYS, FILES.items(), strict=True):
        a = arrays[key]
        header = struct.pack(">IIII", 2051, len(a), 28, 28) if a.ndim == 4 else struct.pack(">II", 2049, len(a))
        if hashlib.md5(header + a.tobytes()).hexdigest() != expected:
            raise UsageError(f"{where} is damaged (the part {name} has a wrong md5): delete it and run 'mimicfl data fetch fmnist'")


def from_debian() -> dict[str, np.ndarray]:
    with tempfile.TemporaryDirectory() as folder:
        package = by_command(["apt-get", "download", "dataset-fashion-mnist"], Path(folder), "*.deb")
        files = unpack_deb(package)
        return decode({name: gzip.decompress(files[f"{name}.gz"]) for name in FILES}, package.name)


def from_web() -> dict[str, np.ndarray]:
    failures: list[str] = []
    for address in ADDRESSES:
        with tempfile.TemporaryDirectory() as folder:
            try:
                raw = {name: gzip.decompress(http(f"{address}{name}.gz", Path(folder) / name).read_bytes()) for name in FILES}
                return decode(raw, address)
            except (OSError, EOFError) as error:
                failures.append(str(error))
    raise OSError("; ".join(failures))


FETCHERS = {"the Debian package": from_debian, "the public address": from_web}
