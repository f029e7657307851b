"""Callbacks: inspect every round of a run, add measurements, stop early, keep the best model, or send the rows to a tracker."""

from ..metrics.rows import Row as Row
from .best import BestModel
from .interface import Callback, RoundInfo, RunInfo
from .mlflow import MLflow
from .stopping import EarlyStopping
from .table import CSV
from .tensorboard import TensorBoard
from .tracker import TRACKERS, Tracker, make, send
from .wandb import WandB

TRACKERS.register("tensorboard", TensorBoard)
TRACKERS.register("wandb", WandB)
TRACKERS.register("mlflow", MLflow)
TRACKERS.register("csv", CSV)

__all__ = [
    "CSV",
    "BestModel",
    "Callback",
    "EarlyStopping",
    "MLflow",
    "RoundInfo",
    "RunInfo",
    "TensorBoard",
    "Tracker",
    "WandB",
    "make",
    "send",
]
