"""One table of algorithms through one battery of properties, and what is particular to each."""

import copy
import dataclasses

import numpy as np
import pytest
import torch

import mimicfl as mf
from mimicfl.algorithms import ALGORITHMS, Step, make
from mimicfl.algorithms.client_memory import ClientMemory
from tests.conftest import BUILT_IN, random_schedule

NAMES = [
    *BUILT_IN,
    "scaffold:uploads=2",
    "mifa:never_seen=exclude",
    "mifa:never_seen=wait",
    "mimic:memory=step",
    "fedau:cutoff=2",
    "fedawe:clip=0.05,evaluate=mean",
    "fedgain:follow=innovations",
    "fedsteer:gain=0.6,follow=direction",
    "fedsteer:gain=0.5,never_seen=zero",
    "fedsteer:horizon=400",
]
NOT_FEDAVG_ALONE = ("fedprox", "fedavgm", "focus")  # with a single client the others take the same steps as FedAvg
N, D = 5, 4


def step(m, eta=0.1, update="sum", n=N, t=0, g=None):
    """The step of a round with m clients; g serves as whatever else they send."""
    one = torch.ones(m, dtype=torch.float64)
    return Step(t, eta, eta, torch.full((m,), 3), one / m, one / n, update, {"last_gradient": g}, participation_rates=one / 2)


def rounds(algorithm, schedule, n=N, seed=0):
    """Aggregate random updates along a schedule; returns the state after each round."""
    rng = np.random.default_rng(seed)
    updates = torch.from_numpy(rng.normal(size=(len(schedule), n, D)))
    state = algorithm.init(torch.ones(D, dtype=torch.float64), n)
    for t, row in enumerate(schedule):
        active = torch.from_numpy(np.flatnonzero(row))
        if len(active):
            algorithm.instructions(state, active)
            algorithm.aggregate(state, active, updates[t, active], step(len(active), n=n, t=t, g=updates[t, active]))
    return state


@pytest.mark.parametrize("name", NAMES)
class TestEvery:
    def test_absent_clients_keep_their_memory(self, name):
        algorithm = make(name)
        state = rounds(algorithm, np.ones((2, N), bool))
        before = {f.name: copy.deepcopy(getattr(state, f.name)) for f in dataclasses.fields(state)}
        active = torch.tensor([1, 3])
        g = torch.randn(2, D, dtype=torch.float64)
        algorithm.aggregate(state, active, g, step(2, t=2, g=g))
        absent = [0, 2, 4]
        for field, old in before.items():
            if len(old.shape) and old.shape[0] == N:
                assert torch.equal(getattr(state, field)[absent], old[absent])
        assert not torch.equal(state.w, before["w"])

    @pytest.mark.slow
    def test_renumbering_clients_changes_nothing(self, name):
        schedule = random_schedule(12, N, seed=5)
        order = np.array([3, 0, 4, 1, 2])
        plain = rounds(make(name), schedule)
        rng = np.random.default_rng(0)
        updates = torch.from_numpy(rng.normal(size=(12, N, D)))[:, order]
        algorithm = make(name)
        state = algorithm.init(torch.ones(D, dtype=torch.float64), N)
        for t, row in enumerate(schedule[:, order]):
            active = torch.from_numpy(np.flatnonzero(row))
            if len(active):
                algorithm.aggregate(state, active, updates[t, active], step(len(active), t=t, g=updates[t, active]))
        torch.testing.assert_close(state.w, plain.w, rtol=1e-12, atol=1e-13)

    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_the_dtype_is_kept(self, name, dtype, quadratic):
        quadratic["model"].to(dtype)
        history = mf.simulate(**quadratic, algorithm=name, availability="static:0.5,warm_start=true", rounds=4)
        assert history.params.dtype == dtype

    @pytest.mark.slow
    def test_a_cohort_of_one(self, name, quadratic):
        one = [quadratic["split"][0]]
        runs = [mf.simulate(quadratic["model"], quadratic["data"], one, algorithm=a, rounds=3).params for a in (name, "fedavg")]
        if name not in NOT_FEDAVG_ALONE:
            torch.testing.assert_close(*runs)
        assert runs[0].norm() > 0

    def test_state_is_tensors_only(self, name):
        state = make(name).init(torch.ones(D), N)
        assert all(isinstance(getattr(state, f.name), (torch.Tensor, ClientMemory)) for f in dataclasses.fields(state))


@pytest.mark.parametrize("name", NAMES)
def test_vectors_sent_are_counted(quadratic, name):
    row = mf.simulate(**quadratic, algorithm=name, rounds=3, local=mf.LocalSGD(steps=1)).rows[-1]
    up, down = 2 if "uploads=2" in name else 1, 2 if "scaffold" in name or "fedsteer" in name else 1
    clients = len(quadratic["split"])
    assert (row["uploads"], row["vectors_up"], row["vectors_down"]) == (3 * up, 3 * up * clients, 3 * down * clients)


