"""Run the whole federation in this process: python try_it.py [num-rounds=3 ...]"""

import sys
from pathlib import Path

from flower_lora.client_app import app as client
from flower_lora.server_app import app as server

from mimicfl.flower import try_app

sys.exit(try_app(server, client, Path(__file__).parent / "pyproject.toml", sys.argv[1:]))
