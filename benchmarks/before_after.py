"""Two versions of mimicfl side by side: `python benchmarks/before_after.py OLD/src src [--device cuda]`.

Each case runs in a process of its own, old and new in turn, so that a busy machine disturbs both alike. Printed are the medians and
the ratio new / old with the spread of the pairs. The final models are compared as well: a faster wrong answer would show.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

RUN = "h = mf.run(mf.Experiment({}))\nresult = float(h.params.double().abs().sum())"
IMAGES = """
import torch
from torch import nn
def block(a, b):
    return [nn.Conv2d(a, b, 3, padding=1), nn.ReLU()]
models = {{
    "lenet": lambda: [nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                      nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)],
    "vgg": lambda: [*block(3, 64), nn.MaxPool2d(2), *block(64, 128), nn.MaxPool2d(2), *block(128, 256), *block(256, 256), nn.MaxPool2d(2),
                    *block(256, 512), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2048, 10)],
}}
torch.manual_seed(0)
model = nn.Sequential(*models["{model}"]())
x, y = torch.randn(6000, {shape}), torch.randint(0, 10, (6000,))
split = [torch.arange(k, 6000, 30) for k in range(30)]
h = mf.simulate(model, mf.Data(x, y, x[:100], y[:100]), split, "mimic", "static:0.5", {rounds}, device="cuda", engine="{engine}",
                local=mf.LocalSGD(steps={steps}, batch_size={batch}, lr=0.01), eval_every=1000)
result = float(h.params.double().abs().sum())
"""
CPU = {
    "import": "result = 0.0",
    "2,000 rounds of one step, plain": RUN.format('dataset="synthetic", rounds=2000, steps=1, engine="plain", eval_every=100'),
    "digits, plain": RUN.format('rounds=12, availability="static:0.5", engine="plain"'),
    "digits, native": RUN.format('rounds=150, availability="static:0.5", engine="native"'),
    "digits, 100 clients, SCAFFOLD": RUN.format('rounds=40, num_clients=100, algorithm="scaffold", engine="native"'),
    "checkpoint every round": RUN.replace("))\n", "), out)\n").format('rounds=200, steps=1, checkpoint_every=1, engine="plain"'),
    "mimicfl compare": """
from mimicfl.cli.main import main
main(["compare", "--rounds", "30", "--seeds", "2", "--out", out])
result = sum(float(mf.read(p).params.double().abs().sum()) for p in sorted(__import__("pathlib").Path(out).iterdir()) if p.is_dir())
""",
}
GPU = {
    "LeNet, batched": IMAGES.format(shape="1, 28, 28", model="lenet", rounds=40, steps=20, batch=16, engine="batched"),
    "VGG, streams": IMAGES.format(shape="3, 32, 32", model="vgg", rounds=6, steps=10, batch=32, engine="streams"),
}
PROGRAM = """
import json, os, sys, tempfile, time
start = time.perf_counter()
import mimicfl as mf
imported = time.perf_counter() - start
import torch
torch.set_num_threads(1)
with tempfile.TemporaryDirectory() as out, open(os.devnull, "w") as nowhere:
    shown, sys.stdout = sys.stdout, nowhere
    for again in range({repeats}):  # the first prepares: data, compiled code, CUDA graphs
        out = os.path.join(out, "x")
        start = time.perf_counter()
        {body}
        took = time.perf_counter() - start
    sys.stdout = shown
print(json.dumps([imported if {first} else took, result]))
"""


def once(source: str, name: str, body: str) -> tuple[float, float]:
    text = PROGRAM.format(body=body.strip().replace("\n", "\n        "), first=name == "import", repeats=1 if name == "import" else 2)
    environment = os.environ | {"PYTHONPATH": os.path.abspath(source), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} with {source}:\n{done.stderr[-2000:]}")
    took, result = json.loads(done.stdout.splitlines()[-1])
    return took, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    print("| case | old, s | new, s | new / old (range of pairs) | same model |\n|---|---|---|---|---|", flush=True)
    for name, body in (CPU if arguments.device == "cpu" else GPU).items():
        pairs = [(once(arguments.old, name, body), once(arguments.new, name, body)) for _ in range(arguments.pairs)]
        old, new = ([pair[k][0] for pair in pairs] for k in (0, 1))
        ratios = sorted(b / a for a, b in zip(old, new, strict=True))
        results = {pair[k][1] for pair in pairs for k in (0, 1)}
        same = "to the bit" if len(results) == 1 else f"relative difference {max(results) / min(results) - 1:.0e}"
        middle = [statistics.median(values) for values in (old, new, ratios)]
        print(f"| {name} | {middle[0]:.3f} | {middle[1]:.3f} | {middle[2]:.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}) | {same} |", flush=True)


if __name__ == "__main__":
    main()
