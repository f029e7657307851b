"""A hostile client among five: whatever it answers, the run goes on, and the model ends near that of the run without it.

Every kind of answer is tried in every form: updates of `client_app`, the client form, weights in Flower's own loop, and masked updates of
secure rounds, of which the server can check less; `test_client_form.py` spoils whole secure rounds, stage by stage.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import ndarray_to_bytes
from flwr.common.secure_aggregation.secaggplus_constants import Key, Stage
from flwr.serverapp.strategy import Strategy

import mimicfl.flower as mff
from mimicfl.errors import UsageError
from mimicfl.flower.messages import SentMessage
from mimicfl.flower.names import natural_key
from mimicfl.flower.round_record import Round
from mimicfl.flower.secure_form import SecureRound
from mimicfl.flower.wire import Layout
from tests.flower.attacks import ATTACKS, HARMLESS, first_array, record_of
from tests.flower.problems import LOCAL, N, app, federate, model_arrays, problem

ATTACKER, ROUNDS = 3, 3
BASE = {"fraction_evaluate": 1.0, "lr": LOCAL.lr, "wait_for": N}


class Hostile:
    """`client` with one attacker, who spoils every answer to training and evaluation; `absent`: who never answers at all."""

    def __init__(self, client, attack, absent=False):
        self.client, self.attack, self.absent = client, attack, absent

    def __call__(self, node, message, context):
        reply = self.client(message, context)
        if message.metadata.message_type == "query" or context.node_config["partition-id"] != ATTACKER:
            return reply
        if self.absent:
            raise RuntimeError("absent")
        try:
            self.attack(reply.content)
        except (IndexError, StopIteration, KeyError):  # an evaluation has no arrays to spoil
            reply.content["metrics"] = MetricRecord({"loss": [1.0, 2.0]})
        return reply


def trained(form, tmp_path, attack=None):
    """The strategy after training with the attacker, or without it."""
    options = dict(BASE)
    state = {}
    if form == "client":
        options |= {"form": mff.ClientForm()}
        state = {"state": tmp_path / ("with" if attack else "without")}
    strategy = mff.MimiC(**options)
    client = Hostile(app(**state), attack, absent=attack is None)
    if form == "flower":
        with mff.Federation(client, N).running() as grid:
            Strategy.start(strategy, grid, model_arrays(problem()[2])[0], ROUNDS, 20.0)
    else:
        federate(strategy, ROUNDS, client)
    return strategy


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The models of the runs without the attacker, per form; each is trained when it is first needed."""

    class Models(dict):
        def __missing__(self, form):
            self[form] = trained(form, tmp_path_factory.mktemp(form)).form.w
            return self[form]

    return Models()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["server", "client", "flower"])
@pytest.mark.parametrize("kind", ATTACKS)
def test_one_hostile_client_does_not_hurt_the_run(kind, form, tmp_path, undisturbed):
    strategy = trained(form, tmp_path, ATTACKS[kind])
    honest = {str(i) for i in range(N)} - {str(ATTACKER)}
    if form != "flower":
        assert all(honest <= set(row["answered"]) for row in strategy.rows)
        assert all("\x1b" not in str(row) and len(str(row)) < 5000 for row in strategy.rows)
    distance, scale = float((strategy.form.w - undisturbed[form]).norm()), float(undisturbed[form].norm())
    assert distance < 0.25 * scale  # the attacker's own data count if its answer is valid; a harmful one would end far away
    ignored = form != "client" and kind == "claims to have lost its correction"  # the server holds the corrections there
    if kind not in HARMLESS and not ignored:
        torch.testing.assert_close(strategy.form.w, undisturbed[form], atol=1e-5, rtol=0)


# What a masked vector does not show: its values, and metrics, which secure rounds ignore.
NOT_IN_MASKED = {"integers", "another name", "second record", "lost is a text", "claims another id"} | {
    kind
    for kind in ATTACKS
    if any(part in kind for part in ("metric", "samples", "steps", "loss is")) or kind.startswith(("id ", "huge integer"))
}


