"""Compiled code: cached, free of out-of-bounds accesses, and equal on another processor."""

import os
import shutil
import subprocess

import pytest

from mimicfl.clients.params import flatten
from mimicfl.engines.native import Unsupported, build
from mimicfl.engines.native.generate import generate
from mimicfl.engines.native.trace import trace
from tests.engines.native.problems import LAYERS, WIDE, needs_compiler

pytestmark = needs_compiler


class TestCache:
    source = 'extern "C" int mimicfl_train() { return 1; } extern "C" int mimicfl_outputs() { return 2; }\n'

    def test_source_is_compiled_once(self, tmp_path, monkeypatch):
        monkeypatch.setenv("MIMICFL_CACHE", str(tmp_path))
        first = build.library(self.source)
        made = first.stat().st_mtime_ns
        assert build.library(self.source) == first
        assert first.stat().st_mtime_ns == made
        assert build.library(self.source + "// other") != first

    def test_failed_compile_leaves_no_files(self, tmp_path, monkeypatch):
        monkeypatch.setenv("MIMICFL_CACHE", str(tmp_path))
        with pytest.raises(Unsupported, match="the compiler refused"):
            build.library("this is not C++")
        assert [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"] == []


HARNESS = """
#include <cstdio>
int main() {
  const int n = 23, m = 3;
  std::vector<float> w(Net::D), shift(Net::D, 0.001f), table(256 * Net::CHANNELS, 0.5f), out((size_t)n * Net::OUTPUTS);
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
  std::vector<const float*> shifts(m, shift.data());
  std::vector<float> eta(m, 0.01f), mu(m, 0.1f), beta(m, 0.5f), clip{0.5f, 0, 0};
  const std::vector<int32_t> order{2, 0, 1};
  int bad = mimicfl_train(w.data(), model.data(), g.data(), loss.data(), pool.data(), table.data(), target.data(), rows.data(),
                          begin.data(), sizes.data(), step.data(), shifts.data(), key.data(), eta.data(), mu.data(),
                          beta.data(), clip.data(), order.data(), m, 2);
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
@pytest.mark.parametrize("name", ["lenet", "conv-both", "max-pool-overlap", "tanh", "winograd-padding"])
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["lenet", "conv-both", "conv-stride", "max-pool-overlap", "max-pool-rest", "avg-pool", "conv-wide", "tanh", *WIDE]
)
def test_no_access_is_out_of_bounds(name, tmp_path):
    """Runs a build with the address and undefined-behaviour sanitizers, and buffers of exactly the right size.

    It is not optimised: it compiles in half the time, and no access is optimised away before it is checked. Debug information is left out,
    because GCC takes minutes to write it for some networks.
    """
    model, shape = LAYERS[name]
    source = generate(trace(model, shape), flatten(model).numel(), "cross-entropy", uint8=name == "lenet")
    program = tmp_path / "check"
    command = [build.compiler(), "-std=c++17", "-O0", "-w", "-march=native", "-pthread", "-fsanitize=address,undefined"]
    command += ["-fno-sanitize-recover=all", "-x", "c++", "-", "-o", str(program)]
    made = subprocess.run(command, input=source + HARNESS, text=True, capture_output=True)
    if "cannot find" in made.stderr and "san" in made.stderr:
        pytest.skip("this compiler has no sanitizers")
    assert made.returncode == 0, made.stderr
    # GCC before 13.3 places 64-byte aligned variables wrongly in the stack frames that this check moves to the heap.
    options = os.environ | {"ASAN_OPTIONS": "detect_stack_use_after_return=0"}
    done = subprocess.run([str(program)], capture_output=True, text=True, env=options)
    assert done.returncode == 0, done.stderr
