"""The report page in a real browser: it renders without script errors, and its controls work."""

import json
import re
import tomllib

import pytest

import mimicfl as mf
from mimicfl.report.report import write_report
from tests.browser import chromium, needs_chromium
from tests.conftest import forge

pytestmark = [pytest.mark.slow, needs_chromium]
# Uses the page: hides FedAvg, shows individual seeds, changes axis, metric and schedule, and hovers over the charts.
CATCH_ERRORS = """<script>window.onerror = (message) => { document.documentElement.dataset.error = message; };</script>"""
USE_PAGE = """
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
  const at = (x, y) => ({ clientX: x, clientY: y, bubbles: true });
  const move = (node, x, y) => {
    node.dispatchEvent(new PointerEvent("pointermove", at(x, y)));
    node.dispatchEvent(new MouseEvent("mousemove", at(x, y)));
  };
  move(document.querySelector("#chart svg"), box.left + box.width / 2, box.top + box.height / 2);
  note("tip", document.getElementById("tip").textContent);
  const canvas = document.getElementById("availability"), corner = canvas.getBoundingClientRect();
  move(canvas, corner.left + 3, corner.top + 3);
  note("cell", document.getElementById("tip").textContent);
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  note("colors", new Set(Array.from({ length: pixels.length / 4 }, (_, k) => pixels.slice(4 * k, 4 * k + 3).join())).size);
});
</script>
"""


# Reports whether the page is too wide, and how many scrollable boxes overflow.
MEASURE = """
<script>
addEventListener("load", () => {
  const boxes = [...document.querySelectorAll(".scroll")].filter((box) => box.scrollWidth > box.clientWidth).length;
  const page = document.documentElement;
  parent.postMessage([page.scrollWidth > page.clientWidth ? "page too wide" : "page fits", boxes], "*");
});
</script>
"""
# In a frame, because browser windows have a minimum width and frames have none.
FRAME = """
<body><script>onmessage = (event) => { [document.body.dataset.page, document.body.dataset.boxes] = event.data; };</script>
<iframe src="page.html" width="WIDTH" height="900"></iframe></body>
"""


def rendered(page):
    return chromium(page.as_uri(), page.parent, "--window-size=1400,1000", "--dump-dom")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """The folder of a page with many groups and long names."""
    folder = tmp_path_factory.mktemp("sweep")
    for k, pattern in enumerate(("label-correlated:classes=[0,1,2],rare=0.02,common=0.3", "static:0.2", "time-varying:0.1")):
        settings = mf.Experiment(rounds=2, availability=pattern, partition="classes:2")
        mf.compare(settings, ["fedavg", "fedprox:mu=0.01", "scaffold", "mimic"], [0], folder / str(k))
    page = write_report([folder], folder).page
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
    """The page of runs in which every setting and every version is an injection attempt."""
    folder = tmp_path_factory.mktemp("hostile")
    for k, name in enumerate(HOSTILE):
        run = folder / str(k)
        mf.run(mf.Experiment(rounds=2, steps=1, num_clients=4, availability="always"), run)
        kept = tomllib.loads((run / "config.toml").read_text())
        nasty = {key: name for key, value in kept.items() if isinstance(value, str)}
        forge(run, kept | nasty | {"plugins": [name]})
        facts = json.loads((run / "env.json").read_text())
        (run / "env.json").write_text(json.dumps(dict.fromkeys(facts, name) | {name: name}))
    page = write_report([folder]).page
    page.write_text(page.read_text().replace("<head>", "<head>" + CATCH_ERRORS, 1).replace("</body>", USE_PAGE + "</body>"))
    return rendered(page)


@pytest.fixture(scope="module")
def dom(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    mf.compare(mf.Experiment(rounds=10, availability="static:0.2"), ["fedavg", "mimic"], [0, 1], folder)
    page = write_report([folder]).page
    page.write_text(page.read_text().replace("<head>", "<head>" + CATCH_ERRORS).replace("</body>", USE_PAGE + "</body>"))
    return rendered(page)


def data_attribute(dom, key):
    found = re.search(rf'<body[^>]*\bdata-{key}="([^"]*)"', dom)
    return found.group(1) if found else None


@pytest.mark.slow
def test_page_renders_without_script_errors(dom):
    assert data_attribute(dom, "ready") == "yes"
    assert "data-error" not in dom.split("<head>")[0]
    assert "MimiC" in dom


def test_controls_change_the_curves(dom):
    assert data_attribute(dom, "lines") == "2"
    assert data_attribute(dom, "lines-after-hiding") == "1"
    assert data_attribute(dom, "lines-with-seeds") == "6"
    assert data_attribute(dom, "axis-title") == "true"
    assert data_attribute(dom, "metric-title") == "true"


def test_hovering_shows_values(dom):
    assert "FedAvg" in data_attribute(dom, "tip")
    assert "MimiC" in data_attribute(dom, "tip")
    assert "round 0, client 0" in data_attribute(dom, "cell")


def test_availability_and_tables_are_drawn(dom):
    assert int(data_attribute(dom, "colors")) == 2
    assert dom.count("<td") > 60  # class and client tables


@pytest.mark.slow
def test_injected_markup_is_shown_and_not_executed(hostile):
    assert data_attribute(hostile, "ready") == "yes"
    head = hostile.split("<head>")[0]
    assert "data-error" not in head
    assert "data-hacked" not in head
    assert data_attribute(hostile, "lines") == str(len(HOSTILE))
    assert data_attribute(hostile, "cell").startswith("round 0, client 0")
    assert "&lt;!--&lt;script&gt;" in hostile
    assert "<img src" not in hostile


@pytest.mark.slow
def test_tables_fit_a_wide_screen_and_scroll_on_a_phone(sweep):
    pages = {}
    for width in (1280, 400):
        frame = sweep / f"frame{width}.html"
        frame.write_text(FRAME.replace("WIDTH", str(width)))
        pages[width] = rendered(frame)
    assert data_attribute(pages[1280], "page") == "page fits"
    assert data_attribute(pages[1280], "boxes") == "0"
    assert data_attribute(pages[400], "page") == "page fits"
    assert int(data_attribute(pages[400], "boxes")) >= 2