def masked_reply(attack):
    """A masked update, spoiled: the attack sees the vector as floating-point numbers, the message holds what it makes of them."""
    vector = np.arange(problem_size(), dtype=np.float64)
    shown = RecordDict({"update": ArrayRecord({"g": Array(vector)}), "metrics": MetricRecord({"num-examples": 1})})
    shown["mimicfl"] = ConfigRecord({"ticket": "a", "committed": ""})
    before = record_of(shown)["g"].data
    with np.errstate(all="ignore"):
        attack(shown)
    kept = record_of(shown).values() if shown.array_records else ()
    arrays = [ndarray_to_bytes(vector.astype(np.int64)) if array.data == before else array.data for array in kept]
    content = RecordDict({"secaggplus_configs": ConfigRecord({Key.MASKED_PARAMETERS: [ndarray_to_bytes(np.ones(1, np.int64)), *arrays]})})
    for name, record in [*shown.config_records.items(), *shown.metric_records.items()]:
        content[name] = record
    return SimpleNamespace(content=content, has_error=lambda: False)


def problem_size():
    return sum(p.numel() for p in problem()[2].parameters())


@pytest.fixture(scope="module")
def secure_round():
    arrays = model_arrays(problem()[2])[0]
    form = mff.SecureForm(clip=64.0)
    form.begin(Layout.of(arrays), arrays)
    sent = {str(i): SentMessage(i + 1, str(i), "secure", 0, Stage.COLLECT_MASKED_VECTORS) for i in range(N)}
    return SecureRound(form, SimpleNamespace(round=Round(0, 0.0, sent=sent)), {i + 1: RecordDict() for i in range(N)}, 3)


@pytest.mark.parametrize("kind", ATTACKS)
def test_secure_rounds_check_what_the_masks_allow(kind, secure_round):
    """The fourth form: a reply is refused with a reason, or it is a masked vector of the right shape; nothing raises."""
    secure_round.reasons.clear()
    sent = secure_round.loop.round.sent[str(ATTACKER)]
    accepted = secure_round._accept(sent, masked_reply(ATTACKS[kind]), sent.details)
    assert accepted == (kind in NOT_IN_MASKED)
    why = secure_round.reasons.get(str(ATTACKER), "")
    assert bool(why) == (not accepted)
    assert why.isprintable()
    assert len(why) < 300


def test_at_least_40_kinds_of_answers_are_tried():
    assert len(ATTACKS) >= 40


@pytest.mark.parametrize("kind", ["1e30", "unknown type"])
def test_hostile_answers_in_short(kind, tmp_path, undisturbed):
    """The fast tier's share of the above."""
    strategy = trained("server", tmp_path, ATTACKS[kind])
    assert str(ATTACKER) in strategy.rows[-1]["failed"]
    torch.testing.assert_close(strategy.form.w, undisturbed["server"], atol=1e-5, rtol=0)


def test_evaluation_leaves_out_clients_with_other_metrics():
    """Other keys, no weight, a zero weight, an empty answer and numbers that are not finite: the average is that of the others."""
    from tests.flower.toy import Toy, run

    odd = {0: {"num-examples": 1, "other": 5.0}, 1: {"loss": 5.0}, 2: {"num-examples": 0, "loss": 5.0}, 3: {}}
    odd |= {4: {"num-examples": 2, "loss": math.nan}, 5: {"num-examples": 2, "loss": math.inf}}

    def spoil(number, reply, message):
        if message.metadata.message_type == "evaluate":
            values = odd.get(number, {"num-examples": 2, "loss": 0.5})
            return Message(RecordDict({"metrics": MetricRecord(values)} if values else {}), reply_to=message)
        return reply

    result = run(mff.FedAvg(wait_for=8), Toy(spoil=spoil), clients=8, rounds=1)
    assert dict(result.evaluate_metrics_clientapp[1]) == {"loss": 0.5}


