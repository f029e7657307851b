"""The algorithms, by name. A new one is a class with `init`, `task` and `aggregate`, and one line: `register("mine", Mine)`."""

from .base import ALGORITHMS, Algorithm, State, Step, Task, checked_task, make, memory, register, spell
from .fedau import FedAU
from .fedavg import FedAvg
from .fedavgm import FedAvgM
from .fedprox import FedProx
from .fedvarp import FedVARP
from .mifa import MIFA
from .mimic import MimiC
from .scaffold import SCAFFOLD

__all__ = [
    "ALGORITHMS",
    "MIFA",
    "SCAFFOLD",
    "Algorithm",
    "FedAU",
    "FedAvg",
    "FedAvgM",
    "FedProx",
    "FedVARP",
    "MimiC",
    "State",
    "Step",
    "Task",
    "checked_task",
    "make",
    "memory",
    "register",
    "spell",
]
