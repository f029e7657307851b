"""`python -m soak.worker MODULE SEED SECONDS TRIALS FOLDER OUTCOMES`: one process of a part, which writes its outcomes as lines of JSON."""

import dataclasses
import importlib
import json
import os
import sys
import time
from pathlib import Path


def main(module: str, seed: str, seconds: str, trials: str, folder: str, outcomes: str) -> None:
    """Run trials until the time limit or the number of trials is reached; 0 means no limit."""
    limit = time.monotonic() + float(seconds) if float(seconds) else float("inf")
    most, done = int(trials) or sys.maxsize, 0

    def enough() -> bool:
        return done >= most or time.monotonic() >= limit

    place = Path(folder).resolve()
    place.mkdir(parents=True, exist_ok=True)
    os.environ |= {"MIMICFL_CACHE": str(place / "cache"), "HOME": str(place)}  # the user's files are neither read nor written
    part = importlib.import_module(module)
    with open(outcomes, "a", encoding="utf-8", errors="backslashreplace") as file:
        for outcome in part.trials(int(seed), enough, place):
            done += 1
            file.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
            file.flush()
            if done >= most:
                break


if __name__ == "__main__":
    main(*sys.argv[1:])
