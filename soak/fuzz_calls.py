"""Calls the Python API with valid and invalid arguments: each call must return a plausible result or raise `UsageError`."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from . import fuzz_folders
from .fuzz_arguments import Call, generate
from .outcome import Outcome
from .preload import preload
from .sandbox import Ended, forked, site
from .shrink import shrink

PART = "API calls"
PRELUDE = "from soak.prelude import *"
MISSING = re.compile(r"\(\) (missing \d+ required|got an unexpected keyword|takes \d+ positional)")  # Python's own messages about arguments


def trials(seed: int, enough: Callable[[], bool], folder: Path) -> Iterator[Outcome]:
    preload()
    fuzz_folders.templates(folder / "templates")
    shrunk: set[str] = set()
    while not enough():
        yield trial(seed, folder, shrunk)
        seed += 1


def trial(seed: int, folder: Path, shrunk: set[str]) -> Outcome:
    call = generate(Random(seed))
    verdict, detail = judge(call, folder)
    again = reproduction(call, folder, detail, shrunk) if verdict == "failed" else ""
    return Outcome(PART, verdict, seed, call.text[:300], detail, again, {call.name: 1})


def judge(call: Call, folder: Path) -> tuple[Any, str]:
    """Run the call; return the verdict and, for a failure, its kind and a description."""
    place = folder / "trial"
    _, strict = fuzz_folders.fresh(place, folder / "templates", call.runs, call.damage)
    ended = forked(lambda: answer(call, strict), place)
    kind = ended.trouble or _kind(ended, call)
    if kind:
        raised = ended.answer.get("raised", "") if isinstance(ended.answer, dict) else ""
        return "failed", f"{kind}\n{(raised or ended.err).strip()[-1000:]}".strip()
    return ("refused" if "refused" in ended.answer else "ok"), ""


def _kind(ended: Ended, call: Call) -> str:
    if not isinstance(ended.answer, dict):
        return "no answer"
    if "raised" in ended.answer:
        return f"raised {site(ended.answer['raised'])}"
    if "refused" in ended.answer:
        return "" if len(ended.answer["refused"].strip()) > 15 else "refused without a message"
    return f"accepted although wrong: {call.name}: {call.wrong}" if call.wrong else ended.answer.get("implausible", "")


def answer(call: Call, strict: bool) -> dict[str, Any]:
    """Evaluate the call in the child process and return its outcome."""
    import traceback

    import torch

    from mimicfl import UsageError

    from .fuzz_plausible import implausible

    names: dict[str, Any] = {}
    exec(PRELUDE, names)
    try:
        found = eval(call.text, names)
        torch.manual_seed(0)  # as at the end of the prelude
        again = eval(call.text, names) if call.twice else None
    except (UsageError, MemoryError) as error:
        return {"refused": str(error) or "out of memory: " + type(error).__name__}
    except Exception as error:
        own = error.__traceback__ and error.__traceback__.tb_next  # the frame of the call itself
        if isinstance(error, TypeError) and own is not None and (own.tb_next is None or MISSING.search(str(error))):
            return {"refused": f"Python itself: {error}"}  # a missing or unknown argument
        return {"raised": traceback.format_exc()}
    return {"implausible": implausible(call, found, again, strict)}


def reproduction(call: Call, folder: Path, detail: str, shrunk: set[str]) -> str:
    """Return a program with the fewest arguments that still fail; each kind of failure is shrunk once."""
    kind = detail.partition("\n")[0]
    if kind not in shrunk and not kind.startswith("hang"):
        shrunk.add(kind)
        few = shrink(call.arguments, lambda left: judge(call.having(left), folder)[1].partition("\n")[0] == kind)
        call = call.having(few)
    runs = [f"# in a folder with these runs: {', '.join(call.runs)}"] if call.runs else []
    return "\n".join([*runs, PRELUDE, call.text])
