"""`ClientMemory`: one vector per client, [N, d], allocated only for clients that have participated.

A round accesses only the rows of its active clients, so its cost does not depend on the population. The rows live on
the model's device as long as they fit the budget there, then in host memory, then in a memory-mapped file.
"""

import contextlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UsageError, number, shown
from ..files import explained
from .client_numbers import on_device, on_host

SHARE = 0.5  # of the free memory, if no budget is given
LARGE, PART = 1 << 23, 1 << 20  # numbers: more than LARGE are processed in parts of PART, which stay in the cache
FIRST = 16  # rows allocated first; the number doubles whenever they are used up


@dataclass(frozen=True)
class Budget:
    """Bytes of per-client state on the device and in host memory; the rest is kept in a file in `folder`."""

    device: int | None = None  # None: half of the free memory
    host: int | None = None
    folder: Path | None = None  # None: the system's folder for temporary files

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """`auto`, `4` (GiB on the device, or in host memory where that is the device), or `4,16` (GiB there and in host memory)."""
        parts = [part.strip() for part in text.split(",")] if isinstance(text, str) else []
        if parts == ["auto"]:
            return cls()
        try:
            sizes = [int(number("state_budget", float(part), low=0) * 2**30) for part in parts]
        except ValueError:
            sizes = []
        if len(sizes) not in (1, 2):
            raise UsageError(
                f"state_budget must be a string: 'auto', GiB on the device ('4'), or GiB on device and host ('4,16'), got {shown(text)}"
            )
        return cls(sizes[0], sizes[-1])

    def place(self, bytes_needed: int, device: torch.device) -> str:
        """Where this many bytes fit: "device", "host" or "file"."""
        if device.type == "cuda":
            free = SHARE * torch.cuda.mem_get_info(device)[0] if self.device is None else self.device
            if bytes_needed <= free:
                return "device"
        return "host" if bytes_needed <= (SHARE * free_memory() if self.host is None else self.host) else "file"


@dataclass
class _Found:
    """Where the rows of some clients lie."""

    who: Any  # the clients as they were given
    count: int  # how many clients had rows
    shape: tuple[int, ...]
    clients: np.ndarray  # [m]
    slots: np.ndarray  # [m] negative where a client has none
    missing: np.ndarray | None  # bool [m]: the clients without a row; None if all have one
    places: Tensor | None = None  # the slots on the device


