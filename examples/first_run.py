"""A first run: five algorithms on the embedded digits while clients drop out.

python examples/first_run.py [uploads]
"""

import sys

import mimicfl as mf

uploads = int(sys.argv[1]) if len(sys.argv) > 1 else 60

data = mf.datasets.load("digits")
split = mf.partition.shards(data.y_train, num_clients=30, shards_per_client=2, seed=0)
model = mf.models.build("mlp:32", data, seed=0)

for algorithm in [mf.FedAvg(), mf.FedProx(mu=0.01), mf.SCAFFOLD(), mf.MIFA(), mf.MimiC()]:
    history = mf.simulate(
        model=model,
        data=data,
        split=split,
        algorithm=algorithm,
        availability=mf.availability.LabelCorrelated(classes=[0, 1, 2], rare=0.02, common=0.3),
        uploads=uploads,
        local=mf.LocalSGD(epochs=5, batch_size=16, lr=mf.lr.geometric(0.1, 0.99)),
    )
    last = history.rows[-1]
    print(f"{type(algorithm).__name__:9} {100 * last['test_accuracy']:5.1f} % after {last['uploads']} uploads")
