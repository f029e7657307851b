"""The report page: one HTML file with its data, style and script inside."""

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from ..availability import observe
from ..config import CAME_LATER
from ..files import write_text
from ..metrics.history import History
from ..metrics.store import RunFolder
from ..text import visible
from .figures import class_table, render
from .summary import AXES, METRICS, Group, main_metric, series, verdict
from .tables import HEADS, extreme_word, lines, overview

PAGE = Path(__file__).parent / "page"
THEORY = {
    "norms": "Squared norm of the true gradient over all clients, averaged with the rates as weights (thick), round by round (thin), "
    "and what bounds it: Theorem 1 for FedAvg, Theorem 2 and the mixing bound for MimiC, for any algorithm Lemma 1 with its E_t.",
    "errors": "How far the applied direction is from the true gradient, mean over seeds. Rounds with everybody there leave a gap.",
    "parts": "The objective bias of whoever was there; what MimiC's correction consists of: A_1, the error of the round a client was last "
    "there, and A_2, how its deviation has changed since (for other algorithms: what it would consist of); the clients' memory; staleness.",
    "recall": "Recall by class over time: blue near 100 %, orange near 0.",
    "certificate": "The rate, and where rates are certified: by Theorem 2 (Lemma 6), and by how fast the clients' memories mix.",
}
CHIPS = {"batch_size": "batch", "lr": "rate"}  # words for settings
SHOWN_VALUES = 3  # of a setting, in the chips
SHOWN_CLASSES = 6  # of a client, in the tooltip


def write(
    path: Path,
    groups: Sequence[Group],
    folders: Sequence[RunFolder],
    unfinished: str = "",
    theory: dict[str, Figure] | None = None,
    notes: Sequence[str] = (),
) -> Path:
    """Write the page of these runs; `theory` are pictures of their diagnoses, and `notes` what to know about them."""
    page = escaping().from_string((PAGE / "template.html").read_text(encoding="utf-8"))
    configs = [run.config for g in groups for run in g.runs]
    data = _data(groups)
    metric = main_metric(groups)
    text = page.render(
        title=_title(groups, configs),
        verdict=verdict(groups),
        chips=_chips(configs),
        unfinished=unfinished,
        head=HEADS[metric],
        extreme=extreme_word(metric),
        lines=lines(groups),
        overview=overview(groups),
        swatches=[_swatch(g) for g in groups],
        has_classes=any(g["classes"] for g in data["groups"]),
        has_clients=any(g["clients"] for g in data["groups"]),
        theory=[(THEORY[name], embedded(picture)) for name, picture in (theory or {}).items()],
        notes=notes,
        settings=_settings(configs),
        versions=_versions(folders),
        runs=[str(f.path) for f in folders],
        version=folders[0].environment().get("mimicfl", ""),
        style=(PAGE / "style.css").read_text(encoding="utf-8"),
        script=(PAGE / "page.js").read_text(encoding="utf-8"),
        data=in_script(data),
    )
    write_text(path, text)
    return path


def escaping() -> jinja2.Environment:
    """Templates in which every value is text: markup and invisible characters are escaped."""
    return jinja2.Environment(autoescape=True, finalize=_shown)


def _shown(value: Any) -> Any:
    return value if isinstance(value, Markup) or not isinstance(value, str) else visible(value)


def in_script(data: Any) -> str:
    """Data as JSON for a script element, in ASCII and without HTML's special characters: `</script>` or `<!--` in a name can neither end
    the script nor change how the rest of the page is parsed."""
    text = json.dumps(data, separators=(",", ":"))
    return text.translate({ord(c): f"\\u{ord(c):04x}" for c in "<>&"})


def embedded(picture: Figure) -> str:
    """A picture as an address that holds it."""
    buffer = io.BytesIO()
    render(picture, buffer, "png", dpi=110)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _title(groups: Sequence[Group], configs: Sequence[dict[str, Any]]) -> str:
    datasets = ", ".join(sorted({str(c.get("dataset", "data")) for c in configs}))
    who = (
        groups[0].label
        if len(groups) == 1
        else " and ".join(g.label for g in groups)
        if len(groups) == 2
        else f"{len(groups)} ways to train"
    )
    return f"{who} on {datasets} while clients drop out"


def _chips(configs: Sequence[dict[str, Any]]) -> list[str]:
    """What was set, in a few words; where runs differ, what each of them has."""
    counts = [(c["epochs"], "epoch") if c.get("epochs") else (c.get("steps"), "step") for c in configs]
    works = [f"{n} local {kind}{'s' * (n != 1)}" for n, kind in counts]
    chips = [*dict.fromkeys(f"{c.get('num_clients')} clients" for c in configs), *dict.fromkeys(works)]
    for key in ("availability", "model", "partition", "batch_size", "lr", "update"):
        values = list(dict.fromkeys(str(c.get(key) or "full") for c in configs if key in c))
        more = [f"and {len(values) - SHOWN_VALUES} more"] * (len(values) > SHOWN_VALUES)
        chips += [f"{CHIPS.get(key, key)} {value}" for value in values[:SHOWN_VALUES] + more]
    for key in CAME_LATER:
        if any(c.get(key) for c in configs):
            chips += dict.fromkeys(f"{key.replace('_', ' ')} {c.get(key) or 0:g}" for c in configs)
    return chips


