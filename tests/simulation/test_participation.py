"""Selection, deadlines, the clock and participation rates in whole runs."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import mimicfl as mf

BASE = {"num_clients": 8, "epochs": 1, "rounds": 8, "availability": "static:0.7", "engine": "plain"}


def test_rows_say_how_many_clients_reach_each_stage_and_why_the_others_do_not():
    history = mf.run(mf.Experiment(**BASE, select="uniform:4", speed="lognormal:100,1", bandwidth="10", deadline=1.5))
    for row in history.rows:
        assert row["active"] <= row["selected"] <= min(4, row["available"])
        assert sum(row["missing"].values()) + row["active"] == 8
    assert any("late" in row["missing"] for row in history.rows)
    times = [0.0, *(row["virtual_seconds"] for row in history.rows)]
    assert all(0 < b - a <= 1.5 + 1e-9 for a, b in itertools.pairwise(times))


def test_a_round_takes_download_training_and_upload_of_the_slowest_client():
    e = mf.Experiment(**BASE | {"rounds": 2, "availability": "always"}, speed="40", bandwidth="2")
    history = mf.run(e)
    d = history.params.numel()
    samples = int(np.max(history.class_counts.sum(axis=1)))
    assert history.rows[0]["virtual_seconds"] == pytest.approx(samples / 40 + 2 * 32 * d / 2e6, rel=1e-6)
    assert history.rows[1]["virtual_seconds"] == pytest.approx(2 * history.rows[0]["virtual_seconds"])


@pytest.mark.slow
def test_a_clock_alone_changes_no_result():
    plain, timed = (mf.run(mf.Experiment(**BASE, **given)) for given in ({}, {"speed": "lognormal:100,1"}))
    assert torch.equal(plain.params, timed.params)
    assert "virtual_seconds" not in plain.rows[0]
    assert {key: value for key, value in timed.rows[3].items() if key in plain.rows[3] and key != "seconds"} == {
        key: value for key, value in plain.rows[3].items() if key != "seconds"
    }


def test_power_of_choice_selects_clients_with_large_losses(digits):
    seen = {}

    def watch(candidates):
        losses = candidates.losses(candidates.available)
        seen[candidates.t] = candidates.available[np.argsort(-losses, kind="stable")[:2]]
        return seen[candidates.t]

    history = mf.simulate(**digits, rounds=4, local=mf.LocalSGD(steps=2), select=watch, engine="plain")
    assert [row["clients"] for row in history.rows] == [sorted(seen[t].tolist()) for t in range(4)]
    everybody = len(digits["split"])
    same = mf.simulate(
        **digits, rounds=4, local=mf.LocalSGD(steps=2), select=mf.availability.PowerOfChoice(2, candidates=everybody), engine="plain"
    )
    assert torch.equal(same.params, history.params)


def test_a_budget_of_uploads_needs_a_selection_that_picks_a_client(digits):
    """A round without clients uploads nothing: the run would end with fewer uploads than asked for."""
    given = {**digits, "rounds": None, "local": mf.LocalSGD(steps=1), "engine": "plain"}
    assert mf.simulate(**given, uploads=3, select=lambda c: c.available[:1]).rows[-1]["uploads"] == 3
    with pytest.raises(mf.UsageError, match=r"round 1.*rounds instead"):
        mf.simulate(**given, uploads=3, select=lambda c: c.available[: 1 - c.t])
    given["rounds"] = 3
    assert [row["active"] for row in mf.simulate(**given, select=lambda c: c.available[: 1 - c.t % 2]).rows] == [1, 0, 1]


@pytest.mark.parametrize("asked", [[-1], [1000], [0.5], 3])
def test_losses_of_clients_that_do_not_exist_are_refused(digits, asked):
    with pytest.raises(mf.UsageError, match="client numbers from 0 to"):
        mf.simulate(**digits, rounds=1, local=mf.LocalSGD(steps=1), select=lambda c: c.available[: len(c.losses(asked))], engine="plain")


@pytest.mark.slow
@pytest.mark.parametrize(
    "given", [{"select": "power-of-choice:2"}, {"select": "over-select:2,1.5", "speed": "lognormal:50,1"}, {"speed": "50", "deadline": 9.0}]
)
def test_interrupted_runs_resume_bit_for_bit(tmp_path, given):
    e = mf.Experiment(**BASE, checkpoint_every=3, **given)
    whole = mf.run(e)

    def stop(settings, row, rounds):
        if row["round"] == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mf.run(e, tmp_path / "broken", stop)
    assert torch.equal(mf.run(e, tmp_path / "broken").params, whole.params)
    short = mf.run(mf.Experiment(**BASE | {"rounds": 5}, checkpoint_every=2, **given), tmp_path / "short")
    assert len(short.rows) == 5
    longer = mf.run(e, tmp_path / "short")
    assert torch.equal(longer.params, whole.params)
    keep = ("clients", "virtual_seconds", "missing", "bytes_down")
    assert [[row.get(key) for key in keep] for row in longer.rows] == [[row.get(key) for key in keep] for row in whole.rows]


def test_another_selection_or_clock_is_another_run(tmp_path):
    e = mf.Experiment(**BASE, select="uniform:3", speed="50")
    mf.run(e, tmp_path)
    for other in ({"select": "uniform:4"}, {"speed": "60"}, {"deadline": 50.0}):
        changed = mf.Experiment(**BASE, **{"select": "uniform:3", "speed": "50"} | other)
        with pytest.raises(mf.UsageError, match="different run"):
            mf.run(changed, tmp_path)
    with pytest.raises(mf.UsageError, match="different run"):
        mf.run(mf.Experiment(**BASE, select="uniform:3"), tmp_path)


@dataclass(frozen=True)
class Weighted(mf.Algorithm):
    """Records the rates it is told."""

    needs_participation_rates = True

    def aggregate(self, state, active, g, step):
        TOLD.append((active.tolist(), step.participation_rates.tolist()))
        state.w = state.w - step.eta * (step.share / step.participation_rates).to(g.dtype) @ g


TOLD = []


def test_algorithms_that_need_rates_are_told_them(digits):
    common = {**digits, "algorithm": Weighted(), "rounds": 6, "local": mf.LocalSGD(steps=1), "engine": "plain"}
    TOLD.clear()
    p = [0.5 + 0.01 * i for i in range(len(digits["split"]))]
    mf.simulate(**common, availability=mf.availability.Static(p))
    assert all(rates == pytest.approx([p[i] for i in active]) for active, rates in TOLD)
    TOLD.clear()
    mf.simulate(**common, availability=mf.availability.Static(p), select="uniform:3", participation_rates="estimated")
    counts = np.zeros(len(p))
    for t, (active, rates) in enumerate(TOLD):
        counts[active] += 1
        assert rates == pytest.approx((counts[active] / (t + 1)).tolist())
    with pytest.raises(mf.UsageError, match="participation_rates=estimated"):
        mf.simulate(**common, availability=mf.availability.Static(p), select="uniform:3")


def test_in_a_forced_round_every_client_participates_with_probability_one(digits):
    p = [0.5 + 0.01 * i for i in range(len(digits["split"]))]
    TOLD.clear()
    given = {**digits, "algorithm": Weighted(), "rounds": 3, "local": mf.LocalSGD(steps=1), "engine": "plain"}
    mf.simulate(**given, availability=mf.availability.Static(p, warm_start=True))
    assert TOLD[0] == (list(range(30)), [1.0] * 30)
    assert all(rates == pytest.approx([p[i] for i in active]) for active, rates in TOLD[1:])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"select": "uniform:9"}, "only 8"),
        ({"deadline": 3.0}, "take time"),
        ({"deadline": 1e-6, "speed": "50"}, "no client can meet"),
        ({"deadline": -1.0}, "at least 0"),
        ({"speed": "fast"}, "unknown"),
        ({"select": "power-of-choice:2", "diagnose": "every=2"}, "before the run"),
        ({"select": "power-of-choice:2", "speed": "50", "deadline": 9.0, "rounds": None, "uploads": 5}, "give rounds"),
    ],
)
def test_mistakes_raise_usage_error(given, words):
    with pytest.raises(mf.UsageError, match=words):
        mf.run(mf.Experiment(**BASE | given))
