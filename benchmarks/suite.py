"""The suite that federated simulators are measured on, for mimicfl and others: us of wall time per client-step, medians with spread.

    python benchmarks/suite.py                               # mimicfl, pfl-research, Flower and a bare loop on two CPU cores
    python benchmarks/suite.py --only lenet-3 lenet-30 --frameworks "mimicfl native" pfl
    python benchmarks/suite.py --processor-time --only cifar10-cnn --frameworks "mimicfl native" pfl   # on a busy machine
    python benchmarks/suite.py --device cuda --minutes 6     # our engines and a bare loop on a GPU

Every workload is defined once, in peers/workload.py, on synthetic data of the right shape. A fast engine is compared with plain before it
is timed. What fails is a line of the table with its reason. The results go to suite-DEVICE.json and suite-DEVICE.md in the folder --out.
Start-up, imports, compiling and a warm-up round are excluded for all.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peers.contestants import PACKAGES, contestants, measure, versions
from peers.workload import GPU, SUITE

from mimicfl.metrics.environment import environment

HERE = Path(__file__).parent
PASSES = ("bare,plain,batched,streams", "compiled,compiled-streams")  # compiling takes long: it comes last
Found = dict[str, Any]


def on_cpu(cases: list[str], frameworks: list[str], repeats: int, deadline: float, processor_time: bool) -> Iterator[Found]:
    """Every framework in a process of its own, interleaved; a workload's results come after its last repeat."""
    chosen = {name: c for name, c in contestants(processor_time).items() if not frameworks or name.startswith(tuple(frameworks))}
    for case in cases:
        times: dict[str, list[float]] = {name: [] for name in chosen}
        errors: dict[str, str] = {}
        for _ in range(repeats):
            for name, command in chosen.items():
                if name in errors or time.monotonic() > deadline:
                    continue
                try:
                    times[name] += measure(command, case, SUITE[case].rounds, processor_time)
                except RuntimeError as error:
                    errors[name] = str(error)
        for name, us in times.items():
            begin = {"case": case, "engine": name}
            yield begin | (summary(us) if us else {"error": errors.get(name, "no time left")})


def summary(us: list[float]) -> Found:
    return {"us": statistics.median(us), "low": min(us), "high": max(us), "repeats": len(us)}


def on_gpu(device: str, cases: list[str], passes: list[str], deadline: float) -> Iterator[Found]:
    """Time our engines in a process of their own; if it dies, the next one continues with the next case."""
    waiting = [f"{case}/{precision}:{names}" for names in passes for case in cases for precision in GPU[case][1]]
    while waiting and time.monotonic() < deadline:
        begun = ""
        command = [sys.executable, str(HERE / "engine_times.py"), device, *waiting]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for line in child.stdout:
                kind, _, rest = line.strip().partition(" ")
                if kind == "BEGIN":
                    begun = rest
                    waiting.remove(begun)
                    if time.monotonic() > deadline:
                        child.kill()
                elif kind == "RESULT":
                    yield json.loads(rest)
        if child.returncode and begun:
            yield named(begun) | {"error": f"its process ended with {child.returncode}"}
        if not begun:
            raise SystemExit(f"{' '.join(command[:3])} did not start: see the error above")
    for word in waiting:
        yield named(word) | {"error": "no time left"}


def named(word: str) -> Found:
    """`lenet-3/fp32:bare,plain` as the columns of a line."""
    return dict(zip(("case", "precision", "engine"), word.replace("/", ":").split(":"), strict=True))


def table(found: list[Found], titles: dict[str, str]) -> str:
    """One Markdown table: a row per workload, precision and engine or framework, and how many times slower than ours each is."""
    best: dict[Any, float] = {}
    for each in found:
        key = (each["case"], each.get("precision"))
        if "us" in each and "bare" not in each["engine"] and (each["engine"].startswith("mimicfl") or key[1]):
            best[key] = min(each["us"], best.get(key, float("inf")))
    columns = ["workload", "precision", "engine", "us per client-step", "lowest-highest", "relative to our fastest", "off from plain"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for each in sorted(found, key=lambda each: (list(titles).index(each["case"]), each.get("precision", ""))):
        key = (each["case"], each.get("precision"))
        begin = f"| {titles[each['case']]} | {each.get('precision', 'fp32')} | {each['engine']} |"
        if "error" in each:
            lines.append(f"{begin} {each['error'].replace('|', '/')} | | | |")
            continue
        ratio = f"{each['us'] / best[key]:.1f}x" if key in best else ""
        off = f"{each['off']:.0e}" if each.get("off") else ""
        lines.append(f"{begin} {each['us']:.1f} | {each['low']:.1f}-{each['high']:.1f} | {ratio} | {off} |")
    return "\n".join(lines)


def save(out: Path, device: str, here: Found, found: list[Found]) -> str:
    """Write the results so far, so that nothing is lost if the suite is stopped; returns the table."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"suite-{device}.json").write_text(json.dumps({"environment": here, "results": found}, indent=1) + "\n")
    works = SUITE if device == "cpu" else {name: work for name, (work, _) in GPU.items()}
    text = table(found, {name: work.title for name, work in works.items()})
    (out / f"suite-{device}.md").write_text(f"{json.dumps(here)}\n\n{text}\n")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--minutes", type=float, default=60, help="begin nothing further after this time")
    parser.add_argument("--only", nargs="+", default=[], help=f"workloads: {', '.join(SUITE)}; on a GPU {', '.join(GPU)}")
    parser.add_argument("--frameworks", nargs="+", default=[], help="on the CPU: only names that begin with these")
    parser.add_argument("--repeats", type=int, default=2, help="on the CPU: processes per framework and workload")
    parser.add_argument("--engines", nargs="+", default=list(PASSES), help="on a GPU: engines, one comma-separated list per pass")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the JSON and the Markdown table")
    parser.add_argument("--processor-time", action="store_true", help="on the CPU: processor time, one process with one thread each")
    options = parser.parse_args()
    here = {key: value for key, value in environment().items() if key != "started"}
    deadline, text = time.monotonic() + 60 * options.minutes, ""
    if options.device == "cpu":
        peers = [name for name in PACKAGES if not options.frameworks or any(name in each.lower() for each in options.frameworks)]
        here |= {name: versions(name) for name in peers if not (options.processor_time and name == "flower")}
        results = on_cpu(options.only or list(SUITE), options.frameworks, options.repeats, deadline, options.processor_time)
    else:
        results = on_gpu(options.device, options.only or list(GPU), options.engines, deadline)
    print(json.dumps(here), flush=True)
    found: list[Found] = []
    for each in results:
        found.append(each)
        print(json.dumps(each), flush=True)
        text = save(options.out, options.device, here, found)
    print(text)


if __name__ == "__main__":
    main()
