"""The suite that federated simulators are measured on, for mimicfl and others: us of wall time per client-step, medians with spread.

    python benchmarks/suite.py --device cuda --minutes 6     # our engines and a bare loop, on a GPU

Every workload is defined once, in peers/workload.py, on synthetic data of the right shape. A fast engine is compared with plain before it
is timed. What fails is a line of the table with its reason. The results go to suite-DEVICE.json and suite-DEVICE.md in the folder --out.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peers.workload import GPU

from mimicfl.metrics.environment import environment

HERE = Path(__file__).parent
PASSES = ("bare,plain,batched,streams", "compiled,compiled-streams")  # compiling takes long: it comes last
Found = dict[str, Any]


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
            case, names = begun.split(":")
            title, precision = case.split("/")
            yield {"case": title, "precision": precision, "engine": names, "error": f"its process ended with {child.returncode}"}
        if not begun:
            raise SystemExit(f"{' '.join(command[:3])} did not start: see the error above")
    for word in waiting:
        yield dict(zip(("case", "precision", "engine"), word.replace("/", ":").split(":"), strict=True)) | {"error": "no time left"}


def table(found: list[Found], titles: dict[str, str]) -> str:
    """One Markdown table: a row per workload, precision and engine."""
    bare = {(each["case"], each.get("precision")): each["us"] for each in found if each["engine"] == "bare" and "us" in each}
    columns = ["workload", "precision", "engine", "us per client-step", "lowest-highest", "faster than bare", "off from plain"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for each in sorted(found, key=lambda each: (list(titles).index(each["case"]), each.get("precision", ""))):
        key = (each["case"], each.get("precision"))
        begin = f"| {titles[each['case']]} | {each.get('precision', '')} | {each['engine']} |"
        if "error" in each:
            lines.append(f"{begin} {each['error'].replace('|', '/')} | | | |")
            continue
        ratio = f"{bare[key] / each['us']:.1f}x" if key in bare else ""
        lines.append(f"{begin} {each['us']:.1f} | {each['low']:.1f}-{each['high']:.1f} | {ratio} | {each.get('off', 0.0):.0e} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--minutes", type=float, default=60, help="begin no further case after this time")
    parser.add_argument("--only", nargs="+", default=[], help=f"workloads: {', '.join(GPU)} on a GPU")
    parser.add_argument("--engines", nargs="+", default=list(PASSES), help="engines to time, one comma-separated list per pass")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the JSON and the Markdown table")
    options = parser.parse_args()
    here = {key: value for key, value in environment().items() if key != "started"}
    print(here, flush=True)
    found = []
    for each in on_gpu(options.device, options.only or list(GPU), options.engines, time.monotonic() + 60 * options.minutes):
        found.append(each)
        print(json.dumps(each), flush=True)
        save(options.out, options.device, here, found)
    print(table(found, {name: work.title for name, (work, _) in GPU.items()}))


def save(out: Path, device: str, here: Found, found: list[Found]) -> None:
    """Written after every result, so that nothing is lost if the suite is stopped."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"suite-{device}.json").write_text(json.dumps({"environment": here, "results": found}, indent=1) + "\n")
    text = table(found, {name: work.title for name, (work, _) in GPU.items()})
    (out / f"suite-{device}.md").write_text(f"{json.dumps(here)}\n\n{text}\n")


if __name__ == "__main__":
    main()
