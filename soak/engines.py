"""Engine comparisons: trains a random problem with one engine and with plain, and compares all results.

Each trial is one problem and one engine; some trials compare the plain engine with a loop written from the definition. A comparison is
"ok" if the engine ran and agrees, "refused" if a notice gives the reason for using plain instead, and "failed" otherwise.
"""

import copy
import re
import sys
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import mimicfl as mf

from . import definition
from .agreement import HANGS, SENSITIVE, Hang, Make, differences, sensitivity, simulate
from .draws import draw
from .outcome import Outcome, Verdict
from .problems import Problem

PART = "engine comparisons"
CPU = ["batched", "workers", "plain", "native", "workers", "auto", "batched", "workers", "native", "plain", "workers", "native", "batched"]
GPU = ["batched", "streams", "auto", "batched", "streams"]
COMPILED_EVERY = 24  # on a GPU, where the compiler takes half a minute
SHRINKING = 20.0  # seconds to search for a smaller problem that also fails


@dataclass(frozen=True)
class Finding:
    """The result of a comparison."""

    verdict: Verdict
    detail: str = ""
    kind: str = ""  # the kind of failure, which a smaller problem must reproduce; otherwise what was compared
    took: str = ""  # the engine that ran


def engine_of(seed: int) -> str:
    """Return the engine that the trial of this seed compares."""
    if not torch.cuda.is_available():
        return CPU[seed % len(CPU)]
    name = GPU[seed % len(GPU)]
    return f"{name}:4:compiled" if seed % COMPILED_EVERY == 6 and name != "auto" else name


def trials(seed: int, enough: Callable[[], bool], folder: Path) -> Iterator[Outcome]:
    while not enough():
        yield trial(seed, folder)
        seed += 1


def trial(seed: int, folder: Path) -> Outcome:
    """Draw a problem, compare the engines, and shrink the problem if they disagree."""
    engine = engine_of(seed)
    problem = draw(seed, engine.partition(":")[0])
    found = compare(problem, engine, folder)
    used = problem.network().used
    what = f"{engine}: {problem.domain} {problem.dtype}, {', '.join(used) or 'head only'}; {problem.loss}; {problem.algorithm}"
    counts = {f"layer {name}": used.count(name) for name in used}
    if found.verdict == "failed":
        small, found = shrink(problem, engine, found, folder)
        return Outcome(PART, "failed", seed, what, found.detail, small.text() + SHOW[engine == "plain"].format(engine=engine), counts)
    if found.verdict == "ok":
        counts |= {found.kind or engine: 1} | ({f"auto took {found.took}": 1} if engine == "auto" and found.took else {})
    return Outcome(PART, found.verdict, seed, what, found.detail, counts=counts)


