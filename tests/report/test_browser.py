"""The page in a real browser: it draws, it has no script error, and its controls work."""

import re
import shutil
import subprocess

import pytest

import mimicfl as mf
from mimicfl.report.report import build

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


@pytest.fixture(scope="module")
def dom(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    mf.compare(mf.Experiment(rounds=10, availability="static:0.2"), ["fedavg", "mimic"], [0, 1], folder)
    page = build([folder]).page
    page.write_text(page.read_text().replace("<head>", "<head>" + WATCH).replace("</body>", VISIT + "</body>"))
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


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
