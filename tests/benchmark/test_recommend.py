"""`mimicfl recommend`: the nearest recorded pattern, and what it says about the given schedule."""

import pytest

from mimicfl.benchmark.recommend import profile
from mimicfl.cli.main import main
from mimicfl.settings import Experiment


@pytest.mark.slow
@pytest.mark.parametrize(
    ("availability", "pattern", "yours"),
    [
        ("static:0.3", "exchangeable", "30 % of the rounds; independently from round to round, independently of each other"),
        ("static:0.2", "exchangeable", "independently from round to round"),
        ("static:0.9", "exchangeable", "90 % of the rounds"),
        ("always", "exchangeable", "every client is always available"),
        ("time-varying:0.3", "exchangeable", "30 % of the rounds; independently"),
        ("markov:0.2,0.4", "bursty", "for several rounds in a row, independently of each other"),
        ("bounded:50", "bounded", "some much more often than others"),
        ("dirichlet:0.5,mean=0.3,least=0.01", "heterogeneous", "independently of each other, some much more often than others"),
    ],
)
def test_the_structure_decides_and_then_the_rate(availability, pattern, yours, capsys):
    assert main(["recommend", "--availability", availability]) == 0
    out = capsys.readouterr().out
    assert f"recorded patterns: {pattern!r}" in out
    assert yours in next(line for line in out.splitlines() if line.startswith("your schedule:"))
    assert "your clients resemble" not in out  # what the recorded pattern does is not a fact about the given one


@pytest.mark.slow
def test_rates_unlike_all_recorded_ones_are_named(capsys):
    assert main(["recommend", "--availability", "static:0.9"]) == 0
    assert "not close in rate (clients are available in 10 % of the rounds there, 90 % in yours; no recorded rate is close)" in (
        capsys.readouterr().out
    )
    assert main(["recommend", "--availability", "static:0.1"]) == 0
    assert "not close" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_forced_first_round_is_not_part_of_a_profile():
    """Thirty clients that all participate in one round of 400 would look synchronised."""
    cold, warm = (
        profile(Experiment(dataset="digits", partition="shards:2", availability=f"dirichlet:0.3,mean=0.1,least=0.01{more}").resolved())
        for more in ("", ",warm_start=true")
    )
    assert warm.distance(cold) < 0.2
