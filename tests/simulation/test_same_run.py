"""One definition of "the same run": runs that share a program, a folder or a mean are equal by value."""

import dataclasses
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import mimicfl as mf
from mimicfl.experiments import build as build_module
from mimicfl.experiments.build import build, load_data
from mimicfl.experiments.execute import groups, run_plan
from mimicfl.experiments.grid import read_sweep
from mimicfl.experiments.names import folder_name
from mimicfl.metrics.store import RunFolder
from mimicfl.report.summary import group
from mimicfl.settings import SETTINGS

SHORT = mf.Experiment(rounds=2, num_clients=6, epochs=1)


class Scaled(nn.Module):
    """A factor that is not in its repr, and a frozen layer drawn from the seed."""

    def __init__(self, by: float = 1.0):
        super().__init__()
        self.by, self.frozen, self.head = by, nn.Linear(64, 16), nn.Linear(16, 10)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.by * self.head(torch.relu(self.frozen(x.flatten(1))))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["plain", "batched"])
def test_runs_with_other_frozen_layers_or_attributes_do_not_share_a_program(names, engine):
    mf.models.register("scaled", Scaled)
    base = dataclasses.replace(SHORT, algorithm="fedavg", engine=engine, dtype="float64")
    wanted = {f"{by}-{seed}": dataclasses.replace(base, model=f"scaled:{by}", seed=seed) for by in (1.0, 0.1) for seed in (0, 1)}
    together = run_plan(wanted)
    for name, e in wanted.items():
        alone = mf.run(dataclasses.replace(e, engine="plain"))
        torch.testing.assert_close(together[name].params, alone.params, rtol=1e-9, atol=1e-11)
        assert together[name].rows[-1]["test_loss"] == pytest.approx(alone.rows[-1]["test_loss"], rel=1e-9)


class Greedy(mf.availability.Pattern):
    """Changes the class counts that it is given."""

    def draw(self, rounds, num_clients, seed, class_counts):
        class_counts[:, :5] = 0
        return np.ones((rounds, num_clients), dtype=bool)

    def rates(self, num_clients, seed, class_counts):
        class_counts[:] = 1
        return np.ones(num_clients)


def test_a_pattern_that_changes_its_arguments_does_not_reach_other_runs(names):
    mf.availability.register("greedy", Greedy)
    base = dataclasses.replace(SHORT, engine="plain", algorithm="known-p")
    wanted = {name: dataclasses.replace(base, availability=name) for name in ("greedy", "label-correlated")}
    together = run_plan(wanted)
    for name, e in wanted.items():
        alone = mf.run(e)
        assert torch.equal(together[name].params, alone.params)
        assert together[name].fingerprint == alone.fingerprint
        assert np.array_equal(together[name].class_counts, alone.class_counts)
    assert np.array_equal(together["greedy"].class_counts, together["label-correlated"].class_counts)


def test_a_selection_cannot_change_the_clients(digits):
    """Their sizes decide how they train, in all runs that share them."""

    def spoil(candidates):
        candidates.sizes[:] = 16
        return candidates.available

    with pytest.raises(ValueError, match="read-only"):
        mf.simulate(**digits, rounds=1, select=spoil)


def test_runs_on_equal_data_still_share_a_program():
    built = {str(seed): build(dataclasses.replace(SHORT, seed=seed)) for seed in (0, 1)}
    assert groups(built) == [["0", "1"]]


def test_algorithms_whose_folder_names_look_alike_stay_apart(names, tmp_path):
    class Half(mf.FedAvg):
        def aggregate(self, state, active, g, step):
            super().aggregate(state, active, g / 2, step)

    mf.register("a+b", mf.FedAvg)
    mf.register("a_b", Half)
    found = mf.compare(SHORT, ["a+b", "a_b"], 1, tmp_path)
    for name in ("a+b", "a_b"):
        assert torch.equal(found[name][0].params, mf.run(dataclasses.replace(SHORT, algorithm=name)).params)
    assert len(list(tmp_path.iterdir())) == 2


def test_long_specs_keep_their_own_folders(tmp_path):
    lists = [[0] * 60, [0] * 59 + [1]]
    names = {folder_name(f"mimic:weights={values}") for values in lists}
    assert len(names) == 2
    assert folder_name("fedprox:mu=0.1") == "fedprox_mu=0.1"  # as before