@pytest.mark.slow
def test_a_client_that_loses_its_correction_again_and_again_is_excluded(tmp_path):
    honest = app(state=tmp_path)

    def forgetful(node, message, context):
        reply = honest(message, context)
        t = int(message.content["config"]["server-round"]) if message.metadata.message_type == "train" else 1
        if context.node_config["partition-id"] == ATTACKER and t % 2 == 0:
            return Message(RecordDict({"mimicfl": ConfigRecord({"lost": 1})}), reply_to=message)
        return reply

    strategy = mff.MimiC(form=mff.ClientForm(), **(BASE | {"fraction_evaluate": 0.0}))
    federate(strategy, 10, forgetful)
    epochs = [row["failed"].get(str(ATTACKER), "") for row in strategy.rows]
    assert sum("lost its correction; all" in why for why in epochs) == 3
    assert "no longer participates" in epochs[-1]
    assert strategy.rows[-1]["answered"] == ["0", "1", "2", "4"]


@pytest.mark.parametrize("max_norm", [None, "30x", 5.0])
def test_the_norm_bound_is_on_by_default_and_can_be_turned_off(max_norm):
    def attack(content):
        record, name, value = first_array(content)
        record[name] = Array(value * np.float32(1e4))

    strategy = mff.MimiC(max_norm=max_norm, **(BASE | {"fraction_evaluate": 0.0}))
    federate(strategy, 1, Hostile(app(), attack))
    assert (str(ATTACKER) in strategy.rows[0]["failed"]) == (max_norm is not None)


def test_the_norm_bound_adapts_to_changes_that_all_clients_share(tmp_path):
    """All updates grow a hundredfold in round 2, and the run is resumed in between: nobody is refused."""

    def grows(node, message, context):
        reply = honest(message, context)
        if message.metadata.message_type == "train" and int(message.content["config"]["server-round"]) == 3:
            record, name, value = first_array(reply.content)
            record[name] = Array(value * np.float32(100))
        return reply

    honest = app()
    for rounds in (2, 3):
        strategy = mff.MimiC(folder=tmp_path, **(BASE | {"fraction_evaluate": 0.0}))
        federate(strategy, rounds, grows)
    assert [row["active"] for row in strategy.rows] == [N] * 3
    assert strategy.bound.last.keys() == {str(i) for i in range(N)}


@pytest.mark.parametrize(("robust", "expected"), [("median", 2.0), ("trimmed:0.2", 2.0), ("clip:0.5", None)])
def test_robust_aggregation(robust, expected):
    """Clients 0..4 with targets 0..4; client 4 pulls 20 times too far, which the norm bound lets pass."""
    from tests.flower.toy import Toy, run

    toy = Toy(lr=1.0, metrics=lambda number: {"num-examples": 1})
    toy.target_of = {}

    def spoil(number, reply, message):
        if number == 4 and message.metadata.message_type == "train":
            record, name, value = first_array(reply.content)
            record[name] = Array(value + np.float32(80))
        return reply

    toy.spoil = spoil
    plain, defended = (mff.FedAvg(robust=r, wait_for=5, lr=1.0, fraction_evaluate=0.0, max_norm=None) for r in (None, robust))
    for strategy in (plain, defended):
        run(strategy, toy, clients=5, rounds=1)
    assert float(plain.form.w[0]) == pytest.approx(18.0)
    if expected is not None:
        assert float(defended.form.w[0]) == pytest.approx(expected)
    else:
        assert float(defended.form.w.norm()) <= 0.5 + 1e-6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mff.MimiC(robust="median"), "memory of MimiC"),
        (lambda: mff.MIFA(robust="trimmed:0.1", num_clients=3), "memory of MIFA"),
        (lambda: mff.MimiC(robust="clip:1", form=mff.ClientForm()), "single updates"),
        (lambda: mff.FedAvg(robust="trimmed:0.5"), "below 0.5"),
        (lambda: mff.FedAvg(robust="krum"), "robust must be"),
        (lambda: mff.FedAvg(max_norm="far"), "max_norm must be"),
    ],
)
def test_robust_options_that_make_no_sense_are_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_ids_sort_whatever_they_hold():
    assert sorted(["10", "9", "²", "x٣", "a1b"], key=natural_key)[:2] == ["9", "10"]
