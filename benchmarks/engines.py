"""Benchmarks the engines on typical workloads, starting with an empty compile cache: runs `mimicfl bench` once per workload.

python benchmarks/engines.py
"""

import os
import sys
import tempfile

from mimicfl.cli.main import main

WORKLOADS = [
    ["--model", "lenet", "--batch-size", "16", "--cohorts", "3,30"],
    ["--model", "mlp:32", "--batch-size", "16", "--cohorts", "3,30"],
    ["--model", "vgg11", "--batch-size", "32", "--cohorts", "2", "--steps", "2", "--repeats", "3"],
]

with tempfile.TemporaryDirectory() as folder:
    os.environ["MIMICFL_CACHE"] = folder  # an empty cache, so that the first compile is included
    sys.exit(max(main(["bench", *options]) for options in WORKLOADS))
