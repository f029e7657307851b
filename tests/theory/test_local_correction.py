"""Correcting the local steps on quadratics: what a memory keeps, and which gains and strengths of the shift are stable."""

import numpy as np
import pytest

N, K = 10, 250
CURVATURES = (0.1, 0.5, 1, 2, 3, 5, 8, 16, 50, 200)  # z = eta K L


def response(z):
    """phi: the mean gradient of K steps along f(w) = L w^2 / 2 from w, divided by L w; and 1 where L = 0."""
    return (1 - (1 - z / K) ** K) / z if z else 1.0


def one_round(i, z, curved, gain, a):
    """The linear map of (w, y_1, ..., y_N) if client i is the only active one; L is 1 for the curved clients, else 0, and eta K = z."""
    e = np.eye(N + 1)
    w, y, v = e[0], e[1 + i], np.r_[0.0, np.full(N, 1 / N)]
    phi = response(z * curved[i])
    p = phi * curved[i] * w - (1 - phi) * a * (v - y)
    v_new = v + (p - y) / N
    rows = e.copy()
    rows[1 + i] = p
    rows[0] = w - z * (v_new + gain * (v + p - y - v_new))
    return rows


def growth(z, share, gain, a):
    """By how much the second moments of model and memories grow per round, with one random client per round."""
    curved = (np.arange(N) < share * N).astype(float)
    maps = [one_round(i, z, curved, gain, a) for i in range(N)]
    return np.abs(np.linalg.eigvals(sum(np.kron(A, A) for A in maps) / N)).max()


@pytest.mark.parametrize("z", [0.5, 20.0])
def test_one_round_is_what_the_local_steps_do(z):
    """The formula of p against the steps themselves, for a curved and a flat client."""
    rng = np.random.default_rng(0)
    state, a, gain, eta = rng.normal(size=N + 1), 0.7, 0.4, z / K
    curved = np.r_[1.0, np.zeros(N - 1)]
    for i in (0, 1):
        w, y, taken = state[0], state[1:], []
        shift = a * (y.mean() - y[i])
        for _ in range(K):
            taken.append(curved[i] * w + shift)
            w = w - eta * taken[-1]
        p = np.mean(taken) - shift
        after = y.copy()
        after[i] = p
        v = after.mean() + gain * (y.mean() + p - y[i] - after.mean())
        np.testing.assert_allclose(one_round(i, z, curved, gain, a) @ state, np.r_[state[0] - eta * K * v, after], rtol=1e-9)


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("a", [0.5, 0.8])
def test_a_weaker_shift_is_stable_for_every_curvature(share, a):
    assert max(growth(z, share, 1.0, a) for z in CURVATURES) < 0.99


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
def test_the_full_shift_stops_forgetting(share):
    """Stable, but the more curvature times steps, the slower anything decays."""
    late = [growth(z, share, 1.0, 1.0) for z in (8, 16, 50, 200)]
    assert late == sorted(late)
    assert 0.998 < late[-1] < 1


def test_without_the_shift_a_gain_of_one_is_unstable_and_mifa_is_not():
    assert growth(8, 0.2, 1.0, 0.0) > 1.04
    assert max(growth(z, share, 0.0, 0.0) for z in CURVATURES for share in (0.1, 0.2, 0.5, 1.0)) < 1


def test_half_the_gain_and_half_the_shift_are_stable_even_if_one_client_has_all_the_curvature():
    assert max(growth(z, share, 0.5, 0.5) for z in CURVATURES for share in (0.1, 0.2, 0.5, 1.0)) < 1
    assert growth(5, 0.1, 1.0, 0.5) > 1  # where gain 1 is not


@pytest.mark.parametrize("a", [0.0, 0.5, 0.8, 1.0])
def test_noise_in_the_memory_grows_at_most_by_the_factor_that_a_allows(a):
    """y+ = a (1 - phi) y + noise: the variance at rest, over that of the noise."""
    rng, y, squares = np.random.default_rng(1), 0.0, []
    keep = a * (1 - response(50.0))
    for noise in rng.normal(size=40_000):
        y = keep * y + noise
        squares.append(y * y)
    assert np.mean(squares) == pytest.approx(1 / (1 - keep**2), rel=0.15)
    if a < 1:
        assert 1 / (1 - keep**2) <= 1 / (1 - a**2)
    else:
        assert 1 / (1 - keep**2) == pytest.approx(50 / 2, rel=0.03)
