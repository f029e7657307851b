"""A worker process of the benchmark: reads batches as lines of JSON, trains them, and answers with their results."""

import json
import os
import queue
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TextIO

from ..errors import UsageError
from ..settings import from_dict
from .batch import train_batch


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else is printed must not mix with the answers
    sys.stdout = sys.stderr
    jobs: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(sys.stdin, jobs), daemon=True).start()
    while True:
        answers.write(_answer(jobs.get()) + "\n")
        answers.flush()


def _read(lines: TextIO, jobs: "queue.Queue[str]") -> None:
    """Pass on the jobs. If the input ends, nobody waits for answers any more: end at once, like a killed run."""
    for line in lines:
        jobs.put(line)
    os._exit(0)


def _answer(line: str) -> str:
    """The results of a batch, or why there are none, as a line of JSON."""
    try:
        job = json.loads(line)
        until = None if job["seconds"] is None else time.monotonic() + job["seconds"]
        plan = {name: from_dict(settings) for name, settings in job["runs"].items()}
        return json.dumps({"results": train_batch(plan, job["target"], Path(job["out"]), until)})
    except UsageError as error:
        return json.dumps({"error": str(error), "expected": True})
    except Exception:
        return json.dumps({"error": traceback.format_exc(), "expected": False})
