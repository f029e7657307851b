"""The figure of docs/flower.md: the messages of a round without failures and of a round with a killed and a late client.

python docs/flow.py        # writes docs/pictures/flower.png
"""

from pathlib import Path

from matplotlib.figure import Figure

INK, QUIET, DOWN, UP, BAD = "#30363d", "#8b949e", "#2a6f97", "#3a7d44", "#b23a48"
LANES = {"server app": 0.0, "SuperLink": 2.2, "client 0": 5.0, "client 1": 7.0, "client 2": 9.0}
OUT = Path(__file__).parent / "pictures" / "flower.png"


class Flow:
    """A sequence diagram: lanes side by side, time downwards."""

    def __init__(self, height: float) -> None:
        self.figure = Figure(figsize=(9.6, 0.43 * height), layout="constrained")
        self.axes = self.figure.add_subplot()
        self.axes.set_xlim(-2.35, 10.1)
        self.axes.set_ylim(height, -0.6)
        self.axes.axis("off")
        for name, x in LANES.items():
            self.axes.text(x, -0.25, name, ha="center", color=INK, fontsize=10, weight="bold")
        self.alive = dict.fromkeys(LANES, 0.1)

    def until(self, lane: str, y: float, style: str = "-") -> None:
        self.axes.plot([LANES[lane]] * 2, [self.alive[lane], y], style, color=QUIET, linewidth=1, zorder=1)
        self.alive[lane] = y

    def arrow(self, a: str, b: str, y: float, color: str, text: str = "", slope: float = 0.0, style: str = "-") -> None:
        properties = {"arrowstyle": "-|>", "color": color, "linewidth": 1.3, "linestyle": style, "shrinkA": 0, "shrinkB": 0}
        self.axes.annotate("", (LANES[b], y + slope), (LANES[a], y), arrowprops=properties, zorder=3)
        if text:
            middle = (LANES[a] + LANES[b]) / 2
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
            self.axes.text(middle, y + slope / 2, text, ha="center", va="center", fontsize=8, color=color, bbox=box, zorder=4)

    def send(self, y: float, text: str, clients: list[str]) -> None:
        """From the server app through the SuperLink to each client."""
        self.arrow("server app", "SuperLink", y, DOWN, text)
        for k, client in enumerate(clients):
            self.arrow("SuperLink", client, y + 0.25 + 0.3 * k, DOWN)

    def reply(self, y: float, client: str, text: str, color: str = UP) -> None:
        self.arrow(client, "SuperLink", y, color, text)
        self.arrow("SuperLink", "server app", y + 0.25, color)

    def note(self, y: float, text: str, color: str = INK) -> None:
        self.axes.text(-0.15, y, text, ha="right", va="center", fontsize=8, color=color)

    def cross(self, lane: str, y: float, text: str) -> None:
        self.axes.plot(LANES[lane], y, "x", color=BAD, markersize=11, markeredgewidth=2.5, zorder=5)
        self.axes.text(LANES[lane] + 0.2, y, text, va="center", fontsize=8, color=BAD)

    def band(self, top: float, bottom: float) -> None:
        self.axes.axhspan(top, bottom, color="#f3f6f8", zorder=0)


def draw() -> Figure:
    flow, three = Flow(19.6), ["client 0", "client 1", "client 2"]
    flow.note(0.9, "query client ids\n(once per node)")
    flow.send(0.6, "hello", three)
    for k, client in enumerate(three):
        flow.reply(1.9 + 0.4 * k, client, "client-id" if k == 2 else "")
    flow.band(3.3, 8.4)
    flow.note(3.9, "round t")
    flow.send(3.7, "w, rate", three)
    for k, client in enumerate(three):
        flow.reply(5.3 + 0.55 * k, client, "update g" if k == 0 else "")
    flow.note(7.5, "check the updates,\naggregate, save\ncheckpoint and row")
    flow.band(8.8, 16.6)
    flow.note(9.4, "round t + 1")
    flow.send(9.2, "w, rate", three)
    flow.reply(10.7, "client 0", "update g")
    flow.until("client 1", 11.2)
    flow.cross("client 1", 11.2, "killed")
    flow.alive["client 1"] = 12.2
    flow.arrow("client 1", "SuperLink", 12.2, QUIET, "new node", style="--")
    flow.send(12.6, "hello", ["client 1"])
    flow.reply(13.3, "client 1", "client-id")
    flow.note(13.6, "reconnects under a\nnew node id: the old\nmessage has no reply")
    flow.note(15.3, "deadline, or enough\nreplies: the round closes\nwith client 0 only", BAD)
    flow.reply(17.2, "client 2", "late: refused, or counted when it arrives", BAD)
    flow.note(17.4, "round t + 2")
    flow.note(18.6, "only idle clients\nreceive messages", INK)
    flow.send(18.3, "w, rate", three)
    for lane in LANES:
        flow.until(lane, 19.5)
    return flow.figure


if __name__ == "__main__":
    draw().savefig(OUT, dpi=130)
    print(OUT)
