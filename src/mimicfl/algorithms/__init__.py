"""The algorithms, by name. A new one is a class that inherits from `Algorithm`, in its own file, imported and listed here."""

from . import server_optimizers as server_optimizers
from .amplified_fedavg import AmplifiedFedAvg
from .amplified_scaffold import AmplifiedSCAFFOLD
from .base import ALGORITHMS as ALGORITHMS
from .base import Algorithm, Instructions, State, Step, memory, register
from .base import declared as declared
from .base import is_algorithm as is_algorithm
from .base import make as make
from .base import paper_algorithms as paper_algorithms
from .base import spell as spell
from .base import trait as trait
from .fedau import FedAU
from .fedavg import FedAvg
from .fedavgm import FedAvgM
from .fedawe import FedAWE
from .fedbuff import FedBuff
from .fedgain import FedGain
from .fedprox import FedProx
from .fedstale import FedStale
from .fedsteer import FedSteer
from .fedvarp import FedVARP
from .focus import FOCUS
from .known_p import KnownP
from .mifa import MIFA
from .mimic import MimiC
from .scaffold import SCAFFOLD

__all__ = [
    "FOCUS",
    "MIFA",
    "SCAFFOLD",
    "Algorithm",
    "AmplifiedFedAvg",
    "AmplifiedSCAFFOLD",
    "FedAU",
    "FedAWE",
    "FedAvg",
    "FedAvgM",
    "FedBuff",
    "FedGain",
    "FedProx",
    "FedStale",
    "FedSteer",
    "FedVARP",
    "Instructions",
    "KnownP",
    "MimiC",
    "State",
    "Step",
    "memory",
    "register",
    "server_optimizers",
]
