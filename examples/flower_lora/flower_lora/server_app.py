"""The server of the federation; its settings are in pyproject.toml. The algorithm is one word there."""

from flower_lora.task import model, test
from mimicfl.flower import server_app

app = server_app(model, test)
