"""mimicfl: federated learning when clients drop out."""

from . import availability
from ._version import __version__ as __version__
from .algorithms import MIFA, SCAFFOLD, FedAU, FedAvg, FedAvgM, FedProx, FedVARP, MimiC, State, Step, Task, memory, register
from .config import Experiment
from .data import datasets, partition
from .data.dataset import Data
from .engine.moment import Moment
from .engine.simulate import simulate
from .errors import Diverged, UsageError
from .local import losses, lr, models
from .local.update import LocalSGD
from .metrics.history import History
from .runner import frame, read, run
from .sweep import compare

__all__ = [
    "MIFA",
    "SCAFFOLD",
    "Data",
    "Diverged",
    "Experiment",
    "FedAU",
    "FedAvg",
    "FedAvgM",
    "FedProx",
    "FedVARP",
    "History",
    "LocalSGD",
    "MimiC",
    "Moment",
    "State",
    "Step",
    "Task",
    "UsageError",
    "availability",
    "compare",
    "datasets",
    "frame",
    "losses",
    "lr",
    "memory",
    "models",
    "partition",
    "read",
    "register",
    "run",
    "simulate",
]
