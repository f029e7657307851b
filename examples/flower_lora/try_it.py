"""Run the whole federation in this process: python try_it.py [num-rounds=3 ...]"""

import sys
import tomllib
from pathlib import Path

from flower_lora.client_app import app as client
from flower_lora.server_app import app as server

from mimicfl.flower import simulate

config = tomllib.loads((Path(__file__).parent / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
config |= tomllib.loads("\n".join(sys.argv[1:]))
simulate(server, client, num_clients=int(config["num-clients"]), run_config=config)