@pytest.mark.parametrize(("away", "weight"), [(1, 1.0), (49, 1.0), (50, 50.0), (149, 50.0)])
def test_fedau_counts_cut_gaps_of_a_client_never_seen(away, weight):
    algorithm = mf.FedAU()
    state = algorithm.init(torch.zeros(D, dtype=torch.float64), N)
    algorithm.aggregate(state, torch.tensor([2]), torch.ones(1, D, dtype=torch.float64), step(1, eta=N, t=away))
    assert float(-state.w[0]) == pytest.approx(weight)


def test_fedau_gives_rare_clients_larger_weights():
    """Away 80 rounds at a time, and none cut off: 80 times its share."""
    algorithm = mf.FedAU(cutoff=1000)
    state = algorithm.init(torch.zeros(D, dtype=torch.float64), N)
    for t in range(79, 800, 80):
        before = state.w.clone()
        algorithm.aggregate(state, torch.tensor([2]), torch.ones(1, D, dtype=torch.float64), step(1, eta=N, t=t))
    assert float((before - state.w)[0]) == pytest.approx(80)


def test_fedau_does_not_count_forced_rounds():
    """A warm start says nothing about availability: the estimator begins with the next round."""
    algorithm, everybody = mf.FedAU(), torch.arange(N)
    state = algorithm.init(torch.zeros(D, dtype=torch.float64), N)
    g = torch.ones(N, D, dtype=torch.float64)
    algorithm.aggregate(state, everybody, g, dataclasses.replace(step(N), forced=True))
    assert float(-state.w[0]) == pytest.approx(0.1)  # the step itself is FedAvg's
    assert state.counted.tolist() == [0] * N
    algorithm.aggregate(state, torch.tensor([2]), g[:1], step(1, t=8))
    assert float(state.gap[2]) == 8.0  # not (1 + 8) / 2


def test_registry_lists_all_algorithms():
    assert set(ALGORITHMS) >= {"fedau", "fedavg", "fedavgm", "fedprox", "fedvarp", "scaffold", "mifa", "mimic"}
    assert set(ALGORITHMS) >= {"fedawe", "fedstale", "fedgain", "fedsteer", "focus", "amplified-fedavg", "amplified-scaffold", "known-p"}


def test_fedprox_with_mu_zero_is_fedavg_to_the_bit(digits):
    schedule = mf.availability.TimeVarying(0.2)
    results = [mf.simulate(**digits, algorithm=a, availability=schedule, rounds=5).params for a in (mf.FedAvg(), mf.FedProx(mu=0.0))]
    assert torch.equal(*results)


@pytest.mark.slow
def test_fedprox_holds_clients_near_the_global_model(digits):
    moved = []
    for mu in (0.0, 1.0, 10.0):
        history = mf.simulate(**digits, algorithm=mf.FedProx(mu), rounds=1, local=mf.LocalSGD(epochs=5, lr=0.05))
        moved.append(
            float((history.params - mf.simulate(**digits, algorithm="fedavg", rounds=1, local=mf.LocalSGD(lr=1e-9)).params).norm())
        )
    assert moved[0] > moved[1] > moved[2] > 0


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_scaffold_keeps_c_the_mean_of_all_controls(quadratic, weighting):
    sizes = np.arange(1, N + 1) if weighting == "samples" else np.ones(N)
    share = torch.from_numpy(sizes / sizes.sum())
    algorithm = mf.SCAFFOLD()
    state = algorithm.init(torch.zeros(D, dtype=torch.float64), N)
    rng = np.random.default_rng(1)
    for t, row in enumerate(random_schedule(30, N, seed=2)):
        active = torch.from_numpy(np.flatnonzero(row))
        if not len(active):
            continue
        own = share[active]
        g = torch.from_numpy(rng.normal(size=(len(active), D)))
        algorithm.aggregate(state, active, g, Step(t, 0.1, 0.1, torch.full((len(active),), 4), own / own.sum(), own))
        torch.testing.assert_close(state.c, share @ state.c_i[:], rtol=1e-12, atol=1e-13)
    assert state.c.norm() > 0


