"""pfl-research with two processes (torchrun) and one thread per process, its fastest mode on two cores."""

import itertools
import os
import shutil
import tempfile
from pathlib import Path

os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # pfl 0.6 reads its clients' states with an older default of torch.load

import torch
import workload
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.algorithm.scaffold import SCAFFOLD, SCAFFOLDParams
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.user_state import DiskUserStateStorage
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops.selector import get_framework_module
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel

torch.set_num_threads(1)
work, rounds = workload.arguments()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = work.model()

    def loss(self, inputs, targets, eval=False):
        self.eval() if eval else self.train()
        return workload.loss(self.layers(inputs), targets)

    @torch.no_grad()
    def metrics(self, inputs, targets, eval=True):
        return {"loss": Weighted(self.loss(inputs, targets, True).item() * len(inputs), len(inputs))}


class Ticks(TrainingProcessCallback):
    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        clock.tick()
        return False, Metrics()


x, y = work.data()
schedule = itertools.chain.from_iterable(work.active(t % rounds).tolist() for t in itertools.count())
train = FederatedDataset(lambda user: Dataset(raw_data=[x[user], y[user]], user_id=str(user)), lambda: next(schedule))
net = Net()
model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), 1.0))
length = {"central_num_iterations": rounds, "evaluation_frequency": 10**6, "train_cohort_size": work.cohort, "val_cohort_size": 0}
clock = workload.Clock(work)
folder = Path(tempfile.gettempdir()) / f"pfl-user-states-{os.getppid()}"  # the same for both processes
folder.mkdir(exist_ok=True)
if work.stateful:
    storage = DiskUserStateStorage(folder)
    algorithm = SCAFFOLD()
    params = SCAFFOLDParams(**length, population=work.clients, use_gradient_as_control_variate=False, user_state_storage=storage)
else:
    algorithm, params = FederatedAveraging(), NNAlgorithmParams(**length)
algorithm.run(
    params,
    SimulatedBackend(training_data=train, val_data=train),
    model,
    NNTrainHyperParams(local_num_epochs=work.epochs, local_learning_rate=work.rate, local_batch_size=work.batch),
    NNEvalHyperParams(local_batch_size=None),
    callbacks=[Ticks()],
)
if get_framework_module().distributed.global_rank == 0:
    clock.report()
    shutil.rmtree(folder)
