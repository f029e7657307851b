"""Custom local loops: one function replaces the local steps, on plain and workers."""

import pytest
import torch

import mimicfl as mf
from tests.conftest import end_on


def sgd_loop(work):
    """Plain SGD, written by hand."""
    total = 0.0
    for x, y in work.batches:
        work.model.zero_grad()
        value = work.loss(work.model(x), y)
        value.backward()
        work.add_terms()
        with torch.no_grad():
            for p in work.model.parameters():
                p -= work.lr * p.grad
        total += float(value.detach())
    return total / len(work.batches)


def forgetful_loop(work):
    optimizer = torch.optim.SGD(work.model.parameters(), lr=work.lr)
    for x, y in work.batches:
        optimizer.zero_grad()
        value = work.loss(work.model(x), y)
        value.backward()
        optimizer.step()
    return value


def sending_loop(work):
    x, y = work.batches[0]
    value = work.loss(work.model(x), y)
    gradients = torch.autograd.grad(value, list(work.model.parameters()))
    with torch.no_grad():
        for p, gradient in zip(work.model.parameters(), gradients, strict=True):
            p -= work.lr * gradient
    return {"loss": value, "curvature": torch.cat([each.reshape(-1) for each in gradients]) ** 2}


class Curvature(mf.Algorithm):
    uploads = 2

    def instructions(self, state, active):
        return mf.Instructions(send=("curvature",))

    def aggregate(self, state, active, g, step):
        state.w = state.w - step.eta * step.mean(g) / (1 + step.mean(step.sent["curvature"]))


@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox:mu=0.5", "scaffold"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.filterwarnings("ignore:SCAFFOLD treats")
def test_a_loop_that_does_sgd_equals_sgd(quadratic, algorithm, decay):
    given = {**quadratic, "algorithm": algorithm, "rounds": 4, "availability": "static:0.6"}
    common = {"epochs": 2, "batch_size": 5, "lr": 0.05, "weight_decay": decay}
    built_in, own = (mf.simulate(**given, local=local) for local in (mf.LocalSGD(**common), mf.Local(**common, loop=sgd_loop)))
    torch.testing.assert_close(own.params, built_in.params, rtol=1e-9, atol=1e-11)
    assert [row["train_loss"] for row in own.rows] == pytest.approx([row["train_loss"] for row in built_in.rows])


def test_vectors_that_a_loop_sends(quadratic):
    history = mf.simulate(**quadratic, algorithm=Curvature(), rounds=1, local=mf.Local(batch_size=None, lr=0.05, loop=sending_loop))
    data, split = quadratic["data"], quadratic["split"]
    gradients = [-(data.x_train[part].T @ data.y_train[part])[:, 0] / len(part) for part in split]  # at w = 0
    g, curvature = (torch.stack(rows).mean(dim=0) for rows in (gradients, [each**2 for each in gradients]))
    torch.testing.assert_close(history.params, -0.05 * g / (1 + curvature), rtol=1e-9, atol=1e-11)


def idle_loop(work):
    return 0.5


def untidy_loop(work):
    """Trains, then leaves the model frozen and in evaluation mode."""
    assert work.model.training
    assert all(p.requires_grad for p in work.model.parameters())
    loss = sgd_loop(work)
    work.model.eval().requires_grad_(False)
    return loss


def test_rounding_is_no_part_of_an_update(digits):
    """A loop that does nothing changes nothing, also if the parameters are in half precision."""

    def loop(work):
        return idle_loop(work) if work.round else sgd_loop(work)

    given = {**digits, "model": mf.models.MLP(64, 8, 10).bfloat16(), "algorithm": "fedavg", "local": mf.Local(steps=1, lr=0.01, loop=loop)}
    one, two = (mf.simulate(**given, rounds=rounds) for rounds in (1, 2))
    assert torch.equal(one.params, two.params)


def test_the_next_client_does_not_notice_what_a_loop_leaves_behind(quadratic):
    tidy, untidy = (mf.simulate(**quadratic, rounds=2, local=mf.Local(steps=2, lr=0.05, loop=loop)) for loop in (sgd_loop, untidy_loop))
    assert torch.equal(tidy.params, untidy.params)


@pytest.mark.parametrize("value", [float("nan"), torch.tensor(float("inf"))])
def test_a_loss_that_is_not_finite_means_divergence(quadratic, value):
    with pytest.raises(mf.Diverged, match="client 0"):
        mf.simulate(**quadratic, rounds=1, local=mf.Local(loop=lambda work: value))


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "used"), [("workers", "workers"), ("batched", "plain"), ("native", "plain")])
def test_engines(digits, engine, used):
    given = {**digits, "rounds": 2, "availability": "static:0.3", "local": mf.Local(steps=3, lr=0.05, loop=forgetful_loop)}
    if used == "plain":
        notices = []
        mf.simulate(**given, engine=engine, notice=notices.append)
        assert notices[0].startswith("engine plain: ")
        assert "custom loop" in notices[0]
    else:
        torch.testing.assert_close(end_on(engine, **given), end_on("plain", **given), rtol=1e-5, atol=1e-6)


def test_the_source_is_part_of_the_fingerprint():
    first, second = (mf.Local(loop=loop).fingerprint for loop in (sgd_loop, forgetful_loop))
    assert first != second


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"algorithm": "fedprox:mu=0.5", "local": {"loop": forgetful_loop}}, "add_terms"),
        ({"local": {"loop": forgetful_loop, "weight_decay": 0.1}}, "add_terms"),
        ({"local": {"loop": lambda work: None}}, "the loss that the loop"),
        ({"algorithm": Curvature(), "local": {"loop": sgd_loop}}, "must return it as a vector"),
        ({"local": {"loop": sgd_loop, "optimizer": "adam"}}, "makes its own steps"),
        ({"local": {"loop": sgd_loop, "momentum": 0.5}}, "momentum is not an option of a custom loop"),
        ({"local": {"loop": 3}}, "loop must be a function"),
    ],
)
def test_bad_loops_are_refused(quadratic, given, words):
    with pytest.raises(mf.UsageError, match=words):
        mf.simulate(**quadratic, rounds=1, algorithm=given.get("algorithm", "fedavg"), local=mf.Local(**given["local"]))
