"""MimiC with the corrections at the clients, plain and under secure aggregation: equal to the server form, whatever is lost."""

import numpy as np
import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file

import mimicfl.flower as mff
from mimicfl.errors import UsageError
from mimicfl.flower.held import Held
from mimicfl.flower.wire import tensor

from .problems import LOCAL, N, app, federate, flat, model_arrays, participation, problem, schedule, simulated

BASE = {"fraction_evaluate": 0.0, "lr": LOCAL.lr, "num_clients": N, "wait_for": N}


class Losing:
    """The ready app; `trouble(client, t)` says how an answer gets lost: "before" training, "after" it, or not at all."""

    def __init__(self, folder, trouble, stage="train"):
        self.app, self.trouble = app(state=folder), trouble

    def __call__(self, node, message, context):
        if message.metadata.message_type != "train":
            return self.app(message, context)
        client = int(context.node_config["partition-id"])
        stage = dict(message.content.config_records.get("secaggplus_configs", {})).get("stage", "train")
        t = int(message.metadata.group_id) - 1
        found = self.trouble(client, t, stage)
        if found == "before":
            raise RuntimeError("gone before it trained")
        reply = self.app(message, context)
        if found == "after":
            raise RuntimeError("trained, and wrote its pending update, but the answer was lost")
        return reply


def start(form, rounds, client, **options):
    strategy = mff.MimiC(form=form, **(BASE | options))
    result, _ = federate(strategy, rounds, client, timeout=10.0)
    return strategy, result


def test_equal_to_the_server_form_to_the_bit_whatever_is_lost(tmp_path):
    """Answers are lost before and after training; a correction is committed only when the server says it was counted."""
    chance = np.random.default_rng(5)
    fate = {(c, t): chance.choice(["", "before", "after"], p=[0.5, 0.2, 0.3]) for t in range(8) for c in range(N)}
    strategy, result = start(mff.ClientForm(num_clients=N), 8, Losing(tmp_path, lambda c, t, _: fate[c, t]))
    available = participation(strategy.rows)
    assert [[int(not fate[c, t]) for c in range(N)] for t in range(8)] == available
    assert torch.equal(flat(result.arrays), simulated("mimic", available).params)


def test_the_ledger_keeps_what_is_needed_and_no_more(tmp_path):
    available = schedule(8)
    form = mff.ClientForm(num_clients=N)
    strategy, _ = start(form, 8, Losing(tmp_path, lambda c, t, _: "" if available[t, c] else "before"))
    needed = {t for client, (ticket, t) in form.counted.items() if form.committed.get(client) != ticket}
    assert set(form.v) == needed
    assert 1 <= len(form.v) <= N
    assert participation(strategy.rows) == available.astype(int).tolist()


def test_without_the_commit_rule_it_would_be_wrong(tmp_path, monkeypatch):
    """The test above can fail: a client that commits whatever is pending ends elsewhere."""

    def hasty(self, content):
        if self.pending is None or "v" not in content.array_records:
            return settle(self, content)
        self.c, self.ticket, self.pending = tensor(content, "v", "v") - self.pending, str(self.words["counted"]), None
        return True

    settle = Held.settle
    monkeypatch.setattr(Held, "settle", hasty)
    lost = {(1, 1), (1, 2), (3, 2)}
    strategy, result = start(mff.ClientForm(num_clients=N), 6, Losing(tmp_path, lambda c, t, _: "after" if (c, t) in lost else ""))
    assert not torch.allclose(flat(result.arrays), simulated("mimic", participation(strategy.rows)).params, atol=1e-6)


def test_a_server_that_dies_in_a_round_resumes_with_the_same_clients(tmp_path, monkeypatch):
    """Round 3 is trained twice: the clients drop what they had pending from the first time."""
    client = app(state=tmp_path / "clients")
    options = {"folder": tmp_path / "run"}
    first = mff.MimiC(form=mff.ClientForm(num_clients=N), **BASE, **options)
    original = type(first).tell

    def dies(self, t, *rest):
        if t == 3:
            raise SystemExit("killed")
        return original(self, t, *rest)

    monkeypatch.setattr(type(first), "tell", dies)
    with pytest.raises(SystemExit):
        federate(first, 6, client)
    monkeypatch.undo()
    second = mff.MimiC(form=mff.ClientForm(num_clients=N), **BASE, **options)
    result, _ = federate(second, 6, client)
    assert len(second.rows) == 6
    assert torch.equal(flat(result.arrays), simulated("mimic", [[1] * N] * 6).params)