class TestReports:
    """A report averages runs that differ only in the seed, and no seed counts twice."""

    def runs(self, tmp_path, digits, **changes):
        local = mf.LocalSGD(steps=1)
        return [
            mf.simulate(**{**digits, "rounds": 1, "algorithm": "fedavg", "local": local, **change}, out=tmp_path / name)
            for name, change in changes.items()
        ]

    def test_other_splits_are_other_experiments(self, tmp_path, digits):
        y = digits["data"].y_train
        uneven, even = ({"split": mf.partition.dirichlet(y, 30, alpha)} for alpha in (0.3, 100.0))
        self.runs(tmp_path, digits, a=uneven, b=even)
        groups = group([mf.read(tmp_path / name) for name in "ab"])
        assert [len(g.runs) for g in groups] == [1, 1]
        assert "alpha=0.3" in groups[0].label
        assert mf.frame(tmp_path)["partition"].nunique() == 2

    def test_objects_that_text_cannot_describe_differ_in_their_fingerprint(self, tmp_path, digits):
        plain = [np.asarray(part) for part in digits["split"]]
        self.runs(tmp_path, digits, a={"split": plain}, b={"split": plain[::-1]})
        groups = group([mf.read(tmp_path / name) for name in "ab"])
        assert [len(g.runs) for g in groups] == [1, 1]
        assert "split" in groups[0].label
        assert mf.frame(tmp_path)["split_fingerprint"].nunique() == 2

    def test_other_models_are_other_experiments(self, tmp_path, digits):
        self.runs(tmp_path, digits, a={"model": mf.models.build("mlp:4", digits["data"], 0)}, b={})
        assert len(group([mf.read(tmp_path / name) for name in "ab"])) == 2

    def test_seeds_of_one_experiment_are_averaged(self, tmp_path, digits):
        def made(seed):
            data = digits["data"]
            return {"seed": seed, "split": mf.partition.iid(data.y_train, 5, seed=seed), "model": mf.models.build("mlp", data, seed)}

        self.runs(tmp_path, digits, a=made(0), b=made(1), c=made(2))
        [only] = group([mf.read(tmp_path / name) for name in "abc"])
        assert len(only.runs) == 3

    def test_one_run_in_two_folders_counts_once(self, tmp_path, digits):
        self.runs(tmp_path, digits, a={})
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        [only] = group([mf.read(tmp_path / name) for name in "ab"])
        assert len(only.runs) == 1

    def test_two_runs_of_one_seed_are_not_two_seeds(self, tmp_path, digits):
        """Other first weights under the same seed."""
        self.runs(tmp_path, digits, a={}, b={"model": mf.models.build("mlp", digits["data"], seed=5)})
        groups = group([mf.read(tmp_path / name) for name in "ab"])
        assert [len(g.runs) for g in groups] == [1, 1]


def measured(now):
    return {"a": 1}


def other(now):
    return {"b": 2}


def test_another_callback_is_refused_where_it_would_not_be_called(tmp_path):
    mf.run(SHORT, tmp_path, each_round=measured)
    assert mf.run(SHORT, tmp_path, each_round=measured).rows[0]["a"] == 1
    assert len(mf.run(SHORT, tmp_path).rows) == 2  # a result can be read without it
    with pytest.raises(mf.UsageError, match="callback differs"):
        mf.run(SHORT, tmp_path, each_round=other)


def test_a_run_without_diagnosis_cannot_be_read_as_diagnosed(tmp_path):
    mf.run(SHORT, tmp_path)
    with pytest.raises(mf.UsageError, match="diagnosis differs"):
        mf.run(dataclasses.replace(SHORT, diagnose="every=1"), tmp_path)


