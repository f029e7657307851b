"""Compiling once, safely; never out of bounds; the same on another processor."""

import os
import shutil
import subprocess
import sys

import pytest

from mimicfl.engine.native import Unsupported, build
from mimicfl.engine.native.generate import generate
from mimicfl.engine.native.trace import trace
from mimicfl.params import flatten

from ...conftest import wait_until
from .problems import LAYERS, needs_compiler

pytestmark = needs_compiler


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
        # The compiler, but one that never ends: it says when it has begun to write.
        slow = tmp_path / "g++"
        slow.write_text(f"""#!/bin/sh
case "$*" in *-o*) for last; do :; done; echo half > "$last"; touch {tmp_path}/began; exec sleep 3600;; esac
exec {build.compiler()} "$@"
""")
        slow.chmod(0o755)
        held = environment | {"CXX": str(slow)}
        process = subprocess.Popen([sys.executable, "-c", program], env=held, stdout=subprocess.PIPE, start_new_session=True)
        wait_until(lambda: process.poll() is not None or (tmp_path / "began").exists(), "the compiler to begin")
        os.killpg(process.pid, 9)
        process.communicate()
        assert (tmp_path / "began").exists()
        assert not list((tmp_path / "native").glob("*.so"))
        both = [subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        assert [p.communicate()[0] for p in both] == ["done\n", "done\n"]  # two at once wait for one compile
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
  std::vector<int32_t> model(m, 0);
  std::vector<float> eta(m, 0.01f), mu(m, 0.1f), beta(m, 0.5f), clip(m, 0.5f);
  int bad = mimicfl_train(w.data(), model.data(), g.data(), loss.data(), pool.data(), table.data(), target.data(), rows.data(),
                          begin.data(), sizes.data(), step.data(), shift.data(), key.data(), eta.data(), mu.data(),
                          beta.data(), clip.data(), m, 2);
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
