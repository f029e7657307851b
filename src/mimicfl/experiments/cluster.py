"""A sweep on a Ray cluster: every worker trains a group of runs together, as on one machine.

Runs are described by their settings alone; data, models and schedules are built where they are needed. Workers that share the
file system write directly into the run folders; others send the folders back when their group is finished. A group whose worker died is
assigned to another worker and resumes from its checkpoints, or from the start if they are on another machine's disk.
"""

import json
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any

from ..engines.cluster.connect import connect, count_workers, import_ray
from ..errors import UsageError
from ..files import make_folder, replacing
from ..settings import from_dict
from .execute import Notice, Plan, build_all, groups, run_plan, split_finished

MOST_DEATHS = 5  # deaths of workers with the same group of runs: then the group is the cause


def run_plan_on(address: str, plan: Plan, out: str | Path, notice: Notice) -> None:
    """All runs of the plan on the cluster at `address` ("auto", "local", or a Ray address), each in its folder below `out`."""
    ray = import_ray()
    target = make_folder(Path(out).resolve())
    parts = _parts(plan, target)
    if not parts:
        return notice("all runs are already finished")
    token = target / f".sweep-{secrets.token_hex(8)}"
    token.touch()
    try:
        connect(ray, address)
        workers = count_workers(ray, next(iter(plan.values())).device)
        parts = _spread(parts, workers)
        notice(f"{sum(map(len, parts))} runs in {len(parts)} groups for {workers} workers")
        _hand_out(ray, parts, plan, target, token.name, notice)
    finally:
        ray.shutdown()
        token.unlink(missing_ok=True)
    return None


def _parts(plan: Plan, target: Path) -> list[list[str]]:
    """The unfinished runs, in groups that can train together; every mistake is found here, before any run starts."""
    _, waiting = split_finished(build_all(plan), target)
    return groups(waiting)


def _spread(parts: list[list[str]], workers: int) -> list[list[str]]:
    """Groups cut so that every worker has one, the largest first."""
    while len(parts) < workers and max(map(len, parts)) > 1:
        parts.sort(key=len)
        largest = parts.pop()
        middle = len(largest) // 2
        parts += [largest[:middle], largest[middle:]]
    return sorted(parts, key=len, reverse=True)


def _hand_out(ray: Any, parts: list[list[str]], plan: Plan, target: Path, token: str, notice: Notice) -> None:
    cuda = next(iter(plan.values())).device != "cpu"
    remote = ray.remote(num_cpus=1, num_gpus=int(cuda), max_retries=0)(work)
    deaths = dict.fromkeys(range(len(parts)), 0)
    failures: list[str] = []

    def submit(part: int) -> Any:
        settings = json.dumps({name: plan[name].to_dict() for name in parts[part]})
        return remote.remote(settings, str(target), token)

    going = {submit(part): part for part in range(len(parts))}
    while going:
        ready, _ = ray.wait(list(going), num_returns=1)
        part = going.pop(ready[0])
        try:
            failure, files = ray.get(ready[0])
        except ray.exceptions.RayTaskError as error:
            raise UsageError(f"a worker failed: {str(error).strip().splitlines()[-1]}") from None
        except ray.exceptions.RayError as error:  # the worker, or its machine, is gone
            deaths[part] += 1
            if deaths[part] == MOST_DEATHS:
                raise UsageError(
                    f"{MOST_DEATHS} workers died with the same {len(parts[part])} runs ({type(error).__name__}): stopped"
                ) from None
            notice(f"a worker died: its {len(parts[part])} runs are resumed by another")
            time.sleep(1.0)  # the system releases a dead process's locks with a delay
            going[submit(part)] = part
            continue
        for name, content in sorted(files.items(), key=lambda item: item[0].endswith("final.safetensors")):  # its presence means the end
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            with replacing(target / name) as file:
                file.write_bytes(content)
        failures += [failure] if failure else []
        notice(f"{len(parts[part])} runs finished, {len(going)} groups to go")
    if failures:
        raise UsageError("; ".join(failures))


def work(settings: str, out: str, token: str) -> tuple[str, dict[str, bytes]]:
    """On a worker: train a group. Returns a message if runs diverged, and the files if this machine does not share the sender's disk."""
    plan = {name: from_dict({k: v for k, v in own.items() if v is not None}, name) for name, own in json.loads(settings).items()}
    if (Path(out) / token).exists():
        return _run(plan, Path(out)), {}
    with tempfile.TemporaryDirectory() as folder:
        failure = _run(plan, Path(folder))
        files = {str(p.relative_to(folder)): p.read_bytes() for p in Path(folder).glob("**/*") if p.is_file() and p.name != ".lock"}
    return failure, files


def _run(plan: Plan, out: Path) -> str:
    try:
        run_plan(plan, out)
    except UsageError as error:
        return str(error)
    return ""
