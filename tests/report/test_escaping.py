"""Names are escaped in pages, figures and documents."""

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

import mimicfl as mf
from mimicfl.report import figures, html, theory_figures
from mimicfl.report.paper import _as_text
from mimicfl.report.report import write_report
from mimicfl.report.summary import group
from mimicfl.text import visible
from tests.conftest import forge
from tests.report.test_report import history

NASTY = "<!--<script> </script> & \" ' \u2028 \x1b[2J ]]> \u202e"


def data_of(page):
    return re.search(r"const DATA = (.*?);\n", page).group(1)


def test_script_data_contains_no_html_special_characters(tmp_path):
    text = html.in_script({NASTY: [NASTY, "\ud800"]})
    assert text.isascii()
    assert not set("<>&") & set(text)
    assert json.loads(text) == {NASTY: [NASTY, "\ud800"]}


@pytest.mark.slow
def test_settings_are_escaped_in_the_page(tmp_path):
    mf.run(mf.Experiment(rounds=2, steps=1, num_clients=4, availability="always"), tmp_path / "run")
    facts = json.loads((tmp_path / "run" / "env.json").read_text())
    (tmp_path / "run" / "env.json").write_text(json.dumps(facts | {"gpu": NASTY + "\ud800", NASTY: 1}))
    forge(tmp_path / "run", dict.fromkeys(("algorithm", "availability", "dataset", "model", "lr"), NASTY))
    page = write_report([tmp_path / "run"]).page.read_text()
    assert page.count("<script") == page.count("</script") == 1
    assert "<!--" not in page
    assert not {"\x1b", "\u2028", "\u202e"} & set(page)
    assert json.loads(data_of(page))["groups"][0]["label"].startswith(visible(NASTY, keep="").split(":")[0])
    assert "Content-Security-Policy" in page


@pytest.mark.slow
def test_figures_show_names_literally(tmp_path):
    """Dollar signs do not start a formula, missing glyphs cause no warning, and SVG files stay valid XML."""
    for name in (r"$\frac{$", "$a$ and $b$", r"\$", NASTY, "漢字 \U0001f600", "]]>"):
        groups = group([history([0.5, 0.6], name, dataset=name, availability=name, num_clients=1, seed=0)])
        for kind in ("png", "svg"):
            figures.save(figures.curves(groups), tmp_path / f"curves.{kind}")
        ElementTree.parse(tmp_path / "curves.svg")
        figures.save(figures.availability(groups[0].runs[0].available, name), tmp_path / "availability.png")


@pytest.mark.slow
def test_theory_figures_show_names_literally(tmp_path):
    settings = {"dataset": "synthetic:quadratic", "batch_size": "full", "num_clients": 4, "rounds": 3, "steps": 1, "lr": 0.01}
    run = mf.run(mf.Experiment(**settings, availability="always", diagnose="every=1"))
    run.config |= {"algorithm": r"$\frac{$", "global_lr": r"$\nosuch$", "dataset": "$x$"}
    drawn, _ = theory_figures.draw(group([run]))
    assert {"norms", "errors", "parts", "certificate"} <= drawn.keys()
    for name, figure in drawn.items():
        figures.save(figure, tmp_path / f"{name}.png")


def test_text_of_records_is_escaped_for_markdown():
    assert _as_text("NVIDIA H200, Intel(R) Xeon(R) @ 2.1GHz") == "NVIDIA H200, Intel(R) Xeon(R) @ 2.1GHz"
    assert _as_text("a\n\n# b <script> [x](y) |") == r"a\\x0a\\x0a\# b \<script\> \[x\](y) \|"
