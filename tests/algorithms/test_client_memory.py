"""Per-client state takes room for clients that were seen, wherever the budget puts it, and survives a checkpoint."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

import mimicfl as mf
from mimicfl.algorithms.client_memory import Budget, ClientMemory

D = 6


@pytest.mark.parametrize(("budget", "place"), [(Budget(), "host"), (Budget(host=0), "file")])
def test_reads_what_was_written_and_zeros_elsewhere(budget, place, tmp_path):
    rows, dense = ClientMemory(torch.zeros(D), 500), torch.zeros(500, D)
    rows.budget = Budget(budget.device, budget.host, tmp_path)
    rng = np.random.default_rng(0)
    for _ in range(40):
        active = torch.from_numpy(np.sort(rng.choice(500, 7, replace=False)))
        values = torch.randn(7, D)
        torch.testing.assert_close(rows[active], dense[active], rtol=0, atol=0)
        rows[active], dense[active] = values, values
    assert torch.equal(rows[:], dense)
    assert rows.where == place
    assert rows.count == int((dense != 0).any(dim=1).sum())
    assert len(rows.store) < 500
    assert list(tmp_path.iterdir()) == []  # the file has no name: a killed process leaves nothing behind
    other = ClientMemory(torch.zeros(D), 500)
    other.restore(**rows.tensors())
    assert torch.equal(other[:], dense)
    assert torch.equal(rows[3], dense[3])


def test_budgets_in_words():
    assert Budget.parse("auto") == Budget()
    assert Budget.parse("0.5") == Budget(2**29, 2**29)
    assert Budget.parse("1,2") == Budget(2**30, 2**31)
    for wrong in ("", "much", "1,2,3", "-1"):
        with pytest.raises(mf.UsageError, match="state_budget"):
            Budget.parse(wrong)


@pytest.mark.parametrize("algorithm", ["scaffold", "mifa", "mimic"])
def test_state_in_a_file_changes_nothing_and_resumes(digits, tmp_path, algorithm):
    arguments = {**digits, "algorithm": algorithm, "availability": "static:0.2", "rounds": 6}
    plain = mf.simulate(**arguments)

    def stop(row, total):
        if row["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mf.simulate(**arguments, state_budget="0", out=tmp_path / "run", checkpoint_every=1, progress=stop)
    assert torch.equal(mf.simulate(**arguments, state_budget="0", out=tmp_path / "run").params, plain.params)


@pytest.mark.slow
def test_a_population_of_a_hundred_thousand():
    """100 of 100,000 clients a round: under 2 GiB, with state for those who were seen."""
    program = textwrap.dedent("""
        import resource
        import numpy as np
        import torch
        import mimicfl as mf
        N = 100_000
        random = np.random.default_rng(0)
        x = torch.from_numpy(random.normal(size=(4 * N, 20)).astype(np.float32))
        y = torch.from_numpy((x[:, 0] > 0).numpy().astype(np.int64))
        data = mf.Data(x, y, x[:1000], y[:1000])
        split = np.arange(4 * N).reshape(N, 4)
        seen = np.zeros((10, N), bool)
        for row in seen:
            row[random.choice(N, 100, replace=False)] = True
        history = mf.simulate(mf.models.MLP(20, 200, 2), data, split, "mimic", mf.availability.Explicit(seen), local=mf.LocalSGD(lr=0.1))
        print(history.rows[-1]["active"], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
    """)
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    active, mebibytes = map(int, out.stdout.split())
    assert active == 100
    assert mebibytes < 2048
