"""Figures of the theory: bounds and measured gradient norms, the error of the direction, certified rates, and the diagnoses."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from ..errors import UsageError
from ..metrics.history import History
from .figures import INK, class_table, dashes, fit_inside, legend_below, literal, subtitle
from .rates import at_best_rates
from .styles import styles
from .summary import Group
from .theory import Check, bounded, check
from .theory_rows import diagnosed

GOOD, BAD = "#2a9d8f", "#e76f51"
HEAT = LinearSegmentedColormap.from_list("heat", ["#c8540a", "#f4f0e8", "#266eaa"])  # the colours of the page for 0 to 100 %
MOST = 8  # configurations in one figure
LONGEST_BESIDE = 14  # characters of a label that fit beside a panel
DASHES = {"Theorem 1": "--", "Theorem 2": "--", "mixing bound": "-.", "Lemma 1 with the measured E_t": ":"}


def seen(groups: Sequence[Group]) -> list[Group]:
    """The groups that have diagnosed runs, with only those runs."""
    kept = [replace(g, runs=[run for run in g.runs if diagnosed(run)]) for g in groups]
    return [g for g in kept if g.runs]


def _axes(figure: Figure, position: tuple[int, int, int] = (1, 1, 1), *, log: bool = True, y: str = "") -> Axes:
    axes = figure.add_subplot(*position)
    if log:
        axes.set_yscale("log")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("round")
    axes.set_ylabel(y)
    axes.margins(x=0.01)
    return axes


def norms(groups: Sequence[Group]) -> tuple[Figure, list[str]]:
    """Measured gradient norms (thick) and their bounds (dashed and dotted), for the first seed of each algorithm, with notes."""
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = _axes(figure, y="squared norm of grad f, weighted mean so far")
    notes: dict[str, list[str]] = {}
    for g in seen(groups):
        found = bounded(g.runs[0])
        assert found is not None
        axes.plot(found.number, found.measured, linestyle=dashes(g), color=g.color, linewidth=2.2, label=literal(f"{g.label}, measured"))
        axes.plot(found.number, _without_zeros(list(found.grad2)), color=g.color, linewidth=0.6, alpha=0.5)
        for name, line in found.bounds.items():
            axes.plot(found.number, line, DASHES[name], color=g.color, linewidth=1.4, label=literal(f"{g.label}, {name}"))
        for note in found.notes:
            notes.setdefault(note, []).append(g.label)
    axes.set_title(literal(subtitle(groups)) + "\nthin: the norm per round", fontsize=10, color=INK, loc="left")
    if fit_inside(groups):
        axes.legend(frameon=False, fontsize=8, ncols=2)
    else:
        legend_below(figure, axes)
    everyone = len(seen(groups))
    return figure, [f"{'All' if len(labels) == everyone > 1 else ', '.join(labels)}: {note}." for note, labels in notes.items()]


def errors(groups: Sequence[Group]) -> Figure:
    """E_t of all algorithms, mean over seeds."""
    figure = Figure(figsize=(8, 4.4), layout="constrained")
    axes = _axes(figure, y="E_t = |v_t - grad f(w_t)|²")
    for g in seen(groups):
        x, y = _mean(g, "E")
        axes.plot(x, y, linestyle=dashes(g), color=g.color, linewidth=2.4 if g.emphasized else 1.5, label=literal(g.label))
    axes.set_title(literal(subtitle(groups)), fontsize=10, color=INK, loc="left")
    if fit_inside(groups):
        axes.legend(frameon=False)
    else:
        legend_below(figure, axes)
    return figure


def _mean(g: Group, key: str) -> tuple[np.ndarray, np.ndarray]:
    """The mean of a measurement over seeds, for the rounds in which all seeds have it."""
    tables = [{d["round"]: d[key] for d in diagnosed(run) if d[key] is not None} for run in g.runs]
    shared = sorted(set.intersection(*map(set, tables)))
    return np.array(shared), _without_zeros([float(np.mean([table[t] for table in tables])) for t in shared])


def _without_zeros(y: Sequence[float]) -> np.ndarray:
    """Replace values that are zero up to rounding by NaN: they would stretch a logarithmic axis."""
    table = np.array(y, dtype=float)
    return np.where(table > 1e-13 * table.max(initial=0.0), table, np.nan)


def certificate(found: Check, L: float, title: str = "") -> Figure:
    """The rate of the run, the regions of certified rates, and for how many rounds the rate of the run is certified."""
    r = found.rounds
    figure = Figure(figsize=(8, 4.4), layout="constrained")
    axes = _axes(figure, y="global rate eta_t, for mean gradients")
    region = found.c * r.m / (r.number + found.beta)
    low = min(float(r.eta.min()), float(region.min())) / 3
    axes.axhline(1 / L, color="#999999", linewidth=1, linestyle=":", label="1/L")
    axes.plot(r.number, r.eta, color=INK, linewidth=1.6, label="rate of the run")
    if found.constant:
        text = f"mixing: constant rates up to {found.constant:.3g}"
        axes.fill_between(r.number, low, found.constant, color=GOOD, alpha=0.15, linewidth=0, label=text)
    text = f"Theorem 2, tau_max = {found.tau_max}: c |S_t|/(t + {found.beta:g}), c up to {found.c:.3g}"
    axes.fill_between(r.number, low, region, color=GOOD, alpha=0.45, linewidth=0, label=text)
    until = max(found.certified, found.mixed)
    axes.fill_between(r.number, low, 1.4 * low, where=r.number < until, color=GOOD, step="mid", linewidth=0)
    axes.fill_between(r.number, low, 1.4 * low, where=r.number >= until, color=BAD, step="mid", linewidth=0)
    axes.set_ylim(bottom=low)
    strip = "strip: green where the rate of the run is certified up to this round"
    axes.set_title(f"{literal(title)}\n{strip}", fontsize=9, color=INK, loc="left")
    axes.legend(frameon=False, fontsize=8)
    return figure


def parts(groups: Sequence[Group]) -> Figure:
    """Objective bias, the parts of the correction, memory and gaps over time."""
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    shown, inside = seen(groups), fit_inside(groups)
    bias = _axes(figure, (2, 2, 1), y="objective bias gamma_t")
    split = _axes(figure, (2, 2, 2), y="mean of |A_1|² and |A_2|² over S_t" if inside else "mean |A_1|² (thick), |A_2|² (thin)")
    memory = _axes(figure, (2, 2, 3), y="rms norm of the clients' memory")
    gaps = _axes(figure, (2, 2, 4), log=False, y="rounds since last participation")
    for g in shown:
        bias.plot(*_mean(g, "gamma"), linestyle=dashes(g), color=g.color, linewidth=1.5, label=literal(g.label))
        for key, line, width in (("A1", "-", 1.8), ("A2", "--", 0.7)):
            x, y = _mean(g, key)
            if len(x) and inside:
                split.plot(x, y, line, color=g.color, linewidth=1.4, label=literal(f"{g.label} {key[0]}_{key[1]}"))
            elif len(x):
                split.plot(x, y, linestyle=dashes(g), color=g.color, linewidth=width)
        rows = diagnosed(g.runs[0])
        for name in rows[0]["memory"]:
            norm = _without_zeros([d["memory"][name] for d in rows])
            memory.plot(
                [d["round"] for d in rows],
                norm,
                linestyle="-" if inside else dashes(g),
                color=g.color,
                label=literal(f"{g.label} {name}_i"),
            )
    if not memory.lines:
        memory.text(0.5, 0.5, "these algorithms keep no memory per client", transform=memory.transAxes, ha="center", color=INK)
    rows = diagnosed(shown[0].runs[0])
    for key, label, line in (("max", "maximum", "-"), ("most", "90 % quantile", "--"), ("median", "median", ":")):
        gaps.plot([d["round"] for d in rows], [d["staleness"][key] for d in rows], line, color=INK, label=label)
    for axes in (bias, split, memory, gaps) if inside else (gaps,):
        if axes.lines:
            axes.legend(frameon=False, fontsize=7)
    if not inside:
        legend_below(figure, bias)
    return figure


def recall(groups: Sequence[Group]) -> Figure | None:
    """Recall by class over time, one panel per algorithm, for its first seed."""
    tables = []
    for g in seen(groups):
        rows = [row for row in g.runs[0].rows if "diagnosis" in row and row.get("class_accuracy")]
        if rows:
            tables.append((g.label, [row["round"] for row in rows], class_table([row["class_accuracy"] for row in rows])))
    if not tables:
        return None
    figure = Figure(figsize=(8, 0.6 + 1.5 * len(tables)), layout="constrained")
    axes = figure.subplots(len(tables), 1, sharex=True, squeeze=False)[:, 0]
    for row, (label, rounds, table) in zip(axes, tables, strict=True):
        edges = np.concatenate([[rounds[0] - 0.5], np.array(rounds) + 0.5])
        image = row.pcolormesh(edges, np.arange(table.shape[1] + 1) - 0.5, 100 * table.T, cmap=HEAT, vmin=0, vmax=100)
        beside = all(len(name) <= LONGEST_BESIDE for name, _, _ in tables)
        row.set_ylabel(literal(f"{label}\nclass") if beside else "class")
        if not beside:
            row.set_title(literal(label), fontsize=8, color=INK, loc="left")
        row.set_yticks(range(table.shape[1]) if table.shape[1] <= 10 else [])
        row.tick_params(axis="y", labelsize=6)
    axes[-1].set_xlabel("round")
    figure.colorbar(image, ax=list(axes), label="recall (%)", aspect=max(20, 8 * len(tables)))
    return figure


def draw(groups: Sequence[Group]) -> tuple[dict[str, Figure], list[str]]:
    """All figures of these runs' diagnoses by name, and notes about them; empty if no run was diagnosed."""
    shown = seen(groups)
    if not shown:
        return {}, []
    omitted = ""
    if len(shown) > MOST:
        few = at_best_rates(shown)[:MOST]
        rule = "each algorithm at its best rate" if len(few) < MOST else f"the first {MOST}"
        omitted = (
            f"These figures show {len(few)} of {len(shown)} diagnosed configurations, {rule}; a report of fewer runs shows the others."
        )
        looks = styles([(str(g.runs[0].config.get("algorithm", "run")), g.setting) for g in few])  # as few dashes as possible
        shown = [replace(g, color=color, dash=dash) for g, (color, dash) in zip(few, looks, strict=True)]
    first, notes = norms(shown)
    notes = [omitted] * bool(omitted) + notes
    figures = {"norms": first, "errors": errors(shown), "parts": parts(shown)}
    by_class = recall(shown)
    if by_class is not None:
        figures["recall"] = by_class
    try:
        found = certified_rates(shown)
        if found is not None:
            figures["certificate"] = found
    except UsageError as reason:
        notes.append(f"{reason}.")
    return figures, notes


def certified_rates(groups: Sequence[Group]) -> Figure | None:
    """The figure of certified rates for the first run whose L is known; emphasized algorithms come first."""
    runs: list[History] = [g.runs[0] for g in sorted(groups, key=lambda g: not g.emphasized)]
    for run in runs:
        rows = diagnosed(run)
        known = [d["L"] for d in rows if d["L"] is not None]
        if known:
            K = round(float(np.mean([d["K"] for d in rows])))
            title = f"{run.config.get('algorithm')}, rate {run.config.get('global_lr')}, local rate {run.config.get('lr')}"
            return certificate(check(run, max(known), K), max(known), title)
    return None