class TestFilesOfOneRun:
    @pytest.fixture
    def two(self, tmp_path):
        for name, lr in (("a", 0.1), ("b", 0.5)):
            mf.run(dataclasses.replace(SHORT, lr=lr), tmp_path / name)
        return tmp_path / "a", tmp_path / "b"

    @pytest.mark.parametrize("names", [["rows.jsonl"], ["final.safetensors"], ["rows.jsonl", "final.safetensors"], ["config.toml"]])
    def test_files_of_another_run_are_refused(self, two, names):
        for name in names:
            shutil.copy(two[1] / name, two[0] / name)
        with pytest.raises(mf.UsageError, match="does not belong to this run"):
            mf.read(two[0])

    def test_every_flipped_bit_of_a_row_is_noticed(self, two):
        file = two[0] / "rows.jsonl"
        whole = file.read_bytes()
        good = mf.read(two[0]).rows
        for place in range(0, 8 * len(whole), 97):
            harmed = bytearray(whole)
            harmed[place // 8] ^= 1 << place % 8
            file.write_bytes(harmed)
            try:
                assert mf.read(two[0]).rows == good, place
            except mf.UsageError as error:
                assert "damaged" in str(error) or "belong" in str(error)

    @pytest.mark.parametrize(("old", "new"), [("num_clients = 6", "num_clients = 7"), ("rounds = 2", "rounds = 6")])
    def test_an_edited_setting_is_noticed(self, two, old, new):
        text = (two[0] / "config.toml").read_text()
        assert old in text
        (two[0] / "config.toml").write_text(text.replace(old, new))
        with pytest.raises(mf.UsageError, match=r"config\.toml does not belong"):
            mf.read(two[0])

    def test_rows_are_read_without_their_checksum(self, two):
        assert all("crc" not in row for row in mf.read(two[0]).rows)
        assert RunFolder(two[0]).rows() == mf.read(two[0]).rows


@pytest.mark.parametrize("validation", [0.0, 0.2])
def test_a_dataset_that_was_edited_in_place_does_not_reach_other_runs(validation):
    run = dataclasses.replace(SHORT, validation=validation)
    before = mf.run(run).params
    load_data(run.resolved()).y_train[:] = 0
    assert torch.equal(mf.run(run).params, before)


class Watched:
    """Settings that know which of them were read."""

    def __init__(self, settings):
        self.settings, self.read = settings, set()

    def __getattr__(self, name):
        self.read.add(name)
        return getattr(self.settings, name)


@pytest.mark.parametrize("given", [{}, {"dataset": "synthetic"}, {"validation": 0.2, "task": "classification"}])
def test_runs_that_share_a_problem_agree_in_all_that_it_is_made_from(given, monkeypatch):
    """Every setting that is read while a problem is made tells problems apart."""
    e = dataclasses.replace(SHORT, **given).resolved()
    watched, keys = Watched(e), {}
    local = build_module.build_problem(e, keys).local
    build_module._new_problem(watched, local)
    [key] = keys
    monkeypatch.setattr(build_module, "_new_problem", lambda e, local: SimpleNamespace(with_local=lambda local: None))
    for name in watched.read & SETTINGS.keys():
        other = {**vars(e), name: "something else"}
        build_module.build_problem(SimpleNamespace(**other), other_keys := {})
        assert key not in other_keys, name


def test_data_edited_in_place_is_refused(digits):
    data = dataclasses.replace(digits["data"])
    given = {**digits, "data": data, "rounds": 1, "local": mf.LocalSGD(steps=1)}
    mf.simulate(**given)
    data.y_train[:] = 0
    with pytest.raises(mf.UsageError, match="edited in place"):
        mf.simulate(**given)


def test_a_grid_bomb_is_refused_before_it_is_built(tmp_path):
    lists = "\n".join(f"{key} = {list(range(1, 1001))}" for key in ("rounds", "num_clients", "eval_every", "epochs"))
    (tmp_path / "grid.toml").write_text(f"[grid]\n{lists}\n")
    with pytest.raises(mf.UsageError, match="number of runs"):
        read_sweep(tmp_path / "grid.toml")


@pytest.mark.parametrize(
    "wrong",
    [
        {"engine": None},
        {"engine": 3},
        {"out": 3},
        {"out": b""},
        {"out": b"x"},
        {"out": ""},
        {"out": "a\0b"},
        {"checkpoint_every": "x"},
        {"checkpoint_every": True},
        {"notice": 3},
    ],
)
def test_wrong_types_are_refused(digits, wrong):
    with pytest.raises(mf.UsageError, match=r"engine must be|run folder must be|checkpoint_every must be|notice must be"):
        mf.simulate(**digits, rounds=1, **wrong)
