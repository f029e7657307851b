"""Workers as Ray actors: messages go to the worker that holds the clients' samples; the messages of a lost worker go to another one."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...data.clients import Clients
from ...data.samples import mapped, rows
from ...errors import UsageError
from .worker import Job, Reply, Setup, Worker, packed

MOST_DEATHS = 5  # of workers with the same message: then the message is the cause
START_S = 120  # how long the first workers may take to start
Notice = Callable[[str], None]


@dataclass(eq=False)
class Slot:
    """A worker, or one that is about to start in place of a lost one."""

    actor: Any
    ready: Any  # resolves when the worker has its first samples
    held: set[int]  # clients whose samples it has


class Pool:
    """A fixed number of workers. One that is lost is started again wherever the cluster has room.

    groups    the clients with the same number modulo `groups` usually train together, so a worker gets the samples of whole groups
    """

    def __init__(self, ray: Any, setup: Setup, clients: Clients, groups: int, workers: int, notice: Notice) -> None:
        self.ray, self.clients, self.notice = ray, clients, notice
        _send_by_value(ray, setup)
        self.setup = ray.put(setup)
        self.remote = ray.remote(num_cpus=1, num_gpus=int(clients.device.type == "cuda"), max_restarts=0)(Worker)
        homes = (np.arange(len(clients)) % groups) % workers
        self.home = [np.flatnonzero(homes == number).tolist() for number in range(workers)]
        self.slots = [self._start(number) for number in range(workers)]
        started, _ = ray.wait([slot.ready for slot in self.slots], num_returns=workers, timeout=START_S)
        if not started:
            raise UsageError(f"no worker of the Ray cluster started within {START_S} s: its nodes are busy")
        for ref in started:
            self._get(ref)  # what fails here fails on every worker

    def _start(self, number: int) -> Slot:
        actor, home = self.remote.remote(self.setup), self.home[number]
        return Slot(actor, actor.hold.remote(*self._samples(home)), set(home))

    @property
    def size(self) -> int:
        return len(self.slots)

    def put(self, value: Any) -> Any:
        """A reference to a value that Ray sends to a node once, however many workers read it there."""
        return self.ray.put(value)

    def run(self, work: dict[int, tuple[Sequence[Job], Sequence[Any]]]) -> dict[int, list[Reply]]:
        """The replies to messages (jobs, and references to their models), by number; a message goes to the worker of its number."""
        found: dict[int, list[Reply]] = {}
        deaths = dict.fromkeys(work, 0)
        going = {ref: (number, slot) for number in work for ref, slot in [self._submit(number, *work[number])]}
        while going:
            [ref], _ = self.ray.wait(list(going), num_returns=1)
            number, slot = going.pop(ref)
            try:
                found[number] = self._get(ref)
            except self.ray.exceptions.RayError as error:  # the worker, or its machine, is gone
                deaths[number] += 1
                if deaths[number] == MOST_DEATHS:
                    clients = sum(len(job.active) for job in work[number][0])
                    raise UsageError(f"{MOST_DEATHS} workers died with the same {clients} clients ({type(error).__name__})") from None
                self._replace(slot)
                ref, slot = self._submit(number, *work[number])
                going[ref] = number, slot
        return found

    def close(self) -> None:
        """End the workers, so that others can use their places in the cluster."""
        for slot in self.slots:
            self.ray.kill(slot.actor)

    def _submit(self, number: int, jobs: Sequence[Job], models: Sequence[Any]) -> tuple[Any, Slot]:
        slot = self._choose(number)
        new = sorted({int(client) for job in jobs for client in job.active} - slot.held)
        slot.held |= set(new)
        return slot.actor.train.remote(jobs, self._samples(new) if new else None, *models), slot

    def _choose(self, number: int) -> Slot:
        """The worker of this number, or another one if it has not started; if none has, it is waited for."""
        own = number % len(self.slots)
        order = self.slots[own:] + self.slots[:own]
        started, _ = self.ray.wait([slot.ready for slot in order], num_returns=len(order), timeout=0)
        return next((slot for slot in order if slot.ready in started), order[0])

    def _samples(self, numbers: list[int]) -> tuple[list[int], Any, Any]:
        """These clients with their samples."""
        index = np.concatenate([np.arange(0), *(self.clients.split[client] for client in numbers)])
        where = torch.from_numpy(index).to(self.clients.device)
        x, y = (mapped(packed, rows(part, where)) for part in (self.clients.x, self.clients.y))  # type: ignore[arg-type]
        return numbers, x, y

    def _replace(self, lost: Slot) -> None:
        """Start a worker in place of a lost one; until it runs, the others do its work."""
        if lost in self.slots:
            self.notice("a worker was lost: its clients train on another one")
            self.ray.kill(lost.actor)  # in case it is only out of reach
            number = self.slots.index(lost)
            self.slots[number] = self._start(number)

    def _get(self, ref: Any) -> Any:
        try:
            return self.ray.get(ref)
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else RuntimeError(str(error)) from None


def _send_by_value(ray: Any, setup: Setup) -> None:
    """Send the code of classes that workers cannot import, such as those of plugins, along with the objects."""
    parts = [*setup.model.modules(), setup.loss, setup.clients.data.transform, setup.clients.data.loss, setup.clients.data.task]
    for name in {getattr(part, "__module__", None) or type(part).__module__ for part in parts}:
        if name in sys.modules and name.startswith("mimicfl_plugin_"):
            ray.cloudpickle.register_pickle_by_value(sys.modules[name])
