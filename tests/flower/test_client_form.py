"""MimiC with corrections at the clients: equal to the server form when replies are lost."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import mimicfl.flower as mff
from mimicfl.errors import UsageError
from mimicfl.flower.client_state import ClientState
from mimicfl.flower.wire import tensor
from tests.flower.lossy import BASE, Lossy, start
from tests.flower.problems import N, app, federate, flat, participation, schedule, simulated


@pytest.mark.slow
def test_client_form_equals_the_simulator_when_replies_are_lost(tmp_path):
    """Replies are lost before and after training; a correction is committed only after the server acknowledges the reply."""
    rng = np.random.default_rng(5)
    failures = {(c, t): rng.choice(["", "before", "after"], p=[0.5, 0.2, 0.3]) for t in range(8) for c in range(N)}
    strategy, result = start(mff.ClientForm(num_clients=N), 8, Lossy(tmp_path, lambda c, t, _: failures[c, t]))
    available = participation(strategy.rows)
    assert [[int(not failures[c, t]) for c in range(N)] for t in range(8)] == available
    assert torch.equal(flat(result.arrays), simulated("mimic", available).params)


@pytest.mark.slow
def test_server_keeps_v_only_while_a_client_needs_it(tmp_path):
    available = schedule(8)
    form = mff.ClientForm(num_clients=N)
    strategy, _ = start(form, 8, Lossy(tmp_path, lambda c, t, _: "" if available[t, c] else "before"))
    needed = {t for client, (token, t) in form.counted.items() if form.committed.get(client) != token}
    assert set(form.v) == needed
    assert 1 <= len(form.v) <= N
    assert participation(strategy.rows) == available.astype(int).tolist()


@pytest.mark.slow
def test_committing_unacknowledged_updates_gives_a_wrong_result(tmp_path, monkeypatch):
    """Shows that the equality test can fail: a client that commits every pending update ends at a different model."""

    def commits_always(self, content):
        if self.pending is None or "v" not in content.array_records:
            return reconcile(self, content)
        self.c, self.token, self.pending = tensor(content, "v", "v") - self.pending, str(self.request["counted"]), None
        return True

    reconcile = ClientState.reconcile
    monkeypatch.setattr(ClientState, "reconcile", commits_always)
    lost = {(1, 1), (1, 2), (3, 2)}
    strategy, result = start(mff.ClientForm(num_clients=N), 6, Lossy(tmp_path, lambda c, t, _: "after" if (c, t) in lost else ""))
    assert not torch.allclose(flat(result.arrays), simulated("mimic", participation(strategy.rows)).params, atol=1e-6)


@pytest.mark.slow
def test_server_killed_during_a_round_resumes_with_the_same_clients(tmp_path, monkeypatch):
    """Round 3 is trained twice: the clients drop the pending update of the first attempt."""
    client = app(state=tmp_path / "clients")
    options = {"folder": tmp_path / "run"}
    first = mff.MimiC(form=mff.ClientForm(num_clients=N), **BASE, **options)
    original = type(first).apply

    def fails(self, t, *rest):
        if t == 3:
            raise SystemExit("killed")
        return original(self, t, *rest)

    monkeypatch.setattr(type(first), "apply", fails)
    with pytest.raises(SystemExit):
        federate(first, 6, client)
    monkeypatch.undo()
    second = mff.MimiC(form=mff.ClientForm(num_clients=N), **BASE, **options)
    result, _ = federate(second, 6, client)
    assert len(second.rows) == 6
    assert torch.equal(flat(result.arrays), simulated("mimic", [[1] * N] * 6).params)


@pytest.mark.slow
def test_lost_client_state_resets_all_corrections(tmp_path):
    """Corrections must sum to zero: after a loss all of them restart at zero, and training continues from the current model."""
    erased = []

    def erase(client, t, _):
        if (client, t) == (2, 3) and not erased:
            erased.append([file.unlink() for file in tmp_path.rglob("*.safetensors")][:1])
        return ""

    # Client 0 has replied before the files are erased; the clients after it lose their state.
    form = mff.ClientForm(num_clients=N)
    strategy, result = start(form, 8, Lossy(tmp_path, erase))
    assert any("lost its correction" in why for why in strategy.rows[3]["failed"].values())
    assert participation(strategy.rows)[-1] == [1] * N
    assert bool(torch.isfinite(flat(result.arrays)).all())
    v = form.v[7]
    corrections = [v - load_file(file)["pending"] for file in tmp_path.rglob("*.safetensors")]  # what each client commits next
    assert len(corrections) == N
    torch.testing.assert_close(sum(corrections), torch.zeros_like(v), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mff.FedVARP(form=mff.ClientForm(num_clients=N), num_clients=N), "form 'client' needs an algorithm"),
        (lambda: mff.MimiC(memory="step", form=mff.ClientForm(num_clients=N)), "form 'client' needs an algorithm"),
        (lambda: mff.MimiC(form=mff.ClientForm(num_clients=N), update="mean"), "update is 'sum'.*'mean'"),
    ],
)
def test_form_that_does_not_match_the_strategy_is_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_client_form_needs_a_state_folder(tmp_path):
    strategy, _ = start(mff.ClientForm(num_clients=N), 1, app(), failed_rounds=None)
    assert ["state-dir" in why for why in strategy.rows[0]["failed"].values()] == [True] * N
