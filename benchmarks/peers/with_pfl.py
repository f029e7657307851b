"""pfl-research with two processes (torchrun) and one thread per process, its fastest mode on two cores."""

import torch
import workload
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops.selector import get_framework_module
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel

torch.set_num_threads(1)
cohort, rounds = workload.arguments()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = workload.lenet()

    def loss(self, inputs, targets, eval=False):
        self.eval() if eval else self.train()
        return torch.nn.functional.cross_entropy(self.layers(inputs), targets)

    @torch.no_grad()
    def metrics(self, inputs, targets, eval=True):
        return {"loss": Weighted(self.loss(inputs, targets, True).item() * len(inputs), len(inputs))}


class Ticks(TrainingProcessCallback):
    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        clock.tick()
        return False, Metrics()


x, y = (torch.from_numpy(a) for a in workload.data())
users = list(range(workload.CLIENTS))
train = FederatedDataset(lambda user: Dataset(raw_data=[x[user], y[user]]), get_user_sampler("minimize_reuse", users))
net = Net()
model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), 1.0))
clock = workload.Clock(cohort)
FederatedAveraging().run(
    NNAlgorithmParams(central_num_iterations=rounds, evaluation_frequency=10**6, train_cohort_size=cohort, val_cohort_size=0),
    SimulatedBackend(training_data=train, val_data=train),
    model,
    NNTrainHyperParams(local_num_epochs=workload.EPOCHS, local_learning_rate=workload.RATE, local_batch_size=workload.BATCH),
    NNEvalHyperParams(local_batch_size=None),
    callbacks=[Ticks()],
)
if get_framework_module().distributed.global_rank == 0:
    clock.report()