def test_scaffold_controls_are_the_mean_plain_gradients(quadratic):
    """Option II with the shift taken back out: c_i becomes the mean gradient along the local path."""
    algorithm = mf.SCAFFOLD()
    state = algorithm.init(torch.zeros(D, dtype=torch.float64), N)
    state.c, state.c_i[:] = torch.randn(D, dtype=torch.float64), torch.randn(N, D, dtype=torch.float64)
    active = torch.tensor([0, 2])
    plain = torch.randn(2, D, dtype=torch.float64)
    shift = algorithm.instructions(state, active).shift
    for update, g in (("sum", 3 * (plain + shift)), ("mean", plain + shift)):
        fresh = copy.deepcopy(state)
        algorithm.aggregate(fresh, active, g, step(2, update=update))
        torch.testing.assert_close(fresh.c_i[active], plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mimic", "mifa", "fedvarp", "fedau", "fedawe", "fedstale", "fedgain", "known-p", "fedavgm:momentum=0"])
def test_without_dropouts_they_equal_fedavg(quadratic, name):
    runs = [mf.simulate(**quadratic, algorithm=a, rounds=8, local=mf.LocalSGD(steps=3, lr=0.02)).params for a in (name, "fedavg")]
    torch.testing.assert_close(*runs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_mimics_corrections_always_sum_to_zero(weighting):
    """v_t is the mean of g_i + c_i, so the new corrections v_t - g_i of the active sum to the old ones: the sum over all clients
    never leaves zero. Where MimiC rests (v = 0, c_i = -grad f_i) all gradients then sum to zero: only stationary points are left."""
    sizes = np.arange(1, N + 1) if weighting == "samples" else np.ones(N)
    share = torch.from_numpy(sizes / sizes.sum())
    algorithm = mf.MimiC()
    state = algorithm.init(torch.zeros(D, dtype=torch.float64), N)
    rng = np.random.default_rng(1)
    for t, row in enumerate(random_schedule(40, N, seed=2)):
        active = torch.from_numpy(np.flatnonzero(row))
        if len(active):
            own = share[active]
            g = torch.from_numpy(rng.normal(size=(len(active), D)))
            algorithm.aggregate(state, active, g, Step(t, 0.1, 0.1, torch.ones(len(active)), own / own.sum(), own))
    assert state.c[:].norm() > 1
    torch.testing.assert_close(share @ state.c[:], torch.zeros(D, dtype=torch.float64), rtol=0, atol=1e-13)


def test_corrections_rescale_with_the_rate():
    """Memory is in gradient units: after the rate falls, an old correction counts with the new rate; in `step` units it does not."""
    g = torch.ones(1, D, dtype=torch.float64)
    moved = {}
    for memory in ("gradient", "step"):
        algorithm = mf.MimiC(memory=memory)
        state = algorithm.init(torch.zeros(D, dtype=torch.float64), N)
        state.c[0] = 2.0
        algorithm.aggregate(state, torch.tensor([0]), g, step(1, eta=0.5))
        moved[memory] = float(-state.w[0])
    assert moved == {"gradient": 0.5 * (1 + 2), "step": 0.5 * 1 + 2}


@pytest.mark.parametrize(("algorithm", "rows"), [(mf.MIFA(), "G"), (mf.FedVARP(), "y")])
def test_large_early_updates_leave_no_rounding_error(algorithm, rows):
    """In float32 the running mean must not keep the rounding of updates long replaced."""
    n = 20
    state = algorithm.init(torch.zeros(D), n)
    everybody = torch.arange(n)
    ones = torch.full((n,), 1 / n)
    for t in range(500):
        g = torch.randn(n, D) * (1e4 if t < 5 else 1.0)
        algorithm.aggregate(state, everybody, g, Step(t, 0.1, 0.1, torch.ones(n), ones, ones))
    torch.testing.assert_close(state.total.float(), getattr(state, rows)[:].mean(0), rtol=0, atol=1e-6)


def test_mifa_waits_until_every_client_has_participated():
    schedule = np.array([[1, 1, 1, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 1]], bool)
    start = torch.ones(D, dtype=torch.float64)
    assert torch.equal(rounds(mf.MIFA("wait"), schedule[:2]).w, start)
    assert not torch.equal(rounds(mf.MIFA("wait"), schedule).w, start)


@pytest.mark.parametrize(
    ("make_it", "words"),
    [
        (lambda: mf.FedProx(mu=-1), "mu"),
        (lambda: mf.MIFA("nobody"), "zero"),
        (lambda: mf.MimiC("eta"), "memory"),
        (lambda: mf.FedAU(0), "cutoff must be a whole number of at least 1"),
        (lambda: mf.FedAU(2.5), "cutoff"),
        (lambda: mf.FedAvgM(1.0), "less than 1"),
        (lambda: mf.FedAvgM(-0.1), "momentum"),
        (lambda: mf.FedAvgM(0.5, "no"), "damped must be true or false"),
    ],
)
def test_bad_options_are_refused(make_it, words):
    with pytest.raises(mf.UsageError, match=words):
        make_it()


def test_a_custom_algorithm_registers_in_one_line(quadratic):
    class Half(mf.FedAvg):
        def aggregate(self, state, active, g, step):
            state.w = state.w - 0.5 * step.eta * step.mean(g)
            return state

    mf.register("half", Half)
    half = mf.simulate(**quadratic, algorithm="half", rounds=1).params
    torch.testing.assert_close(half, mf.simulate(**quadratic, algorithm="fedavg", rounds=1).params / 2)


def test_state_per_client_in_plain_tensors_cannot_grow():
    from mimicfl.algorithms.server import Server

    def rate(t, m):
        return 0.1

    server = Server(mf.FedAU(), torch.zeros(D), {}, torch.full((2,), 0.5), local_lr=rate, global_lr=rate)
    with pytest.raises(mf.UsageError, match=r"mf\.memory"):
        server.grow(4, torch.full((4,), 0.25))
    server = Server(mf.MimiC(), torch.zeros(D), {}, torch.full((2,), 0.5), local_lr=rate, global_lr=rate)
    server.grow(4, torch.full((4,), 0.25))
    assert server.state.c.shape == (4, D)
