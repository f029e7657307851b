"""Your own availability trace: write it as CSV, look at it, train on it, and share a synthetic twin instead of the trace.

A trace has one row per interval: `client,start,end,period`, in seconds. A device that is never available has one row with empty times.

python examples/own_trace.py
"""

import tempfile
from pathlib import Path
from typing import Any

import mimicfl as mf

HOUR = 3600
DAY = 24 * HOUR


def record(file: Path) -> None:
    """Forty phones over two days: most charge for some hours at night, at different times; every fifth is never available."""
    lines = ["client,start,end,period"]
    for phone in range(40):
        if phone % 5 == 4:
            lines.append(f"phone{phone},,,{2 * DAY}")
            continue
        for day in range(2):
            start = day * DAY + (phone * 13 % 60) / 10 * HOUR
            lines.append(f"phone{phone},{start:.0f},{start + HOUR + 300 * (phone % 7):.0f},{2 * DAY}")
    file.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "phones.csv"
        record(file)
        trace = mf.availability.read_trace(file)
        twin = mf.availability.twin(trace, seed=0)
        mf.availability.write_trace(twin, file.with_name("twin.csv"))
        print(f"{len(trace)} phones, available {100 * trace.duty.mean():.1f} % of the time, {trace.never.sum()} never")
        print(f"the twin: available {100 * twin.duty.mean():.1f} %, {twin.never.sum()} never")
        common: dict[str, Any] = {"num_clients": 30, "rounds": 144, "epochs": 1, "speed": "lognormal:50,0.5", "eval_every": 12}
        patterns = {"trace": f"trace:{file},round=600", "twin": f"trace:{folder}/twin.csv,round=600"}
        for algorithm in ("fedavg", "mimic"):
            for name, availability in patterns.items():
                history = mf.run(mf.Experiment(algorithm=algorithm, availability=availability, **common))
                hours = history.rows[-1]["virtual_seconds"] / HOUR
                print(f"{algorithm:7} {name:5} {100 * history.rows[-1]['test_accuracy']:.1f} % after {hours:.1f} virtual hours")