def compare(problem: Problem, engine: str, folder: Path) -> Finding:
    """Compare one engine with plain, or plain with the definition."""
    make = load(problem, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return against_definition(make) if engine == "plain" else against_plain(make, engine)
        except Hang:
            return Finding("failed", f"no end after {HANGS:.0f} s", "hangs")


def load(problem: Problem, folder: Path) -> Make:
    """Load the problem as a module from a file, as a user would write it, so that its source can be read."""
    folder.mkdir(parents=True, exist_ok=True)
    path, text = folder / "problem.py", problem.text()
    path.write_text(text, encoding="utf-8")
    module = types.ModuleType("soak_problem")
    sys.modules["soak_problem"] = module
    exec(compile(text, str(path), "exec"), module.__dict__)  # an import could use cached bytecode of the previous problem
    return module.problem  # type: ignore[no-any-return]


def against_plain(make: Make, engine: str) -> Finding:
    try:
        truth: mf.History | None = simulate(make(), "plain")[0]
    except mf.Diverged:
        truth = None
    except mf.UsageError as error:
        return Finding("refused", f"by plain as well: {error}")
    except Exception as error:
        return raised("plain", error)
    arguments = make()
    before = copy.deepcopy(arguments["model"].state_dict())
    try:
        ours, notices = simulate(arguments, engine)
    except mf.Diverged as error:
        wrong = Finding("failed", f"{engine} diverged, plain did not: {error}", "diverged")
        return wrong if truth else Finding("ok", kind="both diverged")
    except Exception as error:
        return raised(engine, error)
    if truth is None:
        return Finding("failed", f"plain diverged, {engine} did not; notices: {notices}", "diverged")
    after = arguments["model"].state_dict()
    if any(not torch.equal(value, after[name]) for name, value in before.items()):
        return Finding("failed", f"{engine} changed the model it was given", "model changed")
    wrong, amount = differences(make(), truth, ours)
    if not wrong and torch.equal(truth.params, definition.vector(make()["model"])):
        return Finding("ok", kind="nothing moved")
    return disagreement(make, truth, wrong, amount, f"; notices: {notices}") or what_ran(engine, notices)


def disagreement(make: Make, truth: mf.History, wrong: list[str], amount: float, more: str = "") -> Finding | None:
    """Return a failure unless rounding explains the difference; None if there is no difference."""
    if not wrong:
        return None
    rounding = sensitivity(make, truth)
    detail = f"{'; '.join(wrong[:3])} (rounding the initial parameters: {rounding:.1e}){more}"
    if amount < SENSITIVE * rounding:
        return Finding("ok", detail, "too sensitive to compare")
    return Finding("failed", detail, "differs")


def what_ran(engine: str, notices: list[str]) -> Finding:
    """Given that the results agree, check that the engine computed them or that a notice gives the reason."""
    name = engine.partition(":")[0]
    took = [found[1] for notice in notices if (found := re.match(r"engine (\w+)", notice))]
    text = "; ".join(notices)
    if not took:
        return Finding("failed", f"the notices name no engine: {notices}", "no notice")
    if name in took or name == "auto":
        return Finding("refused", text) if "not compiled" in text else Finding("ok", took=took[-1])
    if re.search(r"engine plain\W+\w+", text):
        return Finding("refused", text)
    return Finding("failed", f"{engine} did not run and no reason was given: {notices}", "no reason")


def against_definition(make: Make) -> Finding:
    """Compare the plain engine with `soak.definition`."""
    try:
        plain, _ = simulate(make(), "plain")
    except mf.Diverged:
        return Finding("ok", kind="plain diverged")
    except mf.UsageError as error:
        return Finding("refused", str(error))
    except Exception as error:
        return raised("plain", error)
    params, rows = definition.run(make(), [row["clients"] for row in plain.rows])
    untested = {"test_loss": None, "test_accuracy": None}
    rows = [row | mine | (untested if row["test_loss"] is None else {}) for row, mine in zip(plain.rows, rows, strict=True)]
    wrong, amount = differences(make(), replace(plain, params=params, rows=rows), plain)
    return disagreement(make, plain, wrong, amount, "; by the definition") or Finding("ok", kind="plain against the definition")


def raised(engine: str, error: Exception) -> Finding:
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = (str(error).strip().splitlines() or [""])[0][:200]
    where = f"{Path(last.filename).name}:{last.lineno}"
    return Finding("failed", f"{engine} raised {type(error).__name__}: {text} ({where})", f"raises {type(error).__name__}")


def shrink(problem: Problem, engine: str, found: Finding, folder: Path) -> tuple[Problem, Finding]:
    """Search for a smaller problem that fails in the same way, within a time limit."""
    end = time.monotonic() + SHRINKING
    smaller = True
    while smaller:
        smaller = False
        for candidate in problem.simpler():
            if time.monotonic() > end:
                return problem, found
            also = compare(candidate, engine, folder)
            if also.verdict == "failed" and also.kind == found.kind:
                problem, found, smaller = candidate, also, True
                break
    return problem, found


SHOW = (
    """

if __name__ == "__main__":
    from mimicfl.engines import select

    select.WORTH_IT = 0.0
    torch.set_num_threads(2)
    plain, given = mf.simulate(**problem(), engine="plain"), problem()
    other = mf.simulate(**given, engine="{engine}", notice=print)
    before, after = problem()["model"].state_dict(), given["model"].state_dict()
    print("the given model changed:", any(not torch.equal(before[name], after[name]) for name in before))
    start = torch.cat([p.detach().flatten() for p in problem()["model"].parameters() if p.requires_grad])
    print("difference / movement:", float((plain.params - other.params).norm() / (plain.params - start).norm()))
    for a, b in zip(plain.rows, other.rows):
        print([(a[key], b[key]) for key in ("train_loss", "test_loss", "test_accuracy", "class_accuracy")])
    print(plain.client_accuracy, other.client_accuracy)
""",
    """

if __name__ == "__main__":
    from . import definition

    plain = mf.simulate(**problem())
    params, rows = definition.run(problem(), [row["clients"] for row in plain.rows])
    print("difference:", float((plain.params - params).norm()))
    for a, b in zip(plain.rows, rows):
        print([(a[key], b[key]) for key in b])
""",
)
