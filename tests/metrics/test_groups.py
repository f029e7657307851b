"""Metrics on every client's own test samples, and by how often clients participate."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import mimicfl as mf
from mimicfl.metrics.groups import Visits, participation_groups, summary

ACTIVE = [[0, 1, 2, 3], [1, 2, 3], [2, 3], [0], [3]]  # counts 2, 2, 3, 4 and none for clients 4 and 5; client 1 was seen before client 0


class TestGroups:
    def test_by_participation_so_far(self):
        found = {name: group.tolist() for name, group in participation_groups(Visits(6, ACTIVE)).items()}
        assert found == {"never_seen": [4, 5], "rarest_tenth": [1], "rare": [0], "often": [2, 3]}

    def test_every_client_is_in_exactly_one_group(self):
        rng = np.random.default_rng(0)
        for clients in (1, 2, 3, 11, 40):
            active = [np.flatnonzero(rng.random(clients) < rng.random()).tolist() for _ in range(7)]
            groups = participation_groups(Visits(clients, active))
            assert sorted(np.concatenate(list(groups.values())).tolist()) == list(range(clients))
            seen = clients - len(groups["never_seen"])
            assert len(groups["rarest_tenth"]) == -(-seen // 10)

    def test_every_round_is_counted_once(self):
        visits, rows = Visits(6), [{"clients": clients} for clients in ACTIVE]
        for t in (0, 0, 2, 3, 3, 4):  # rounds that are evaluated, some of them twice; others are caught up with
            visits.until(rows[:t], ACTIVE[t])
        assert visits.rounds == 5
        assert visits.counts.tolist() == Visits(6, ACTIVE).counts.tolist() == [2, 2, 3, 4, 0, 0]
        assert visits.last.tolist() == Visits(6, ACTIVE).last.tolist()

    def test_summary_equals_a_count_by_hand(self):
        values = [0.5, 0.1, 0.7, 0.9, None, 0.3]
        found = summary(values, Visits(6, ACTIVE), higher_is_better=True)
        assert found["clients_mean"] == pytest.approx(0.5)
        assert found["clients_worst_tenth"] == pytest.approx(0.1)
        assert found["clients_spread"] == pytest.approx(np.std([0.5, 0.1, 0.7, 0.9, 0.3]))
        assert found["clients_never_seen"] == pytest.approx(0.3)
        assert (found["clients_rarest_tenth"], found["clients_rare"]) == pytest.approx((0.1, 0.5))
        assert found["clients_often"] == pytest.approx(0.8)
        assert summary(values, Visits(6, ACTIVE), higher_is_better=False)["clients_worst_tenth"] == pytest.approx(0.9)


def problem(task=None, **change):
    """Four clients; client 3 has no test samples of its own."""
    torch.manual_seed(3)
    x = torch.randn(48, 5, dtype=torch.float64)
    y = x[:, :2] * 2 if task == "regression" else (x[:, 0] > 0).long()
    ids = np.arange(48) % 4
    data = mf.Data(x, y, x[:24], y[:24], ids=ids, test_ids=np.where(ids[:24] == 3, 0, ids[:24]))
    given = {"model": nn.Linear(5, 2).double(), "data": data, "split": mf.partition.by_ids(ids), "rounds": 3, "task": task}
    return given | {"availability": "static:0.5", "local": mf.LocalSGD(steps=3, lr=0.1)} | change


def naive(history, given, metric):
    """The metric of the final model on each client's test samples."""
    model, data = history.model(), given["data"]
    found = []
    for client in range(4):
        rows = np.flatnonzero(data.test_ids == client)
        output, target = model(data.x_test[rows]).detach(), data.y_test[rows]
        found.append(metric(output, target) if len(rows) else None)
    return found