class ClientMemory:
    """Read `rows[active]` and write `rows[active] = values`, clients unique; a client never written has a row of zeros."""

    def __init__(self, w: Tensor, num_clients: int) -> None:
        self.device, self.dtype, self.d = w.device, w.dtype, w.numel()
        self.slot = np.full(num_clients, -1, dtype=np.int64)  # [N] where each client's row lies
        self.count = 0
        self.budget = Budget()
        self.where = "device" if w.device.type == "cuda" else "host"
        self.store = torch.zeros(0, self.d, dtype=self.dtype, device=self.device)
        self._last: _Found | None = None
        self.changed: set[int] = set()  # clients written since this was last cleared; incremental checkpoints clear it

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.slot), self.d

    def columns(self, clients: int) -> list[slice]:
        """The columns in parts, for an algorithm that processes many clients' rows part by part: they may exceed the cache."""
        if self.device.type != "cpu" or clients * self.d <= LARGE:
            return [slice(0, self.d)]
        width = max(PART // clients, 1024)
        return [slice(start, min(start + width, self.d)) for start in range(0, self.d, width)]

    def __getitem__(self, who: Any) -> Tensor:
        """`rows[active]` is [m, d], `rows[3]` is [d], `rows[:]` is [N, d]; `rows[active, columns]` is a part of them."""
        who, columns = who if isinstance(who, tuple) else (who, None)
        at, store = self._at(who), self.store if columns is None else self.store[:, columns]
        if self.count == 0:
            found = torch.zeros(len(at.slots), store.shape[1], dtype=self.dtype, device=self.device)
        else:  # whole rows are copied, which is faster than indexing
            found = store.index_select(0, self._places(at)).to(self.device)
            if at.missing is not None:
                found.masked_fill_(torch.from_numpy(at.missing).to(self.device, non_blocking=True)[:, None], 0.0)
        return found if len(at.shape) == 1 else found.view(*at.shape, store.shape[1])

    def borrow(self, who: Any, columns: slice) -> Tensor:
        """`rows[who, columns]` to be changed and assigned back: the rows themselves where they lie one after the other, else a copy."""
        held = self._at(who).slots
        together = self.where != "file" and self.store.device == self.device and len(held) > 0 and held[0] >= 0
        if together and bool((np.diff(held) == 1).all()):
            return self.store[int(held[0]) : int(held[-1]) + 1, columns]
        return self[who, columns]

    def __setitem__(self, who: Any, values: Any) -> None:
        who, columns = who if isinstance(who, tuple) else (who, slice(0, self.d))
        at = self._at(who)
        self.changed.update(at.clients.tolist())
        if at.missing is not None:
            new = at.clients[at.missing]
            if self.count + len(new) > len(self.store):
                self._grow(self.count + len(new))
            self.slot[new] = np.arange(self.count, self.count + len(new))
            self.count += len(new)
            at = self._at(who)
        rows = torch.as_tensor(values, dtype=self.dtype).to(self.store.device)
        part = self.store[:, columns]
        if rows.data_ptr() == part[int(at.slots[0])].data_ptr() if len(at.slots) else True:
            return  # borrowed: the rows are already in place
        part.index_copy_(0, self._places(at), rows.expand(len(at.slots), part.shape[1]))

    def _at(self, who: Any) -> "_Found":
        """Where the rows of these clients lie. A round reads and writes the same ones, so the last answer is kept."""
        last = self._last
        if last is not None and last.who is who and last.count == self.count:
            return last
        given = np.arange(len(self.slot))[who] if isinstance(who, slice) else on_host(who)
        clients = given.reshape(-1)
        slots = self.slot[clients]
        missing = slots < 0
        found = _Found(who, self.count, given.shape, clients, slots, missing if missing.any() else None)
        self._last = found if hasattr(who, "known") else None  # a list or an array may be changed
        return found

    def _places(self, at: "_Found") -> Tensor:
        """The slots on the device of the store; where a client has none, the first."""
        if at.places is None or at.places.device != self.store.device:
            at.places = on_device(at.slots if at.missing is None else np.maximum(at.slots, 0), self.store.device)
        return at.places

    def _grow(self, needed: int) -> None:
        room = min(len(self.slot), max(FIRST, 2 * len(self.store), needed))
        nbytes = room * self.d * self.store.element_size()
        self.where = self.budget.place(nbytes, self.device)
        if self.where == "file":
            store = _mapped(self.budget.folder, room, self.d, self.dtype)
        else:
            store = torch.zeros(room, self.d, dtype=self.dtype, device=self.device if self.where == "device" else "cpu")
        store[: self.count] = self.store[: self.count]
        self.store = store

    def tensors(self) -> dict[str, Tensor]:
        """What is to be saved: the seen clients and their rows."""
        clients = np.empty(self.count, dtype=np.int64)
        seen = np.flatnonzero(self.slot >= 0)
        clients[self.slot[seen]] = seen
        return {"clients": torch.from_numpy(clients), "rows": self.store[: self.count]}

    def restore(self, clients: Tensor, rows: Tensor) -> None:
        self.slot[:], self.count, self._last = -1, 0, None
        if len(clients):
            self[clients] = rows


def _mapped(folder: Path | None, rows: int, d: int, dtype: torch.dtype) -> Tensor:
    """A tensor in an unlinked file: however the process ends, nothing is left behind."""
    where = Path(folder or tempfile.gettempdir())
    with explained(where / "(state of the clients)"), tempfile.TemporaryFile(dir=where, prefix=".rows-") as file:
        # Allocate now: writing to a hole of a sparse file on a full disk would kill the process.
        size = rows * d * torch.empty(0, dtype=dtype).element_size()
        os.posix_fallocate(file.fileno(), 0, size) if hasattr(os, "posix_fallocate") else file.truncate(size)
        flat = np.memmap(file, dtype=np.uint8, mode="r+")
    return torch.from_numpy(np.asarray(flat)).view(dtype).view(rows, d)


def free_memory() -> int:
    """Bytes of host memory that are available now."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 4 * 2**30