def test_a_client_that_lost_its_disk_makes_everybody_start_again_from_zero(tmp_path):
    """The corrections must sum to zero: with one lost, all are dropped, and the rest is MimiC from the model as it is then."""
    erased = []

    def trouble(client, t, _):
        if (client, t) == (2, 3) and not erased:
            erased.append([file.unlink() for file in tmp_path.rglob("*.safetensors")][:1])
        return ""

    # Client 0 has been asked before the files go; those after it have lost theirs.
    form = mff.ClientForm(num_clients=N)
    strategy, result = start(form, 8, Losing(tmp_path, trouble))
    assert any("lost its correction" in why for why in strategy.rows[3]["failed"].values())
    assert participation(strategy.rows)[-1] == [1] * N
    assert bool(torch.isfinite(flat(result.arrays)).all())
    v = form.v[7]
    corrections = [v - load_file(file)["pending"] for file in tmp_path.rglob("*.safetensors")]  # what each will commit next
    assert len(corrections) == N
    torch.testing.assert_close(sum(corrections), torch.zeros_like(v), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("make_it", "words"),
    [
        (lambda: mff.FedVARP(form=mff.ClientForm(num_clients=N), num_clients=N), "form 'client' is MimiC's"),
        (lambda: mff.MimiC("step", form=mff.ClientForm(num_clients=N)), "with memory in gradient units"),
        (lambda: mff.MimiC(form=mff.ClientForm(num_clients=N), update="mean"), "update is 'sum' in the form and 'mean' in the strategy"),
    ],
)
def test_a_form_of_another_algorithm_is_refused(make_it, words):
    with pytest.raises(UsageError, match=words):
        make_it()


def test_a_client_form_needs_a_client_that_keeps_it(tmp_path):
    strategy, _ = start(mff.ClientForm(num_clients=N), 1, app())
    assert ["state-dir" in why for why in strategy.rows[0]["failed"].values()] == [True] * N


# -- secure aggregation ------------------------------------------------------------------------------------------

STAGES = ("setup", "share_keys", "collect_masked_vectors", "unmask")


def test_secure_rounds_survive_drops_at_every_stage(tmp_path):
    """One client at a time goes away at each stage; from the third on it counts or not as the protocol says."""
    drops = {(1, 1): "setup", (2, 2): "share_keys", (3, 3): "collect_masked_vectors", (4, 4): "unmask"}
    form = mff.SecureForm(threshold=0.51, clip=64.0, num_clients=N)
    client = Losing(tmp_path, lambda c, t, stage: "before" if drops.get((c, t)) == stage else "")
    strategy, result = start(form, 7, client)
    available = [[1] * N for _ in range(7)]
    for (c, t), stage in drops.items():
        available[t][c] = int(stage == "unmask")  # its masked vector is in, the others unmask it
    assert participation(strategy.rows) == available
    torch.testing.assert_close(flat(result.arrays), simulated("mimic", available).params, atol=2e-6, rtol=0)
    assert "setup" in strategy.rows[1]["failed"]["1"]


def test_a_secure_round_below_its_threshold_is_refused_and_changes_nothing(tmp_path):
    """Two of five stay, four are needed: no sum, no step, and the next round goes on from where it was."""
    form = mff.SecureForm(threshold=0.7, clip=64.0, num_clients=N)
    client = Losing(tmp_path, lambda c, t, stage: "before" if t == 1 and c > 1 and stage == "collect_masked_vectors" else "")
    strategy, result = start(form, 3, client)
    assert participation(strategy.rows) == [[1] * N, [0] * N, [1] * N]
    assert strategy.rows[1]["failed"]["0"] == "the secure round was refused"
    torch.testing.assert_close(flat(result.arrays), simulated("mimic", participation(strategy.rows)).params, atol=2e-6, rtol=0)


def test_the_server_sees_masked_vectors_only(tmp_path):
    """What a client sends is far from its update, differs from round to round, and looks uniform."""
    seen = []

    class Tap(Losing):
        def __call__(self, node, message, context):
            reply = super().__call__(node, message, context)
            told = reply.content.config_records.get("secaggplus_configs") or {}
            if "masked_params" in told:
                from flwr.common import bytes_to_ndarray

                seen.append([bytes_to_ndarray(part) for part in told["masked_params"]][1])
                assert all(not record for record in reply.content.array_records.values())
                assert "train-loss" not in str(reply.content)
            return reply

    start(mff.SecureForm(threshold=0.51, clip=64.0, num_clients=N), 2, Tap(tmp_path, lambda *_: ""))
    values = np.concatenate(seen) / 2**32
    assert len(seen) == 2 * N
    assert 0 <= values.min() < 0.05
    assert 0.95 < values.max() < 1
    assert abs(values.mean() - 0.5) < 4 / np.sqrt(12 * len(values))


def test_masks_use_the_whole_seed_and_the_whole_range():
    from mimicfl.flower.masked import mask

    a, b = bytes(32), bytes(28) + b"\1\0\0\1"
    [x], [y] = mask(a, 2**32, [(20_000,)]), mask(b, 2**32, [(20_000,)])
    assert (x == mask(a, 2**32, [(20_000,)])[0]).all()
    assert (x != y).mean() > 0.99
    # Flower folds seeds by xor of 32-bit words: these two would give the same mask there.
    c, d = b"\1\0\0\0" + bytes(28), bytes(28) + b"\1\0\0\0"
    assert (mask(c, 2**32, [(100,)])[0] != mask(d, 2**32, [(100,)])[0]).any()
    assert mask(a, 2**16, [(3, 4), (2,)])[0].shape == (3, 4)
    assert mask(a, 2**16, [(5000,)])[0].max() < 2**16
    original = __import__("flwr.client.mod.secure_aggregation.secaggplus_mod", fromlist=["x"])
    assert original.pseudo_rand_gen is not mask  # other apps keep Flower's own


