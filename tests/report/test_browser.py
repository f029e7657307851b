"""The page in a real browser: it draws, it has no script error, and its controls work."""

import json
import re
import shutil
import subprocess
import tomllib

import pytest

import mimicfl as mf
from mimicfl.report.report import build

from ..conftest import forge

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian package: chromium)")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=4000",
]
# A visitor: hides FedAvg, shows single seeds, changes axis, metric and schedule, and moves over the pictures.
WATCH = """<script>window.onerror = (message) => { document.documentElement.dataset.error = message; };</script>"""
VISIT = """
<script>
addEventListener("load", () => {
  const note = (key, value) => { document.body.dataset[key] = value; };
  const lines = () => document.querySelectorAll("#chart path[fill=none]").length;
  note("lines", lines());
  document.querySelector("#legend button").click();
  note("linesAfterHiding", lines());
  document.querySelector("#legend button").click();
  const seeds = document.getElementById("seeds"); seeds.checked = true; seeds.onchange();
  note("linesWithSeeds", lines());
  const axis = document.getElementById("axis"); axis.value = "megabytes"; axis.onchange();
  note("axisTitle", document.querySelector("#chart").textContent.includes("megabytes"));
  const metric = document.getElementById("metric"); metric.value = "test_loss"; metric.onchange();
  note("metricTitle", document.querySelector("#chart").textContent.includes("test loss"));
  const schedule = document.getElementById("schedule"); schedule.value = "1"; schedule.onchange();
  const box = document.querySelector("#chart svg").getBoundingClientRect();
  const move = (node, x, y) => node.dispatchEvent(new MouseEvent("mousemove", { clientX: x, clientY: y, bubbles: true }));
  move(document.querySelector("#chart svg"), box.left + box.width / 2, box.top + box.height / 2);
  note("tip", document.getElementById("tip").textContent);
  const canvas = document.getElementById("availability"), at = canvas.getBoundingClientRect();
  move(canvas, at.left + 3, at.top + 3);
  note("cell", document.getElementById("tip").textContent);
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  note("colors", new Set(Array.from({ length: pixels.length / 4 }, (_, k) => pixels.slice(4 * k, 4 * k + 3).join())).size);
});
</script>
"""


# Whether the page, and each of its boxes that may scroll, is wider than there is room for.
MEASURE = """
<script>
addEventListener("load", () => {
  const boxes = [...document.querySelectorAll(".scroll")].filter((box) => box.scrollWidth > box.clientWidth).length;
  const page = document.documentElement;
  parent.postMessage([page.scrollWidth > page.clientWidth ? "page too wide" : "page fits", boxes], "*");
});
</script>
"""
# A window has a least width, a frame has not.
FRAME = """
<body><script>onmessage = (event) => { [document.body.dataset.page, document.body.dataset.boxes] = event.data; };</script>
<iframe src="page.html" width="WIDTH" height="900"></iframe></body>
"""


def visit(page):
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={page.parent / 'profile'}", "--window-size=1400,1000", "--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """A page of many groups with long names."""
    folder = tmp_path_factory.mktemp("sweep")
    for k, pattern in enumerate(("label-correlated:classes=[0,1,2],rare=0.02,common=0.3", "static:0.2", "time-varying:0.1")):
        settings = mf.Experiment(rounds=2, availability=pattern, partition="classes:2")
        mf.compare(settings, ["fedavg", "fedprox:mu=0.01", "scaffold", "mimic"], [0], folder / str(k))
    page = build([folder], folder).page
    (folder / "page.html").write_text(page.read_text().replace("</body>", MEASURE + "</body>"))
    return folder


HOSTILE = [
    "<!--<script>",
    "</script><script>document.documentElement.dataset.hacked = 1</script>",
    '"><img src=x onerror="document.documentElement.dataset.hacked=1">',
    "']]><svg onload=document.documentElement.dataset.hacked=1>\u2028\u2029&lt;&",
    "$\\\\frac{$ {{ 7 * 7 }} ${7 * 7} `x`",
]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """The page of runs whose every setting, and every version beside them, is an attack."""
    folder = tmp_path_factory.mktemp("hostile")
    for k, name in enumerate(HOSTILE):
        run = folder / str(k)
        mf.run(mf.Experiment(rounds=2, steps=1, num_clients=4, availability="always"), run)
        kept = tomllib.loads((run / "config.toml").read_text())
        nasty = {key: name for key, value in kept.items() if isinstance(value, str)}
        forge(run, kept | nasty | {"plugins": [name]})
        facts = json.loads((run / "env.json").read_text())
        (run / "env.json").write_text(json.dumps(dict.fromkeys(facts, name) | {name: name}))
    page = build([folder]).page
    page.write_text(page.read_text().replace("<head>", "<head>" + WATCH, 1).replace("</body>", VISIT + "</body>"))
    return visit(page)


@pytest.fixture(scope="module")
def dom(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    mf.compare(mf.Experiment(rounds=10, availability="static:0.2"), ["fedavg", "mimic"], [0, 1], folder)
    page = build([folder]).page
    page.write_text(page.read_text().replace("<head>", "<head>" + WATCH).replace("</body>", VISIT + "</body>"))
    return visit(page)


def noted(dom, key):
    found = re.search(rf'<body[^>]*\bdata-{key}="([^"]*)"', dom)
    return found.group(1) if found else None


def test_it_draws_without_a_script_error(dom):
    assert noted(dom, "ready") == "yes"
    assert "data-error" not in dom.split("<head>")[0]
    assert "MimiC" in dom


def test_curves_can_be_switched(dom):
    assert noted(dom, "lines") == "2"
    assert noted(dom, "lines-after-hiding") == "1"
    assert noted(dom, "lines-with-seeds") == "6"
    assert noted(dom, "axis-title") == "true"
    assert noted(dom, "metric-title") == "true"


def test_hovering_tells_values(dom):
    assert "FedAvg" in noted(dom, "tip")
    assert "MimiC" in noted(dom, "tip")
    assert "round 0, client 0" in noted(dom, "cell")


def test_the_schedule_is_painted(dom):
    assert int(noted(dom, "colors")) == 2
    assert dom.count("<td") > 60  # class and client tables


def test_hostile_names_are_shown_and_do_nothing(hostile):
    assert noted(hostile, "ready") == "yes"
    head = hostile.split("<head>")[0]
    assert "data-error" not in head
    assert "data-hacked" not in head
    assert noted(hostile, "lines") == str(len(HOSTILE))
    assert noted(hostile, "cell").startswith("round 0, client 0")
    assert "&lt;!--&lt;script&gt;" in hostile
    assert "<img src" not in hostile


def test_tables_fit_a_wide_screen_and_scroll_in_their_own_box_on_a_phone(sweep):
    seen = {}
    for width in (1280, 400):
        frame = sweep / f"frame{width}.html"
        frame.write_text(FRAME.replace("WIDTH", str(width)))
        seen[width] = visit(frame)
    assert noted(seen[1280], "page") == "page fits"
    assert noted(seen[1280], "boxes") == "0"
    assert noted(seen[400], "page") == "page fits"
    assert int(noted(seen[400], "boxes")) >= 2
