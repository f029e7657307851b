"""The report page: a single HTML file that includes its data, style and script."""

import base64
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from ..clients.local_sgd import EXTRAS
from ..files import write_text
from ..metrics.client_ids import counted_as_joined
from ..metrics.columns import head, percent
from ..metrics.store import RunFolder
from ..text import visible
from .figures import render
from .own_test import own_test
from .page_data import page_data
from .pairs import MOST_OPEN, pair_lines
from .rates import RATES, best_rates, rate_setting
from .summary import Group, main_metric, more_metrics
from .tables import extreme_word, lines, overview
from .verdict import RULE, enumerated, tally, verdict

PAGE = Path(__file__).parent / "page"
SCRIPTS = ("data", "chart", "clients", "page")  # in this order
THEORY = {
    "norms": "Squared norm of the full gradient over all clients: mean weighted by the rates (thick), value per round (thin), and upper "
    "bounds: Theorem 1 for FedAvg, Theorem 2 and the mixing bound for MimiC, and Lemma 1 with the measured E_t for any algorithm.",
    "errors": "Error of the applied direction relative to the full gradient, mean over seeds. Rounds in which all clients are active leave "
    "a gap if the error is zero up to rounding.",
    "parts": "Objective bias of the active clients; the two parts of MimiC's correction (for other algorithms: the parts it would have): "
    "A_1, the error of the round in which a client last participated, and A_2, the change of its deviation since then; the norms of the "
    "clients' memory; and the rounds since clients last participated.",
    "recall": "Recall by class over time: blue is near 100 %, orange near 0.",
    "certificate": "The learning rate, and the rates with a convergence certificate: by Theorem 2 (Lemma 6), and by the mixing bound.",
}
CHIPS = {"batch_size": "batch", "lr": "rate"}  # shorter names of settings
LONG_TITLE = 50  # characters of names in the title
SHOWN_VALUES = 3  # values of a setting in the chips


def write(
    path: Path,
    groups: Sequence[Group],
    folders: Sequence[RunFolder],
    unfinished: str = "",
    theory: dict[str, Figure] | None = None,
    notes: Sequence[str] = (),
    live: float = 0,
) -> Path:
    """Write the report page of these runs; `theory` holds figures of their diagnoses, and `notes` remarks about these.

    `live`: the page reloads itself after this many seconds; 0 for never.
    """
    page = escaping().from_string((PAGE / "template.html").read_text(encoding="utf-8"))
    configs = [run.config for g in groups for run in g.runs]
    data = page_data(groups) | {"live": live}
    metric = main_metric(groups)
    text = page.render(
        title=_title(groups, configs),
        verdict=verdict(groups, finished=not unfinished),
        tally=tally(groups),
        decision=RULE,
        chips=_chips(configs),
        unfinished=unfinished,
        head=head(metric),
        more=[head(each) for each in more_metrics(groups)],
        extreme=extreme_word(metric),
        lines=lines(groups),
        pairs=(pairs := pair_lines(groups)),
        points=percent(metric),
        pairs_open=len(pairs) <= MOST_OPEN,
        faceted=len(data["settings"]) > 1,
        rates=best_rates(groups),
        rate=RATES.get(rate_setting(groups), ""),
        live=live,
        has_thirds=any(g["thirds"] for g in data["groups"]),
        overview=overview(groups),
        swatches=[_swatch(g) for g in groups],
        as_joined=any(counted_as_joined(run.rows) for g in groups for run in g.runs),
        has_classes=any(g["classes"] for g in data["groups"]),
        has_clients=any(g["clients"] for g in data["groups"]),
        own_test=own_test(groups),
        theory=[(THEORY[name], embedded(figure)) for name, figure in (theory or {}).items()],
        notes=notes,
        settings=_settings(configs),
        versions=_versions(folders),
        runs=[str(f.path) for f in folders],
        version=folders[0].environment().get("mimicfl", ""),
        style=(PAGE / "style.css").read_text(encoding="utf-8"),
        script="\n".join((PAGE / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS),
        data=in_script(data),
    )
    write_text(path, text)
    return path


def escaping() -> jinja2.Environment:
    """A template environment that escapes markup and invisible characters in every value."""
    environment = jinja2.Environment(autoescape=True, finalize=_visible_text)
    environment.filters["parts"] = _parts
    return environment


def _parts(label: str) -> Markup:
    """A label such as `MimiC, lr 0.1`, whose lines break between its parts rather than inside them."""
    words = visible(label).split(", ")
    spans = (Markup('<span class="part">{}</span>').format(_breakable(word)) for word in [*(f"{w}," for w in words[:-1]), words[-1]])
    return Markup(" ").join(spans)


def _breakable(word: str) -> Markup:
    """A spec such as `cyclic:period=20,on=4`, whose lines break after its separators, but not inside brackets."""
    return Markup(re.sub(r"([,:])(?=\S)(?![^[\]]*\])", r"\1<wbr>", str(escape(word))))


def _visible_text(value: Any) -> Any:
    return value if isinstance(value, Markup) or not isinstance(value, str) else visible(value)


def in_script(data: Any) -> str:
    """Data as JSON for a script element, in ASCII and without HTML's special characters: `</script>` or `<!--` in a name can neither end
    the script nor change how the rest of the page is parsed."""
    text = json.dumps(data, separators=(",", ":"))
    return text.translate({ord(c): f"\\u{ord(c):04x}" for c in "<>&"})


def embedded(figure: Figure) -> str:
    """A figure as a data URL."""
    buffer = io.BytesIO()
    render(figure, buffer, "png", dpi=110)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _title(groups: Sequence[Group], configs: Sequence[dict[str, Any]]) -> str:
    datasets = ", ".join(sorted({str(c["dataset"]) for c in configs if c.get("dataset")}))
    names = enumerated([g.label for g in groups])
    what = names if len(groups) < 3 or len(names) <= LONG_TITLE else f"{len(groups)} configurations"
    return f"{what}{datasets and f' on {datasets}'} with client dropouts"


def _chips(configs: Sequence[dict[str, Any]]) -> list[str]:
    """The main settings in a few words; where runs differ, all their values."""
    counts = [(c["epochs"], "epoch") if c.get("epochs") else (c.get("steps"), "step") for c in configs]
    works = [f"{n} local {kind}{'s' * (n != 1)}" for n, kind in counts if n]
    chips = [*dict.fromkeys(f"{c['num_clients']} clients" for c in configs if c.get("num_clients")), *dict.fromkeys(works)]
    for key in ("availability", "model", "partition", "batch_size", "lr", "update"):
        values = list(dict.fromkeys(str(c.get(key) or "full") for c in configs if c.get(key, "") != ""))
        more = [f"and {len(values) - SHOWN_VALUES} more"] * (len(values) > SHOWN_VALUES)
        chips += [f"{CHIPS.get(key, key)} {value}" for value in values[:SHOWN_VALUES] + more]
    for key in EXTRAS:
        if any(c.get(key) for c in configs):
            chips += dict.fromkeys(f"{key.replace('_', ' ')} {c.get(key) or 0:g}" for c in configs)
    return chips


def _swatch(g: Group) -> str:
    """A sample of the group's line, for legends."""
    begin, pattern = g.dash
    width = 2.6
    gaps = f' stroke-dasharray="{" ".join(f"{width * part:.3g}" for part in pattern)}" stroke-dashoffset="{width * begin:.3g}"'
    line = f'<line x2="38" y1="5" y2="5" stroke="{g.color}" stroke-width="{width}"{gaps if pattern else ""}/>'
    return f'<svg class="swatch" viewBox="0 0 38 10" aria-hidden="true">{line}</svg>'


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
