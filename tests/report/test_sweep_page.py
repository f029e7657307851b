"""The page of a sweep in a real browser: panels, filters, rates, zoom, axes, export, and its size on a phone."""

import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image

import mimicfl as mf
from mimicfl.report.report import write_report
from tests.browser import chromium, needs_chromium
from tests.report.test_browser import CATCH_ERRORS, data_attribute, rendered

pytestmark = [pytest.mark.slow, needs_chromium]
USE = """
<script>
addEventListener("load", () => {
  const note = (key, value) => { document.body.dataset[key] = value; };
  const panels = () => document.querySelectorAll("#chart svg.plot").length;
  const lines = () => document.querySelectorAll("#chart path[fill=none]").length;
  const set = (id, value) => { const node = document.getElementById(id); node.value = value; node.onchange(); };
  const check = (id, value) => { const node = document.getElementById(id); node.checked = value; node.onchange(); };
  note("panels", panels()); note("lines", lines());
  set("rates-shown", "all"); note("linesAllRates", lines());
  set("facet", "*"); note("panelsAll", panels());
  set("facet", ""); note("panelsNone", panels());
  set("facet", "availability"); set("rates-shown", "best");
  const box = [...document.querySelectorAll("#filters fieldset")].find((f) => f.textContent.includes("static")).querySelector("input");
  box.checked = false; box.onchange();
  note("panelsFiltered", panels());
  note("notShown", document.getElementById("filtered").textContent);
  note("rowsFiltered", [...document.querySelectorAll("tr[data-group]")].filter((row) => !row.hidden).length);
  box.checked = true; box.onchange();
  note("rings", document.querySelectorAll("#rates circle.best").length + "," + document.querySelectorAll("#rates circle.edge").length);
  for (const axis of ["round", "uploads", "megabytes", "seconds"]) { set("axis", axis); note("axis" + axis, lines()); }
  set("axis", "round");
  check("logx", true); note("logx", document.querySelector("#chart").textContent.includes("NaN") ? "NaN" : lines()); check("logx", false);
  set("metric", "own_number"); note("own", document.querySelector("#chart").textContent.includes("own number"));
  set("metric", "test_accuracy");
  const plot = document.querySelector("#chart svg.plot"), at = plot.getBoundingClientRect();
  const event = (x) => ({ clientX: at.left + x * at.width, clientY: at.top + 60, bubbles: true });
  const mouse = (kind, x) => document.querySelector("#chart svg.plot").dispatchEvent(new PointerEvent(kind, event(x)));
  const marks = () => [...document.querySelector("#chart svg.plot").querySelectorAll("text")].map((t) => t.textContent).join();
  const before = marks();
  const drag = (from, to) => { mouse("pointerdown", from); mouse("pointermove", (from + to) / 2); mouse("pointerup", to); };
  drag(0.4, 0.8);
  const below = [...document.querySelector("#chart svg.plot").querySelectorAll("text[text-anchor=middle]")];
  note("wholeRounds", below.every((mark) => !mark.textContent.includes(".")));
  note("zoomed", marks() !== before && !document.getElementById("unzoom").hidden);
  document.getElementById("unzoom").onclick(); note("unzoomed", marks() === before);
  drag(0.44, 0.48);  // less than a round: no point of a curve is inside
  const outside = (path) => {
    const all = path.getBBox(), box = path.ownerSVGElement.viewBox.baseVal;
    return all.y > box.y + box.height || all.y + all.height < box.y;
  };
  const nan = document.querySelector("#chart").textContent.includes("NaN");
  note("between", nan || [...document.querySelectorAll("#chart path[fill=none]")].every(outside));
  document.getElementById("unzoom").onclick();
  mouse("pointerdown", 0.5); mouse("pointerup", 0.5);  // a tap
  note("tapped", !tip.hidden && tip.textContent.includes("MimiC") && document.getElementById("unzoom").hidden);
  hideTip();
  note("covered", [...document.querySelectorAll("#rates circle:not([fill=none])")].filter((dot) => {
    dot.scrollIntoView({ block: "center" });
    const box = dot.getBoundingClientRect();
    return !document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2)?.dataset.tip;
  }).length);
  const axis = { low: 0, high: 2, label: "" }, point = { x: [1], y: [1], s: [0], every: [], color: "red", dash: [0, []] };
  note("single", curvesSvg({ lines: [point] }, frame({ width: 300, height: 200 }, axis, axis), false).includes("<circle"));
  note("csv", curvesCsv().split("\\n").length); note("csvHead", curvesCsv().split("\\n")[0]);
  note("latex", DATA.exports.latex.split("\\n")[0]);
  note("svg", chartSvg().includes("<svg") && !chartSvg().includes("NaN"));
  document.getElementById("curves-png").onclick();
  note("folded", folded("availability label-correlated:classes=[0,1,2],rare=0.02", 34).join("|"));
  const named = (node, name) => [...document.querySelectorAll(node)].filter((each) => each.textContent.includes(name));
  const strokes = (node, name) => [...new Set(named(node, name).map((each) => each.querySelector("line").getAttribute("stroke")))].join();
  note("swatches", ["FedAvg", "SCAFFOLD", "MimiC"].every((name) => strokes("tr[data-group]", name) === strokes("#legend button", name)));
  const filters = document.querySelector(".filters");
  filters.open = true; filters.ontoggle(); filters.open = false; recall(); note("unfolded", filters.open);
  note("hash", decodeURIComponent(location.hash).includes("availability"));
  const hide = () => document.querySelectorAll("#legend button").forEach((_, k) => document.querySelectorAll("#legend button")[k].click());
  const disabled = () => ["csv", "png", "svg"].map((kind) => document.getElementById("curves-" + kind).disabled).join();
  hide(); note("exportsHidden", disabled()); hide(); note("exportsShown", disabled());
  note("thirds", document.querySelectorAll("#participation td").length);
  note("dots", document.querySelectorAll("#scatter circle").length);
});
</script>
"""


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """A sweep of three algorithms, three rates and two patterns, with a metric of its own."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "grid.toml").write_text(
        'rounds = 6\nepochs = 1\nnum_clients = 9\n[grid]\nalgorithm = ["fedavg", "scaffold", "mimic"]\nlr = [0.02, 0.1, 0.5]\n'
        'availability = ["static:0.3", "time-varying:0.3"]\nseed = 2\n'
    )
    mf.sweep(folder / "grid.toml", folder / "runs", callbacks=[lambda now: {"own_number": now.row["round"] / 3}])
    return folder


@pytest.fixture(scope="module")
def dom(sweep):
    page = write_report([sweep / "runs"], sweep / "used").page
    page.write_text(page.read_text().replace("<head>", "<head>" + CATCH_ERRORS, 1).replace("</body>", USE + "</body>"))
    return rendered(page)


def test_no_script_errors(dom):
    assert data_attribute(dom, "ready") == "yes"
    assert "data-error" not in dom.split("<head>")[0]


def test_panels_best_rates_and_filters(dom):
    assert data_attribute(dom, "panels") == "2"  # by pattern
    assert data_attribute(dom, "lines") == "6"  # three algorithms each, at their best rates
    assert data_attribute(dom, "lines-all-rates") == "18"
    assert data_attribute(dom, "panels-all") == "6"
    assert data_attribute(dom, "panels-none") == "1"
    assert data_attribute(dom, "panels-filtered") == "1"
    assert data_attribute(dom, "rows-filtered") == "9"
    assert "static:0.3" in data_attribute(dom, "not-shown")  # also while the filters are folded


def test_the_best_rate_is_ringed_and_the_edge_marked(dom):
    inner, edge = map(int, data_attribute(dom, "rings").split(","))
    assert inner + edge == 6
    assert edge == dom.count('<span class="edge">')
    assert data_attribute(dom, "covered") == "0"  # by the bars of other algorithms


def test_axes_zoom_and_own_metrics(dom):
    for axis in ("round", "uploads", "megabytes", "seconds"):
        assert data_attribute(dom, f"axis{axis}") == "6"
    assert data_attribute(dom, "logx") == "6"
    assert data_attribute(dom, "own") == "true"
    assert data_attribute(dom, "zoomed") == "true"
    assert data_attribute(dom, "unzoomed") == "true"
    assert "<th>own number</th>" in dom


def test_a_zoom_between_two_rounds_shows_the_curves(dom):
    assert data_attribute(dom, "between") == "false"
    assert data_attribute(dom, "whole-rounds") == "true"
    assert data_attribute(dom, "tapped") == "true"


def test_a_run_with_one_round_has_a_point(dom):
    assert data_attribute(dom, "single") == "true"


def test_export(dom):
    assert data_attribute(dom, "csv-head") == "curve,panel,round,test_accuracy,std"
    assert int(data_attribute(dom, "csv")) >= 6 * 5 + 2
    assert data_attribute(dom, "latex").startswith("\\begin{tabular}")
    assert data_attribute(dom, "svg") == "true"
    assert int(data_attribute(dom, "png")) > 10_000
    assert data_attribute(dom, "hash") == "true"
    assert data_attribute(dom, "unfolded") == "true"  # as it was before a live page was loaded again
    assert data_attribute(dom, "folded") == "availability|label-correlated:classes=[0,1,2],|rare=0.02"


def test_the_table_has_the_colours_of_the_chart(dom):
    assert data_attribute(dom, "swatches") == "true"


def test_clients_and_participation_groups(dom):
    assert int(data_attribute(dom, "thirds")) == 6 * 4  # three thirds and the gap
    assert int(data_attribute(dom, "dots")) == 3 * 9  # of the chosen schedule


def test_screenshots(sweep, tmp_path):
    """Light and dark, wide and narrow; set MIMICFL_SCREENSHOTS to a folder to keep them."""
    page = write_report([sweep / "runs"], sweep / "shown").page
    text = page.read_text()
    sizes = set()
    for theme in ("light", "dark"):
        page.write_text(text.replace("(prefers-color-scheme: dark)", "all" if theme == "dark" else "not all"))
        for width in (1280, 500):  # headless Chromium has no narrower window
            shot = tmp_path / f"{theme}-{width}.png"
            chromium(page.as_uri(), tmp_path / shot.stem, f"--window-size={width},4200", f"--screenshot={shot}")
            sizes.add(shot.stat().st_size)
            if target := os.environ.get("MIMICFL_SCREENSHOTS"):
                shutil.copy(shot, target)
    assert min(sizes) > 50_000  # a blank page is smaller
    assert len(sizes) == 4


PHONE = """
<script>
addEventListener("load", () => {
  const small = [...document.querySelectorAll("#chart text")].map((t) => t.getBoundingClientRect().height).filter((h) => h > 0);
  const page = document.documentElement;
  parent.postMessage([page.scrollWidth > page.clientWidth ? "page too wide" : "page fits", Math.min(...small)], "*");
});
</script>
"""
FRAME = """
<body><script>onmessage = (event) => { [document.body.dataset.page, document.body.dataset.text] = event.data; };</script>
<iframe src="phone.html" width="480" height="900"></iframe></body>
"""


def test_text_is_readable_at_480_pixels(sweep):
    page = write_report([sweep / "runs"], sweep / "phone").page
    (page.parent / "phone.html").write_text(page.read_text().replace("</body>", PHONE + "</body>"))
    (page.parent / "frame.html").write_text(FRAME)
    dom = rendered(page.parent / "frame.html")
    assert data_attribute(dom, "page") == "page fits"
    assert float(data_attribute(dom, "text")) >= 11  # pixels


def test_the_page_stays_small(sweep):
    page = write_report([sweep / "runs"], sweep / "size").page
    found = re.search(r"const DATA = (.*?);\n", page.read_text(), re.DOTALL)
    assert len(json.loads(found[1])["groups"]) == 18
    assert page.stat().st_size < 400_000


def test_what_is_hidden_cannot_be_exported(dom):
    assert data_attribute(dom, "exports-hidden") == "true,true,true"
    assert data_attribute(dom, "exports-shown") == "false,false,false"


def test_the_printed_page_is_light(sweep, tmp_path):
    """Also where the page is dark on the screen."""
    page = write_report([sweep / "runs"], sweep / "printed").page
    page.write_text(page.read_text().replace("(prefers-color-scheme: dark)", "all"))
    pdf = tmp_path / "page.pdf"
    chromium(page.as_uri(), tmp_path / "profile", "--no-pdf-header-footer", f"--print-to-pdf={pdf}")
    if shutil.which("pdftoppm") is None:
        pytest.skip("no pdftoppm on this machine")
    subprocess.run(["pdftoppm", "-r", "20", "-singlefile", "-png", pdf, tmp_path / "sheet"], check=True)
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert np.median(np.asarray(sheet.convert("L"))) > 200
