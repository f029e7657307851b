"""What notebooks show: small tables, curves and schedules as HTML that follows the page's colours."""

import base64
import html
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

WIDTH, HEIGHT, LEFT, BOTTOM = 460, 190, 44, 30  # of a chart, and of its margins
PRESENT, ABSENT = (42, 111, 151, 255), (128, 128, 128, 40)
SPARE = ("#2a6f97", "#d1495b", "#edae49", "#00798c", "#762a83", "#1b7837", "#636363")
MOST_CELLS = 2000  # rounds or clients of a schedule that are drawn
Line = tuple[str, str, Sequence[float], Sequence[float]]  # label, colour ("" for any), x, y


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table; numbers are aligned on the right."""
    top = "".join(f'<th style="text-align:left">{html.escape(cell)}</th>' for cell in head)
    body = "".join("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any) -> str:
    side = "left" if isinstance(value, str) and value[:1].isalpha() else "right"
    return f'<td style="text-align:{side}">{html.escape(str(value))}</td>'


def curves(lines: Sequence[Line], x_label: str, y_label: str) -> str:
    """An SVG chart with one curve per line; nothing if there is no curve to draw."""
    points = [(x, y) for _, _, xs, ys in lines for x, y in zip(xs, ys, strict=True) if np.isfinite(y)]
    if len(points) < 2:
        return ""
    (x0, y0), (x1, y1) = np.min(points, axis=0), np.max(points, axis=0)
    x1, y1 = x1 + (x1 == x0), y1 + (y1 == y0)

    def place(x: float, y: float) -> str:
        across = LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - 8)
        return f"{across:.1f},{8 + (y1 - y) / (y1 - y0) * (HEIGHT - BOTTOM - 8):.1f}"

    drawn = ""
    for k, (label, color, xs, ys) in enumerate(lines):
        path = " ".join(place(x, y) for x, y in zip(xs, ys, strict=True) if np.isfinite(y))
        drawn += f'<polyline fill="none" stroke="{html.escape(color) or SPARE[k % len(SPARE)]}" stroke-width="1.6" points="{path}">'
        drawn += f"<title>{html.escape(label)}</title></polyline>"
    return f'<svg width="{WIDTH}" height="{HEIGHT}" role="img">{drawn}{_axes(x0, x1, y0, y1, x_label, y_label)}</svg>{_legend(lines)}'


def _axes(x0: float, x1: float, y0: float, y1: float, x_label: str, y_label: str) -> str:
    base = HEIGHT - BOTTOM
    frame = f'<path d="M{LEFT} 4V{base}H{WIDTH - 4}" fill="none" stroke="currentColor" opacity=".5"/>'
    texts = [
        (LEFT, base + 14, "start", f"{x0:g}"),
        (WIDTH - 8, base + 14, "end", f"{x1:.3g}"),
        ((LEFT + WIDTH) / 2, base + 26, "middle", x_label),
        (LEFT - 4, 14, "end", f"{y1:.3g}"),
        (LEFT - 4, base, "end", f"{y0:.3g}"),
        (LEFT + 6, 14, "start", y_label),
    ]
    return frame + "".join(
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="11" fill="currentColor">{html.escape(text)}</text>'
        for x, y, anchor, text in texts
    )


def _legend(lines: Sequence[Line]) -> str:
    if len(lines) < 2:
        return ""
    marks = (
        f'<span style="margin-right:1em"><span style="color:{html.escape(color) or SPARE[k % len(SPARE)]}">&#9644;</span> '
        f"{html.escape(label)}</span>"
        for k, (label, color, _, _) in enumerate(lines)
    )
    return f"<div>{''.join(marks)}</div>"


def schedule_image(schedule: np.ndarray, dark: str) -> str:
    """A schedule, bool [rounds, clients], as an image with one row per client and one column per round; `dark`: what True means."""
    from PIL import Image

    shown = schedule[:MOST_CELLS, :MOST_CELLS].T
    pixels = np.where(shown[..., None], np.array(PRESENT), np.array(ABSENT)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    height = min(max(3 * len(shown), 12), 240)
    style = f"width:{WIDTH}px;height:{height}px;image-rendering:pixelated;border:1px solid rgba(128,128,128,.4)"
    rounds, clients = schedule.shape
    words = f"{clients} clients (rows), {rounds} rounds (columns); dark: {dark}"
    return f'<img alt="{words}" style="{style}" src="data:image/png;base64,{data}"><div><small>{words}</small></div>'