def _data(groups: Sequence[Group]) -> dict[str, Any]:
    metrics = {key: name for key, name in METRICS.items() if any(g.finals(key) for g in groups)}
    first = main_metric(groups)
    metrics = {first: METRICS[first]} | metrics
    schedules = _schedules([run for g in groups for run in g.runs])
    return {"metrics": metrics, "axes": AXES, "schedules": schedules, "groups": [_group(g, metrics) for g in groups]}


def _group(g: Group, metrics: dict[str, str]) -> dict[str, Any]:
    curves = {m: {a: _rounded(g.curve(m, a).__dict__) for a in AXES} for m in metrics}
    seeds = {m: {a: [_rounded(series(run.rows, m, a)) for run in g.runs] for a in AXES} for m in metrics}
    by_class = [found for run in g.runs if (found := run.last("class_accuracy"))]
    table = class_table(by_class) if by_class else np.empty((0, 0))
    means = [None if np.isnan(column).any() else round(float(column.mean()), 4) for column in table.T]
    return {
        "label": g.label,
        "color": g.color,
        "strong": g.label.startswith("MimiC"),
        "dash": g.dash,
        "swatch": _swatch(g),
        "curves": curves,
        "seeds": seeds,
        "classes": means,
        "clients": {_key(run): _rounded(run.client_accuracy) for run in g.runs if run.client_accuracy},
    }


def _swatch(g: Group) -> str:
    """A piece of the group's line, for legends."""
    begin, pattern = g.dash
    width = 2.6
    gaps = f' stroke-dasharray="{" ".join(f"{width * part:.3g}" for part in pattern)}" stroke-dashoffset="{width * begin:.3g}"'
    line = f'<line x2="38" y1="5" y2="5" stroke="{g.color}" stroke-width="{width}"{gaps if pattern else ""}/>'
    return f'<svg class="swatch" viewBox="0 0 38 10" aria-hidden="true">{line}</svg>'


def _key(run: History) -> str:
    """Runs with one key saw the same schedule, as far as they went."""
    c = run.config
    return f"{c.get('availability')}, {c.get('dataset')}, {c.get('partition')}, {c.get('num_clients')} clients, seed {c.get('seed')}"


def _schedules(runs: Sequence[History]) -> list[dict[str, Any]]:
    longest: dict[str, History] = {}
    for run in runs:
        if run.rows and len(run.rows) > len(longest.get(_key(run), History([], run.params, 0)).rows):
            longest[_key(run)] = run
    patterns = {str(run.config.get("availability")) for run in longest.values()}
    return [_schedule(key, run, named=len(patterns) > 1) for key, run in longest.items()]


def _schedule(key: str, run: History, named: bool) -> dict[str, Any]:
    seen = observe(run.available)
    return {
        "key": key,
        "title": f"{run.config.get('availability')}, " * named + f"seed {run.config.get('seed')}",
        "rounds": seen.rounds,
        "clients": seen.clients,
        "active": [row["clients"] for row in run.rows],
        "participation": [round(float(p), 4) for p in seen.participation],
        "observed": seen.sentences(),
        "labels": None if run.class_counts is None else [_holds(counts) for counts in run.class_counts],
    }


def _holds(counts: np.ndarray) -> str:
    order = [c for c in np.argsort(-counts, kind="stable") if counts[c]]
    words = [f"{counts[c]} of class {c}" for c in order[:SHOWN_CLASSES]]
    return ", ".join(words) + (", ..." if len(order) > SHOWN_CLASSES else "")


def _rounded(value: Any) -> Any:
    """Six digits are more than a screen shows and keep the page small."""
    if isinstance(value, dict):
        return {key: _rounded(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(v) for v in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _settings(configs: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    keys = list(dict.fromkeys(key for config in configs for key in config))
    table = []
    for key in keys:
        values = list(dict.fromkeys(str(config[key]) for config in configs if config.get(key) not in (None, [], "")))
        if values:
            table.append((key, ", ".join(values)))
    return table


def _versions(folders: Sequence[RunFolder]) -> list[tuple[str, str]]:
    found: dict[str, list[str]] = {}
    for folder in folders:
        for key, value in folder.environment().items():
            if value is not None and key != "started":
                found.setdefault(key, [])
                if str(value) not in found[key]:
                    found[key].append(str(value))
    return [(key, ", ".join(values)) for key, values in found.items()]
