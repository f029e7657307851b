"""The clients of the federation."""

import mimicfl as mf
from flower_lora.task import data, model
from mimicfl.flower import client_app

app = client_app(model, data, local=mf.LocalSGD(epochs=2, batch_size=8))
