"""MimiC under secure aggregation: dropouts at every stage, what the server sees, and what clients refuse."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Message, RecordDict

import mimicfl.flower as mff
from mimicfl.errors import UsageError
from mimicfl.flower.secure_form import SecureRound
from tests.flower.lossy import BASE, Lossy, start
from tests.flower.problems import N, app, federate, flat, model_arrays, participation, problem, simulated

STAGES = ("setup", "share_keys", "collect_masked_vectors", "unmask")


@pytest.mark.slow
def test_secure_rounds_survive_dropouts_at_every_stage(tmp_path):
    """One client drops out per stage; its update is aggregated only if it dropped out after sending its masked vector."""
    dropouts = {(1, 1): "setup", (2, 2): "share_keys", (3, 3): "collect_masked_vectors", (4, 4): "unmask"}
    form = mff.SecureForm(threshold=0.51, clip=64.0, num_clients=N)
    client = Lossy(tmp_path, lambda c, t, stage: "before" if dropouts.get((c, t)) == stage else "")
    strategy, result = start(form, 7, client)
    available = [[1] * N for _ in range(7)]
    for (c, t), stage in dropouts.items():
        available[t][c] = int(stage == "unmask")  # its masked vector has arrived, and the others unmask it
    assert participation(strategy.rows) == available
    torch.testing.assert_close(flat(result.arrays), simulated("mimic", available).params, atol=2e-6, rtol=0)
    assert "setup" in strategy.rows[1]["failed"]["1"]


@pytest.mark.slow
def test_secure_round_below_the_threshold_is_refused_and_changes_nothing(tmp_path):
    """Two of five clients remain and four are needed: no sum, no step, and the next round starts from the same model."""
    form = mff.SecureForm(threshold=0.7, clip=64.0, num_clients=N)
    client = Lossy(tmp_path, lambda c, t, stage: "before" if t == 1 and c > 1 and stage == "collect_masked_vectors" else "")
    strategy, result = start(form, 3, client)
    assert participation(strategy.rows) == [[1] * N, [0] * N, [1] * N]
    assert "refused" in strategy.rows[1]["failed"]["0"]
    torch.testing.assert_close(flat(result.arrays), simulated("mimic", participation(strategy.rows)).params, atol=2e-6, rtol=0)


@pytest.mark.slow
def test_server_receives_only_masked_vectors(tmp_path):
    """The masked vectors are uniformly distributed, and replies contain neither arrays nor metrics."""
    seen = []

    class Recording(Lossy):
        def __call__(self, node, message, context):
            reply = super().__call__(node, message, context)
            secagg = reply.content.config_records.get("secaggplus_configs") or {}
            if "masked_params" in secagg:
                from flwr.common import bytes_to_ndarray

                seen.append([bytes_to_ndarray(part) for part in secagg["masked_params"]][1])
                assert all(not record for record in reply.content.array_records.values())
                assert "train-loss" not in str(reply.content)
            return reply

    start(mff.SecureForm(threshold=0.51, clip=64.0, num_clients=N), 2, Recording(tmp_path, lambda *_: ""))
    values = np.concatenate(seen) / 2**32
    assert len(seen) == 2 * N
    assert 0 <= values.min() < 0.05
    assert 0.95 < values.max() < 1
    assert abs(values.mean() - 0.5) < 4 / np.sqrt(12 * len(values))


def test_masks_use_the_full_seed_and_the_full_range():
    from mimicfl.flower.secagg_client import mask

    a, b = bytes(32), bytes(28) + b"\1\0\0\1"
    [x], [y] = mask(a, 2**32, [(20_000,)]), mask(b, 2**32, [(20_000,)])
    assert (x == mask(a, 2**32, [(20_000,)])[0]).all()
    assert (x != y).mean() > 0.99
    # Flower combines the 32-bit words of a seed by xor: these two seeds would give the same mask.
    c, d = b"\1\0\0\0" + bytes(28), bytes(28) + b"\1\0\0\0"
    assert (mask(c, 2**32, [(100,)])[0] != mask(d, 2**32, [(100,)])[0]).any()
    assert mask(a, 2**16, [(3, 4), (2,)])[0].shape == (3, 4)
    assert mask(a, 2**16, [(5000,)])[0].max() < 2**16
    original = __import__("flwr.client.mod.secure_aggregation.secaggplus_mod", fromlist=["x"])
    assert original.pseudo_rand_gen is not mask  # other apps keep Flower's masks


SETUP = {
    "stage": "setup",
    "sample_num": 6,
    "share_num": 6,
    "threshold": 4,
    "clipping_range": 8.0,
    "target_range": 2**28,
    "mod_range": 2**32,
    "max_weight": 1.0,
}


def secure_request(kind="train", **fields):
    from flwr.app import ConfigRecord, RecordDict

    return Message(RecordDict({"secaggplus_configs": ConfigRecord(fields)}), 1, kind)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stage": "unmask", "active_nids": [1, 2, 3], "dead_nids": [3]}, "both secrets"),
        ({"stage": "unmask", "active_nids": [1, 2], "dead_nids": [3]}, "at least 3"),
        ({"stage": "unmask", "active_nids": [1, 1, 2, 2], "dead_nids": [3]}, "at least 3"),
        (SETUP | {"threshold": 3}, "above one half"),
        (SETUP | {"sample_num": 2, "share_num": 2, "threshold": 2}, "at least 3"),
        (SETUP | {"share_num": 60}, "a share of every secret"),
        (SETUP | {"sample_num": 4, "share_num": 6}, "a share of every secret"),
        (SETUP | {"mod_range": 2**40 + 1}, "2\\^32"),
        (SETUP | {"mod_range": 2**16}, "2\\^32"),
        (SETUP | {"target_range": 2**31}, "2\\^32"),
        (SETUP | {"max_weight": 1000.0}, "weights"),
        (SETUP | {"threshold": "4"}, "whole numbers"),
        (SETUP | {"kind": "train.default"}, "type 'train'"),
    ],
)
def test_client_refuses_requests_that_would_unmask_an_update(fields, message):
    from mimicfl.flower.secagg_client import secagg_mod

    with pytest.raises(UsageError, match=message):
        secagg_mod(secure_request(**fields), None, lambda *_: pytest.fail("the plain update was computed"))


def test_client_refuses_the_keys_of_strangers(tmp_path):
    """More keys than clients were announced: shares would go to clients that are not there."""
    from flwr.app import Context, RecordDict

    from mimicfl.flower.secagg_client import secagg_mod

    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    secagg_mod(secure_request(**(SETUP | {"sample_num": 3, "share_num": 3, "threshold": 3})), context, None)
    keys = {str(node): [b"1", b"2"] for node in range(4)}
    with pytest.raises(UsageError, match="keys of 4"):
        secagg_mod(secure_request(stage="share_keys", **keys), context, None)


def test_secure_only_client_refuses_plain_rounds(tmp_path):
    strategy = mff.MimiC(**BASE, failed_rounds=None)
    federate(strategy, 1, app(secure_only=True), timeout=10.0)
    assert ["secure rounds only" in why for why in strategy.rows[0]["failed"].values()] == [True] * N
    strategy, _ = start(mff.SecureForm(threshold=0.51, clip=64.0, num_clients=N), 1, app(state=tmp_path, secure_only=True))
    assert strategy.rows[0]["active"] == N


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["malformed", "wrong"])
def test_invalid_replies_in_a_secure_round_never_change_the_model(tmp_path, stage, how):
    """Client 2 sends an invalid reply at one stage of round 1: it is left out or the round is refused."""
    spoiled = []

    def spoil(reply):
        for key, value in reply.items():
            before = value
            if isinstance(value, bytes):
                reply[key] = b"invalid" if how == "wrong" else 7
            elif value and isinstance(value[0], bytes):
                reply[key] = [bytes(len(part)) for part in value] if how == "wrong" else value[:-1]
            spoiled.append(reply[key] != before)

    class Spoiling(Lossy):
        def __call__(self, node, message, context):
            reply = super().__call__(node, message, context)
            selected = context.node_config["partition-id"] == 2 and message.metadata.group_id == "2"
            if selected and message.content.config_records.get("secaggplus_configs") is not None and self.stage == stage:
                spoil(reply.content.config_records["secaggplus_configs"])
            return reply

        def failure(self, client, t, now):
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


def test_update_above_the_clip_is_not_sent(tmp_path):
    strategy, _ = start(mff.SecureForm(threshold=0.51, clip=1e-3, num_clients=N), 1, app(state=tmp_path), failed_rounds=None)
    assert strategy.rows[0]["active"] == 0
    assert any("clip" in why for why in strategy.rows[0]["failed"].values())


def test_quantisation_error_is_at_most_one_level():
    """Clients quantise in float64: in float32 the error would be up to eight levels."""
    from flwr.app import Array, ArrayRecord, RecordDict
    from flwr.common import parameters_to_ndarrays
    from flwr.common.secure_aggregation.quantization import dequantize, quantize
    from flwr.compat.common.recorddict_compat import recorddict_to_fitres

    from mimicfl.flower.secagg_client import _as_fit_result
    from mimicfl.flower.wire import config_record

    clip, levels = 8.0, 2**28
    g = np.random.default_rng(0).uniform(-clip, clip, 20_000).astype(np.float32)
    message = Message(RecordDict(), 1, "train")
    records = {"update": ArrayRecord({"g": Array(g)}), "mimicfl": config_record({"ticket": "x"})}
    sent = _as_fit_result(Message(RecordDict(records), reply_to=message), message)
    [value] = parameters_to_ndarrays(recorddict_to_fitres(sent.content, True).parameters)
    [back] = dequantize(quantize([value], clip, levels), clip, levels)
    assert np.abs(back - g.astype(np.float64)).max() <= 2 * clip / levels * 1.001


@pytest.mark.parametrize(("clients", "bits"), [(3, 28), (7, 28), (8, 27), (100, 24)])
def test_secure_rounds_use_the_finest_levels_that_the_modulus_allows(clients, bits):
    """The documentation gives the error for up to 7 clients: 2 clip / 2^28."""
    loop = SimpleNamespace(round=SimpleNamespace(sent={}))
    secure = SecureRound(mff.SecureForm(), loop, dict.fromkeys(range(clients), RecordDict()), 3)
    assert secure.flow.quantization_range == 2**bits
    assert clients * 2**bits < 2**32


@pytest.mark.slow
@pytest.mark.parametrize(("threshold", "clients"), [(2 / 3, 3), (0.51, 4), (1.0, 3)])
def test_secure_rounds_with_few_clients(tmp_path, threshold, clients):
    strategy = mff.MimiC(form=mff.SecureForm(threshold=threshold, clip=64.0), **(BASE | {"num_clients": None, "wait_for": clients}))
    federation = mff.Federation(app(state=tmp_path), clients)
    with federation.running() as grid:
        strategy.start(grid, model_arrays(problem()[2])[0], 2, 10.0)
    assert [row["active"] for row in strategy.rows] == [clients] * 2


def test_secure_rounds_wait_for_a_third_client(tmp_path):
    strategy = mff.MimiC(form=mff.SecureForm(clip=64.0), **(BASE | {"num_clients": None, "wait_for": 2, "patience": 5.0}))
    federation = mff.Federation(app(state=tmp_path), 2)
    with federation.running() as grid, pytest.raises(UsageError, match="waited 5 s for 3"):
        strategy.start(grid, model_arrays(problem()[2])[0], 1, 10.0)


@pytest.mark.slow
def test_secure_run_continues_after_a_dropout_and_fails_below_three_clients(tmp_path):
    """Four clients; one leaves in round 1 and another one in round 3: rounds go on with three, then the run ends with the reason."""
    client, left = app(state=tmp_path), []

    def leaves(node, message, context):
        t, number = int(message.metadata.group_id) - 1, context.node_config["partition-id"]
        if message.metadata.message_type == "train" and (number, t) in ((0, 1), (1, 3)) and number not in left:
            left.append(number)
            federation.leave(node)
            return None
        return None if number in left else client(message, context)

    federation = mff.Federation(leaves, 4)
    strategy = mff.MimiC(form=mff.SecureForm(threshold=0.51, clip=64.0), **(BASE | {"num_clients": None, "wait_for": 4, "patience": 60.0}))
    with federation.running() as grid, pytest.raises(UsageError, match="3 idle client"):
        strategy.start(grid, model_arrays(problem()[2])[0], 6, 10.0)
    assert [row["active"] for row in strategy.rows] == [4, 3, 3, 0]


def test_secure_threshold_must_be_above_one_half():
    with pytest.raises(UsageError, match="threshold"):
        mff.SecureForm(threshold=0.5)
