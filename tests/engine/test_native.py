"""The native cohort is held to the plain one: every layer, any batch, all algorithms, and whatever cannot be compiled falls back."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import mimicfl as mf
from mimicfl.data.clients import Clients
from mimicfl.data.dataset import as_split
from mimicfl.engine.native import Unsupported, build
from mimicfl.engine.native.cohort import NativeCohort, Plan, Program
from mimicfl.engine.native.generate import generate
from mimicfl.engine.native.trace import trace
from mimicfl.local.losses import as_loss
from mimicfl.params import flatten
from mimicfl.runner import resume

pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler on this machine")


@pytest.fixture(autouse=True)
def _shared_cache(tmp_path_factory, monkeypatch):
    """One library cache for this file: the same small network need not be compiled for every test."""
    monkeypatch.setenv("MIMICFL_CACHE", str(tmp_path_factory.getbasetemp() / "native-cache"))
    monkeypatch.delenv("MIMICFL_ENGINE")


def problem(shape, outputs, n=40, loss="cross-entropy"):
    x = torch.randn(n, *shape)
    y = torch.arange(n) % outputs if loss == "cross-entropy" else torch.randn(n, outputs)
    return mf.Data(x, y, x, y)


def assert_close(ours, theirs, tolerance=2e-5):
    scale = float(theirs.abs().max().clamp_min(1e-3))
    assert float((ours - theirs).abs().max()) <= tolerance * scale


def check_gradients(model, data, loss="cross-entropy", flags=(), batches=(1, 5, 16, 17, 33)):
    """One step without moving, for batches that fill, underfill and overfill the lanes, against autograd."""
    program = Program(model, data, as_loss(loss), flags)
    w = flatten(model)
    pool, target = program.pool(data.x_train), program.target(data.y_train)
    for size in batches:
        rows = np.random.default_rng(size).permutation(len(pool))[:size]
        g, value = program.train(w, pool, target, Plan([(rows, [size])], [0]), None, 0.0, 0.0, 1)
        exact_value = as_loss(loss)(model(data.x_train[rows]), data.y_train[rows])
        exact = torch.cat([p.reshape(-1) for p in torch.autograd.grad(exact_value, list(model.parameters()))])
        assert_close(g[0], exact)
        assert float(value) == pytest.approx(float(exact_value.detach()), rel=1e-5)
    assert_close(program.predict(w, pool, 2), model(data.x_train).detach())


LAYERS = {
    "linear": (nn.Sequential(nn.Linear(7, 3)), (7,)),
    "linear-no-bias": (nn.Sequential(nn.Linear(37, 13, bias=False), nn.ReLU(), nn.Linear(13, 5)), (37,)),
    "tanh": (nn.Sequential(nn.Linear(9, 20), nn.Tanh(), nn.Linear(20, 6), nn.Tanh(), nn.ReLU(), nn.Linear(6, 3)), (9,)),
    "conv": (nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.Conv2d(5, 7, 3), nn.Flatten(), nn.Linear(7 * 16, 4)), (2, 8, 8)),
    "conv-stride": (
        nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.Conv2d(4, 3, 2, stride=(2, 1)), nn.Flatten(), nn.Linear(12, 4)),
        (1, 10, 8),
    ),
    "conv-padding": (
        nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, (3, 5), padding=(1, 2), bias=False), nn.Flatten(), nn.Linear(100, 3)
        ),
        (3, 5, 5),
    ),
    "conv-both": (
        nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 9, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(144, 3)),
        (2, 8, 7),
    ),
    "conv-1x1": (nn.Sequential(nn.Conv2d(5, 8, 1), nn.ReLU(), nn.Conv2d(8, 2, 1), nn.Flatten(), nn.Linear(32, 3)), (5, 4, 4)),
    "conv-wide": (nn.Sequential(nn.Conv2d(1, 2, (1, 11)), nn.Conv2d(2, 2, (3, 9)), nn.Flatten(), nn.Linear(2 * 2 * 12, 3)), (1, 4, 30)),
    "max-pool": (nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 9, 3)), (1, 8, 8)),
    "max-pool-overlap": (nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d(3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 3)), (1, 9, 9)),
    "max-pool-rest": (nn.Sequential(nn.Conv2d(1, 3, 2), nn.MaxPool2d((2, 3)), nn.Flatten(), nn.Linear(3 * 3 * 2, 3)), (1, 8, 9)),
    "avg-pool": (nn.Sequential(nn.Conv2d(2, 4, 3), nn.AvgPool2d(2, 1), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 16, 3)), (2, 7, 7)),
    "pool-first": (nn.Sequential(nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(18, 3)), (1, 8, 8)),
    "lenet": (mf.models.LeNet(), (1, 28, 28)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_against_autograd(name):
    model, shape = LAYERS[name]
    outputs = model(torch.zeros(1, *shape)).shape[1]
    check_gradients(model, problem(shape, outputs))


def test_mean_squared_error_against_autograd():
    check_gradients(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), problem((6,), 3, loss="mse"), "mse")


@pytest.mark.parametrize("flags", [("-DLANES=8", "-mavx2", "-mfma"), ("-DLANES=4",), ("-DLANES=1",)], ids=lambda f: f[0])
def test_every_width_is_right(flags):
    if "-mavx2" in flags and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    for name in ("lenet", "conv-both"):
        model, shape = LAYERS[name]
        check_gradients(model, problem(shape, model(torch.zeros(1, *shape)).shape[1]), flags=flags, batches=(3, 16, 19))


@st.composite
def networks(draw):
    """A random chain that fits its input."""
    c, h, w = draw(st.integers(1, 4)), draw(st.integers(5, 13)), draw(st.integers(5, 13))
    shape, layers = (c, h, w), []
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["conv", "conv", "max", "avg"]))
        k = (draw(st.integers(1, min(4, h))), draw(st.integers(1, min(4, w))))
        s = (draw(st.integers(1, 2)), draw(st.integers(1, 2)))
        if kind == "conv":
            p, out = draw(st.integers(0, min(k) - 1)) if min(k) > 1 else 0, draw(st.integers(1, 9))
            layers.append(nn.Conv2d(c, out, k, s, p, bias=draw(st.booleans())))
            c, h, w = out, (h + 2 * p - k[0]) // s[0] + 1, (w + 2 * p - k[1]) // s[1] + 1
        else:
            layers.append((nn.MaxPool2d if kind == "max" else nn.AvgPool2d)(k, s))
            h, w = (h - k[0]) // s[0] + 1, (w - k[1]) // s[1] + 1
        if draw(st.booleans()):
            layers.append(draw(st.sampled_from([nn.ReLU, nn.Tanh]))())
    layers.append(nn.Flatten())
    width = c * h * w
    for _ in range(draw(st.integers(0, 1))):
        out = draw(st.integers(1, 40))
        layers += [nn.Linear(width, out), nn.ReLU()]
        width = out
    return nn.Sequential(*layers, nn.Linear(width, draw(st.integers(2, 12)))), shape


@given(networks(), st.integers(1, 40))
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_random_networks_against_autograd(network, size):
    model, shape = network
    data = problem(shape, model[-1].out_features)
    if float(model(data.x_train).detach().abs().max()) > 0:
        check_gradients(model, data, batches=(size,))


class Functional(nn.Module):
    """The same LeNet idea without a single nn.ReLU or nn.Flatten."""

    def __init__(self):
        super().__init__()
        self.c1, self.c2, self.f1, self.f2 = nn.Conv2d(1, 6, 3), nn.Conv2d(6, 8, 3), nn.Linear(8, 16), nn.Linear(16, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.c1(x)), 2)
        x = torch.tanh(self.c2(x))
        return self.f2(torch.relu(self.f1(torch.flatten(x, 1))))


def test_networks_are_found_by_what_they_do():
    kinds = [layer.kind for layer in trace(Functional(), (1, 8, 8))]
    assert kinds == ["conv", "max_pool", "relu", "conv", "tanh", "linear", "relu", "linear"]
    check_gradients(Functional(), problem((1, 8, 8), 10))


@pytest.fixture
def images():
    data = mf.datasets.load("digits")
    split = mf.partition.dirichlet(data.y_train, 12, 0.5, min_samples=3, seed=0)  # unequal clients, last batches of all sizes
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 20), nn.ReLU(), nn.Linear(20, 10))
    return {"model": model, "data": data, "split": split}


@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox:mu=0.5", "scaffold", "mifa", "mimic"])
@pytest.mark.parametrize("update", ["sum", "mean"])
def test_all_algorithms_equal_the_plain_engine(images, algorithm, update):
    arguments = {**images, "algorithm": algorithm, "availability": "static:0.5,warm_start=true", "rounds": 4, "update": update}
    local = mf.LocalSGD(epochs=2, batch_size=16, lr=0.05)
    native, plain = (mf.simulate(**arguments, local=local, engine=engine, global_lr=0.02) for engine in ("native", "plain"))
    assert_close(native.params, plain.params, 1e-4)
    for ours, theirs in zip(native.rows, plain.rows, strict=True):
        assert ours["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-4)
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-4)
        assert ours["clients"] == theirs["clients"]


def test_threads_change_nothing(images):
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(mf.simulate(**images, availability="static:0.7", rounds=3, engine="native").params)
    torch.set_num_threads(1)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_augmented_images_equal_the_plain_engine():
    x, y = torch.randint(0, 256, (60, 3, 8, 8), dtype=torch.uint8), torch.arange(60) % 4
    data = mf.Data(x, y, x, y, augment=True, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
    runs = [mf.simulate(model, data, mf.partition.iid(y, 4), rounds=2, engine=engine).params for engine in ("native", "plain")]
    assert_close(*runs, 1e-4)


def test_channels_are_scaled_each_by_its_own_formula():
    x, y = torch.randint(0, 256, (30, 3, 6, 6), dtype=torch.uint8), torch.arange(30) % 3
    data = mf.Data(x, y, x, y, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 3))
    program = Program(model, data, as_loss("cross-entropy"))
    assert program.uint8
    assert_close(program.predict(flatten(model), program.pool(x), 1), model(data.inputs(x, torch.float32)).detach())


class TestDropout:
    def data(self):
        x = torch.ones(64, 50)
        return mf.Data(x, torch.zeros(64, 1), x, torch.zeros(64, 1))

    def masks(self, p, key=0, steps=1):
        """A linear layer after dropout of ones: the gradient counts which inputs survived."""
        model = nn.Sequential(nn.Linear(50, 50, bias=False), nn.Dropout(p), nn.Linear(50, 1, bias=False))
        with torch.no_grad():
            model[0].weight.copy_(torch.eye(50))
            model[2].weight.fill_(1.0)
        data = self.data()
        program = Program(model, data, as_loss("mse"))
        plan = Plan([(np.tile(np.arange(64), steps), [64] * steps)], [key])
        g, _ = program.train(flatten(model), program.pool(data.x_train), program.target(data.y_train), plan, None, 0.0, 0.0, 1)
        return g[0, -50:], program, model, data

    @pytest.mark.parametrize("p", [0.2, 0.5])
    def test_survivors_are_scaled_up(self, p):
        g, *_ = self.masks(p, steps=40)
        # d loss / d w_j = mean over samples of output * m_j; outputs are near 50, m_j is 0 or 1/(1-p) with mean 1
        expected = 50 + p / (1 - p)
        assert float(g.mean() / 40) == pytest.approx(expected, rel=0.03)

    def test_keys_decide_and_evaluation_drops_nothing(self):
        one, program, model, data = self.masks(0.5, key=1)
        assert torch.equal(one, self.masks(0.5, key=1)[0])
        assert not torch.equal(one, self.masks(0.5, key=2)[0])
        assert_close(program.predict(flatten(model), program.pool(data.x_test), 1), model.eval()(data.x_test).detach())

    def test_in_a_whole_run(self, digits):
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10))
        arguments = {"data": digits["data"], "split": digits["split"], "rounds": 25, "local": mf.LocalSGD(epochs=4, lr=0.1)}
        runs = [mf.simulate(model, **arguments, engine=e).rows[-1]["test_accuracy"] for e in ("native", "plain")]
        assert runs[0] == pytest.approx(runs[1], abs=0.05)
        assert runs[0] > 0.8


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x):
        x = x.flatten(1)
        return self.b(x + self.a(x))


class Moody(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(64, 10)

    def forward(self, x):
        return self.a(x.flatten(1)) if x.sum() > 0 else self.a(-x.flatten(1))


def smooth(output, target):
    return F.cross_entropy(output, target, label_smoothing=0.1)


class TestFallingBack:
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"model": Residual()}, "not a chain"),
            ({"model": Moody()}, "cannot be traced"),
            ({"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Softplus())}, "Softplus layer with no native form"),
            ({"model": mf.models.MLP(64, 32, 10).double()}, "float64"),
            ({"loss": smooth}, "neither cross-entropy nor mse"),
        ],
    )
    def test_the_run_goes_on_and_says_why(self, digits, monkeypatch, change, words):
        monkeypatch.setattr("mimicfl.engine.pick.WORTH_IT", 0.0)
        said = []
        history = mf.simulate(**{**digits, **change}, rounds=1, notice=said.append)
        assert len(history.rows) == 1
        assert said[0].startswith("engine plain: ")
        assert words in said[0]
        with pytest.raises(mf.UsageError, match="the native engine cannot run this model"):
            mf.simulate(**{**digits, **change}, rounds=1, engine="native")

    def test_batchnorm(self, digits):
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
        with pytest.warns(UserWarning, match="GroupNorm"), pytest.raises(mf.UsageError, match="buffers"):
            mf.simulate(**{**digits, "model": model}, rounds=1, engine="native")

    def test_no_compiler(self, digits, monkeypatch):
        monkeypatch.setattr("mimicfl.engine.pick.WORTH_IT", 0.0)
        monkeypatch.setattr(build.shutil, "which", lambda name: None)
        said = []
        mf.simulate(**digits, rounds=1, notice=said.append)
        assert said == ["engine plain: no C++ compiler was found (install g++ or clang++)"]

    def test_a_wrong_program_is_found_out(self, digits, monkeypatch):
        """The self-check compares with autograd before the first round."""
        from mimicfl.engine.native import cohort

        real = cohort.trace
        monkeypatch.setattr(cohort, "trace", lambda model, shape: [layer for layer in real(model, shape) if layer.kind != "relu"])
        clients = Clients(digits["data"], as_split(digits["split"], 1442), torch.device("cpu"), torch.float32)
        with pytest.raises(Unsupported, match="disagrees with PyTorch"):
            NativeCohort(digits["model"], clients, mf.LocalSGD(), as_loss("cross-entropy"))


def test_auto_takes_what_measures_fastest(digits, monkeypatch):
    said = []
    mf.simulate(**digits, rounds=2, notice=said.append)
    assert "too little to compile for" in said[0]
    monkeypatch.setattr("mimicfl.engine.pick.WORTH_IT", 0.0)
    mf.simulate(**digits, rounds=2, notice=said.append)
    assert said[1].startswith("engine native: measured ")
    monkeypatch.setattr("mimicfl.engine.pick.trial", lambda cohort, run: 1.0 if cohort.name == "plain" else 2.0)
    mf.simulate(**digits, rounds=2, notice=said.append)
    assert said[2] == "engine plain: measured 2.0 times as fast as native here"


def test_a_stopped_native_run_ends_bit_equal(tmp_path, monkeypatch):
    class Stop(Exception):
        pass

    def stop(e, row, total):
        if row["round"] == 3:
            raise Stop

    e = mf.Experiment(rounds=8, availability="static:0.3", engine="native", checkpoint_every=2)
    whole = mf.run(e, tmp_path / "whole")
    with pytest.raises(Stop):
        mf.run(e, tmp_path / "stopped", stop)
    again = resume(tmp_path / "stopped")
    assert torch.equal(whole.params, again.params)
    # An "auto" run keeps the engine it began with, whatever would measure fastest now.
    monkeypatch.setattr("mimicfl.engine.pick.WORTH_IT", 0.0)
    auto = mf.Experiment(rounds=8, availability="static:0.3", checkpoint_every=2)
    with pytest.raises(Stop):
        mf.run(auto, tmp_path / "auto", stop)
    monkeypatch.setattr("mimicfl.engine.pick.WORTH_IT", 1e9)
    said = []
    assert torch.equal(resume(tmp_path / "auto", notice=said.append).params, whole.params)
    assert said == ["engine native"]


class TestCache:
    source = 'extern "C" int mimicfl_train() { return 1; } extern "C" int mimicfl_outputs() { return 2; }\n'

    def test_compiled_once(self, tmp_path, monkeypatch):
        monkeypatch.setenv("MIMICFL_CACHE", str(tmp_path))
        first = build.library(self.source)
        made = first.stat().st_mtime_ns
        assert build.library(self.source) == first
        assert first.stat().st_mtime_ns == made
        assert build.library(self.source + "// other") != first

    def test_a_failed_compile_leaves_nothing(self, tmp_path, monkeypatch):
        monkeypatch.setenv("MIMICFL_CACHE", str(tmp_path))
        with pytest.raises(Unsupported, match="the compiler refused"):
            build.library("this is not C++")
        assert [p for p in (tmp_path / "native").iterdir() if p.suffix != ".lock"] == []

    def test_a_damaged_library_is_made_anew(self, tmp_path, monkeypatch):
        monkeypatch.setenv("MIMICFL_CACHE", str(tmp_path))
        build.library(self.source).write_bytes(b"\x7fELF garbage")
        assert build.open_library(self.source).mimicfl_train is not None

    def test_a_killed_compile_is_nothing_to_the_next(self, tmp_path):
        """Kill the whole process while the compiler works; the next one compiles and runs."""
        program = "import mimicfl as mf, sys; d = mf.datasets.load('digits')\n"
        program += "mf.simulate(mf.models.MLP(64, 77, 10), d, mf.partition.iid(d.y_train, 3), rounds=1, engine='native'); print('done')"
        environment = {**os.environ, "MIMICFL_CACHE": str(tmp_path)}
        process = subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, start_new_session=True)
        deadline = time.monotonic() + 60
        while not list((tmp_path / "native").glob("*.lock")) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)
        os.killpg(process.pid, 9)
        process.communicate()
        assert not list((tmp_path / "native").glob("*.so"))
        both = [subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        assert [p.communicate(timeout=120)[0] for p in both] == ["done\n", "done\n"]  # two at once wait for one compile
        assert len(list((tmp_path / "native").glob("*.so"))) == 1


HARNESS = """
#include <cstdio>
int main() {
  const int n = 23, m = 3;
  std::vector<float> w(Net::D), shift((size_t)m * Net::D, 0.001f), table(256 * Net::CHANNELS, 0.5f), out((size_t)n * Net::OUTPUTS);
  for (int k = 0; k < Net::D; k++) w[k] = 0.2f * sinf(0.7f * k);
  std::vector<Sample> pool((size_t)n * Net::FEATURES);
  for (size_t k = 0; k < pool.size(); k++) pool[k] = (Sample)(3 + 3 * cosf(0.37f * k));
  std::vector<Target> target((size_t)n * (sizeof(Target) == 4 ? Net::OUTPUTS : 1), 0);
  std::vector<int64_t> rows, begin, step{0};
  std::vector<int32_t> sizes;
  for (int c = 0; c < m; c++) {
    begin.push_back(rows.size());
    for (int b : {5, 16, 1, 23}) { sizes.push_back(b); for (int i = 0; i < b; i++) rows.push_back((i * 7 + c) % n); }
    step.push_back(sizes.size());
  }
  std::vector<uint64_t> key(m, 42);
  std::vector<float> g((size_t)m * Net::D);
  std::vector<double> loss(m);
  int bad = mimicfl_train(w.data(), g.data(), loss.data(), pool.data(), table.data(), target.data(), rows.data(), begin.data(),
                          sizes.data(), step.data(), shift.data(), key.data(), 0.01f, 0.1f, m, 2);
  bad |= mimicfl_outputs(w.data(), pool.data(), table.data(), n, out.data(), 2);
  for (int c = 0; c < m; c++) {
    double norm = 0;
    for (int k = 0; k < Net::D; k++) norm += (1 + k % 7) * (double)g[(size_t)c * Net::D + k] * g[(size_t)c * Net::D + k];
    printf("%.9g %.9g\\n", norm, loss[c]);
  }
  return bad;
}
"""
CROSS, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")


@pytest.mark.skipif(not (CROSS and EMULATOR), reason="no ARM compiler and emulator here (Debian: g++-aarch64-linux-gnu, qemu-user)")
@pytest.mark.parametrize("name", ["lenet", "conv-both", "max-pool-overlap", "tanh"])
def test_neon_agrees_with_this_processor(name, tmp_path):
    model, shape = LAYERS[name]
    source = generate(trace(model, shape), flatten(model).numel(), "cross-entropy", uint8=False) + HARNESS
    numbers = []
    for compiler, runner in (([build.compiler(), "-march=native"], []), ([CROSS, "-static"], [EMULATOR])):
        command = [*compiler, "-std=c++17", "-O2", "-w", "-pthread", "-x", "c++", "-", "-o", str(tmp_path / "check")]
        subprocess.run(command, input=source, text=True, check=True)
        done = subprocess.run([*runner, str(tmp_path / "check")], capture_output=True, text=True, check=True)
        numbers.append([float(word) for word in done.stdout.split()])
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)


@pytest.mark.parametrize(
    "name", ["lenet", "conv-both", "conv-stride", "max-pool-overlap", "max-pool-rest", "avg-pool", "conv-wide", "tanh"]
)
def test_never_out_of_bounds(name, tmp_path):
    """A debug build under the address and undefined-behaviour sanitizers, with buffers of exactly the right size."""
    model, shape = LAYERS[name]
    source = generate(trace(model, shape), flatten(model).numel(), "cross-entropy", uint8=name == "lenet")
    program = tmp_path / "check"
    command = [build.compiler(), "-std=c++17", "-O1", "-g", "-w", "-march=native", "-pthread", "-fsanitize=address,undefined"]
    command += ["-fno-sanitize-recover=all", "-x", "c++", "-", "-o", str(program)]
    made = subprocess.run(command, input=source + HARNESS, text=True, capture_output=True)
    if "cannot find" in made.stderr and "san" in made.stderr:
        pytest.skip("this compiler has no sanitizers")
    assert made.returncode == 0, made.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