def test_a_client_refuses_to_help_unmask_another(tmp_path):
    """Asked for both secrets of one client, or for a threshold of one half, it raises."""
    from flwr.app import ConfigRecord, RecordDict

    from mimicfl.flower.masked import guarded

    def letter(**asked):
        return Message(RecordDict({"secaggplus_configs": ConfigRecord(asked)}), 1, "train")

    with pytest.raises(UsageError, match="both secrets"):
        guarded(letter(stage="unmask", active_nids=[1, 2, 3], dead_nids=[3]), None, None)
    with pytest.raises(UsageError, match="above one half"):
        guarded(letter(stage="setup", sample_num=6, threshold=3), None, None)


def test_a_client_may_insist_on_secure_rounds(tmp_path):
    strategy = mff.MimiC(**BASE)
    federate(strategy, 1, app(secure_only=True), timeout=10.0)
    assert ["secure rounds only" in why for why in strategy.rows[0]["failed"].values()] == [True] * N
    strategy, _ = start(mff.SecureForm(threshold=0.51, clip=64.0, num_clients=N), 1, app(state=tmp_path, secure_only=True))
    assert strategy.rows[0]["active"] == N


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["malformed", "wrong"])
def test_nonsense_in_a_secure_round_never_reaches_the_model(tmp_path, stage, how):
    """Client 2 sends rubbish at one stage of round 1: it is left out, or the round is refused; never a wrong step."""

    spoiled = []

    def spoil(told):
        for key, value in told.items():
            before = value
            if isinstance(value, bytes):
                told[key] = b"rubbish" if how == "wrong" else 7
            elif value and isinstance(value[0], bytes):
                told[key] = [bytes(len(part)) for part in value] if how == "wrong" else value[:-1]
            spoiled.append(told[key] != before)

    class Spoiling(Losing):
        def __call__(self, node, message, context):
            reply = super().__call__(node, message, context)
            mine = context.node_config["partition-id"] == 2 and message.metadata.group_id == "2"
            if mine and message.content.config_records.get("secaggplus_configs") is not None and self.stage == stage:
                spoil(reply.content.config_records["secaggplus_configs"])
            return reply

        def trouble(self, client, t, now):
            self.stage = now
            return ""

        def __init__(self, folder):
            self.app = app(state=folder)

    strategy, result = start(mff.SecureForm(threshold=0.51, clip=64.0, num_clients=N), 3, Spoiling(tmp_path))
    available = participation(strategy.rows)
    assert any(spoiled)
    assert available[0] == available[2] == [1] * N
    assert available[1] in ([0] * N, [1, 1, 0, 1, 1], [1] * N)
    torch.testing.assert_close(flat(result.arrays), simulated("mimic", available).params, atol=3e-6, rtol=0)


def test_an_update_beyond_the_clip_is_not_sent(tmp_path):
    strategy, _ = start(mff.SecureForm(threshold=0.51, clip=1e-3, num_clients=N), 1, app(state=tmp_path))
    assert strategy.rows[0]["active"] == 0
    assert any("clip" in why for why in strategy.rows[0]["failed"].values())


@pytest.mark.parametrize(("threshold", "clients"), [(2 / 3, 3), (0.51, 4), (1.0, 3)])
def test_secure_rounds_with_few_clients(tmp_path, threshold, clients):
    strategy = mff.MimiC(form=mff.SecureForm(threshold=threshold, clip=64.0), **(BASE | {"num_clients": None, "wait_for": clients}))
    federation = mff.Federation(app(state=tmp_path), clients)
    with federation.running() as grid:
        strategy.start(grid, model_arrays(problem()[2])[0], 2, 10.0)
    assert [row["active"] for row in strategy.rows] == [clients] * 2


def test_two_clients_have_nothing_to_hide_in(tmp_path):
    strategy = mff.MimiC(form=mff.SecureForm(clip=64.0), **(BASE | {"num_clients": None, "wait_for": 2}))
    federation = mff.Federation(app(state=tmp_path), 2)
    with federation.running() as grid:
        strategy.start(grid, model_arrays(problem()[2])[0], 1, 10.0)
    assert strategy.rows[0]["failed"] == dict.fromkeys("01", "secure aggregation needs at least 3 clients, 2 are there")


def test_secure_aggregation_says_what_it_cannot_do():
    with pytest.raises(UsageError, match="threshold"):
        mff.SecureForm(threshold=0.5)