class TestRuns:
    @pytest.mark.parametrize("task", [None, "classification", "regression"])
    def test_final_values_equal_a_count_per_client(self, task):
        given = problem(task)
        history = mf.simulate(**given)
        rmse = lambda o, t: float((o - t).square().mean().sqrt())  # noqa: E731
        accuracy = lambda o, t: float((o.argmax(1) == t).double().mean())  # noqa: E731
        expected = naive(history, given, rmse if task == "regression" else accuracy)
        assert history.client_scores[3] is expected[3] is None
        assert history.client_scores[:3] == pytest.approx(expected[:3])
        assert history.rows[-1]["clients_mean"] == pytest.approx(np.mean(expected[:3]))

    def test_given_split_equals_the_client_column(self):
        given = problem()
        ids = given["data"].test_ids
        without = mf.Data(*(getattr(given["data"], name) for name in ("x_train", "y_train", "x_test", "y_test")))
        split = [np.flatnonzero(ids == client) for client in range(4)]
        ours = mf.simulate(**given | {"data": without, "test_split": split})
        assert ours.client_scores == mf.simulate(**given).client_scores

    def test_stored_and_read_again(self, tmp_path):
        history = mf.simulate(**problem(), out=tmp_path / "run")
        again = mf.read(tmp_path / "run")
        assert again.client_scores == history.client_scores
        assert again.rows[-1]["clients_worst_tenth"] == history.rows[-1]["clients_worst_tenth"]

    def test_rows_do_not_depend_on_the_length_of_the_run(self, tmp_path):
        mf.simulate(**problem(rounds=2), out=tmp_path / "run")
        extended, whole = mf.simulate(**problem(rounds=4), out=tmp_path / "run"), mf.simulate(**problem(rounds=4))
        drop = lambda rows: [{key: value for key, value in row.items() if key != "seconds"} for row in rows]  # noqa: E731
        assert drop(extended.rows) == drop(whole.rows)

    def test_without_own_test_samples_rows_are_as_before(self):
        given = problem()
        other = mf.simulate(**given | {"split": np.array_split(np.arange(48), 4)})  # clients share ids: the column does not apply
        assert not other.client_scores
        assert not any(key.startswith("clients_") for key in other.rows[-1])

    def test_is_part_of_the_fingerprint(self, tmp_path):
        mf.simulate(**problem(), out=tmp_path / "run")
        with pytest.raises(mf.UsageError, match="different run"):
            mf.simulate(**problem(test_split=[[0], [1], [2], [3]]), out=tmp_path / "run")

    def test_seeds_of_one_experiment_are_averaged_whatever_their_test_samples(self):
        def experiment(seed, **change):
            given = problem(seed=seed, rounds=1, **change)
            return mf.simulate(**given).fingerprint.experiment

        def drawn(seed):
            return mf.partition.iid(problem()["data"].y_test, 4, seed=seed)

        base = experiment(0, test_split=drawn(0))
        assert experiment(1, test_split=drawn(1)) == base
        assert experiment(1, test_split=mf.partition.classes(problem()["data"].y_test, 4, 1, seed=1)) != base
        assert experiment(0, test_split=[[0], [1], [2], [3]]) != experiment(0, test_split=[[1], [0], [2], [3]])
        assert experiment(0) != base  # by the client column

    def test_a_client_whose_test_targets_are_all_ignored_has_no_score(self):
        given = problem(rounds=1, loss=nn.CrossEntropyLoss(ignore_index=1))
        y = given["data"].y_test.clone()
        y[np.flatnonzero(given["data"].test_ids == 2)] = 1
        history = mf.simulate(**given | {"data": dataclasses.replace(given["data"], y_test=y)})
        assert history.client_scores[2] is None
        assert history.rows[-1]["clients_mean"] == pytest.approx(np.mean(history.client_scores[:2]))

    def test_the_last_row_of_a_stopped_run_has_them(self):
        history = mf.simulate(**problem(eval_every=10, rounds=20), each_round=lambda now: now.stop() if now.row["round"] == 3 else None)
        last = history.rows[-1]
        assert (last["round"], last["stopped"]) == (3, True)
        assert last["clients_mean"] == pytest.approx(np.mean(history.client_scores[:3]))
        assert "clients_mean" not in history.rows[-2]

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"test_split": [[0], [1]]}, "2 clients but the split has 4"),
            ({"test_split": [[0], [1], [2], [24]]}, "24 test samples"),
            ({"test_split": 5}, "list of arrays"),
            ({"test_split": [[], [], [], []]}, "gives no client a test sample"),
            ({"test_split": [[0]] * 4, "metrics": ["macro-f1"]}, "metric per client"),
        ],
    )
    def test_mistakes_are_named(self, change, words):
        with pytest.raises(mf.UsageError, match=words):
            mf.simulate(**problem(**change))


@pytest.mark.slow
def test_the_page_shows_them(tmp_path):
    from mimicfl.report.report import write_report

    for algorithm in ("fedavg", "mimic"):
        mf.simulate(**problem("classification", algorithm=algorithm, metrics=["accuracy", "macro-f1"]), out=tmp_path / algorithm)
    page = write_report([tmp_path]).page.read_text()
    assert "Own test samples of the clients" in page
    for words in ("macro F1", "worst tenth", "rarest tenth", "never seen", '"tested":{'):
        assert words in page
