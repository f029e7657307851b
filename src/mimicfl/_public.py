"""The public names of mimicfl. The package imports this module when the first of them is used, since it imports PyTorch."""

from . import callbacks, tasks
from . import participation as availability
from .algorithms import *  # noqa: F403  (an algorithm is exported once, there)
from .algorithms import __all__ as _algorithms
from .callbacks import RoundInfo
from .clients import losses, lr, models
from .clients.local import Local
from .clients.local_sgd import LocalSGD
from .data import datasets, partition
from .data.dataset import Data
from .errors import Diverged, UsageError
from .experiments.execute import compare, run
from .experiments.grid import sweep
from .experiments.results import frame, read
from .metrics.history import History
from .progress import ProgressBar
from .settings import Experiment
from .simulation.simulate import simulate

__all__ = [
    "Data",
    "Diverged",
    "Experiment",
    "History",
    "Local",
    "LocalSGD",
    "ProgressBar",
    "RoundInfo",
    "UsageError",
    "availability",
    "callbacks",
    "compare",
    "datasets",
    "frame",
    "losses",
    "lr",
    "models",
    "partition",
    "read",
    "run",
    "simulate",
    "sweep",
    "tasks",
]
__all__ += _algorithms
