"""Mean curves reach what the table shows, or the figure and the page say that they do not."""

import pytest

from mimicfl.report import figures, summary
from mimicfl.report.curves import EARLY
from mimicfl.report.page_data import page_data
from mimicfl.report.report import write_report
from tests.browser import chromium, needs_chromium
from tests.report.test_rates_and_export import history


def runs(*lengths, uploads=None, algorithm="fedavg"):
    """Runs of these numbers of rounds; `uploads`: in how many rounds each of them uploads, all of them by default."""
    found = []
    for seed, (rounds, most) in enumerate(zip(lengths, uploads or lengths, strict=True)):
        run = history([t / 100 for t in range(rounds)], algorithm=algorithm, seed=seed)
        for t, row in enumerate(run.rows):
            row["uploads"] = min(t + 1, most)
        found.append(run)
    return summary.group(found)


def drawn(groups):
    [axes] = figures.overview(groups).axes
    return axes.get_xlabel(), max(axes.get_lines()[0].get_xdata())


def test_uploads_if_all_seeds_upload_equally_often():
    assert drawn(runs(10, 12, uploads=(8, 8))) == ("model uploads", 8)
    assert drawn(runs(10)) == ("model uploads", 10)


def test_rounds_if_the_seeds_upload_differently_often():
    groups = runs(10, 10, 10, uploads=(6, 7, 9))
    assert drawn(groups) == ("rounds", 10)
    assert page_data(groups)["axis"] == "round"
    assert groups[0].curve("test_accuracy", "round").mean[-1] == pytest.approx(0.09)  # the table's value


def test_a_mean_that_ends_early_says_so():
    label, last = drawn(runs(10, 12))
    assert last == 10
    assert label == f"model uploads\n{EARLY}"


def test_panels_follow_the_same_rule():
    found = [run for name in "abc" for rate in (1, 2, 3) for run in runs(10, 10, uploads=(6, 7), algorithm=name)[0].runs]
    for k, run in enumerate(found):
        run.config["lr"] = k // 2 % 3
    groups = summary.group(found)
    assert len(groups) == 9
    figure = figures.overview(groups)
    assert figure.get_supxlabel() == "rounds"
    assert {max(line.get_xdata()) for axes in figure.axes for line in axes.get_lines()} == {10}


NOTE = """<script>addEventListener("load", () => {
  const note = (key, value) => { document.body.dataset[key] = value; }, axis = document.getElementById("axis");
  note("first", axis.value + "; " + document.getElementById("early").textContent);
  axis.value = "uploads"; axis.onchange();
  note("then", axis.value + "; " + document.getElementById("early").textContent);
  note("exported", chartSvg().includes("Mean curves end"));
});</script>"""


@pytest.mark.slow
@needs_chromium
def test_the_page_follows_the_same_rule(tmp_path):
    import mimicfl as mf

    found = mf.compare(mf.Experiment(rounds=20, availability="static:0.02", epochs=1), ["fedavg"], [0, 1], tmp_path / "runs")
    assert len({run.rows[-1]["uploads"] for run in found["fedavg"]}) == 2  # the seeds were chosen so
    page = write_report([tmp_path / "runs"]).page
    page.write_text(page.read_text().replace("</body>", NOTE + "</body>"))
    dom = chromium(page.as_uri(), tmp_path / "browser", "--dump-dom")
    assert 'data-first="round; "' in dom
    assert f'data-then="uploads; {EARLY}"' in dom
    assert 'data-exported="true"' in dom
