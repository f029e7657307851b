"""The functions of the Python API with their arguments as strings: valid ones, and ones that must be refused."""

ODD = [
    "None",
    "True",
    "-1",
    "0",
    "2.5",
    "float('nan')",
    "float('inf')",
    "10**30",
    "-10**30",
    "''",
    "b''",
    "'x'",
    "'\\x00'",
    "'é😀'",
    "'a' * 5000",
]
ODD += [
    "[]",
    "{}",
    "()",
    "object()",
    "np.int64(2)",
    "np.float32(0.5)",
    "np.bool_(True)",
    "np.array([])",
    "np.array([1, 2])",
    "np.array('x')",
    "1j",
]
ODD += [
    "torch.tensor(2)",
    "torch.zeros(2, 3)",
    "torch.zeros(2, device='meta')",
    "torch.zeros(3, dtype=torch.complex64)",
    "(k for k in [1, 2])",
]
ODD += [
    "lambda *a: 1",
    "mf",
    "mf.MimiC",
    "mf.MimiC()",
    "range(3)",
    "Path('x')",
    "{'a': 1}",
    "...",
    "int",
    "[None]",
    "[[1], [2, 3]]",
    "type",
]
CALLBACKS, CALLABLES = ("progress", "each_round"), ("int", "type", "lambda *a: 1", "mf.MimiC")  # errors inside a callback are not checked

WHOLE = [
    "-1",
    "0",
    "2.5",
    "float('nan')",
    "float('inf')",
    "'x'",
    "''",
    "True",
    "[]",
    "{}",
    "object()",
    "10**30",
    "b'2'",
    "np.bool_(True)",
    "int",
]
REAL = ["-1.0", "float('nan')", "float('inf')", "'x'", "True", "[]", "{}", "object()", "1j", "b''"]
PATTERNS = [
    "'always'",
    "'static:0.5'",
    "mf.availability.Bounded(2)",
    "mf.availability.Markov(0.5, 0.5)",
    "mf.availability.Explicit(np.ones((9, 4), bool))",
]
WRONG_PATTERNS = [
    "'allways'",
    "3",
    "np.ones((2, 4))",
    "mf.availability.Bounded",
    "mf.availability.Explicit(np.ones((9, 3), bool))",
    "object()",
    "[]",
]
RATES = ["0.1", "'geometric:0.1,0.9'", "mf.lr.constant(0.05)", "mf.lr.geometric(0.1, 0.9)", "lambda t: 0.1 / (t + 1)", "np.float32(0.1)"]
WRONG_RATES = ["0", "-0.1", "float('nan')", "'fast'", "lambda t: 0", "lambda t: 'x'", "[]", "True", "mf.lr.constant", "{}", "b''"]
ALGORITHMS = [
    "'fedavg'",
    "'mimic'",
    "mf.FedProx(0.1)",
    "mf.SCAFFOLD()",
    "mf.MIFA()",
    "mf.FedVARP()",
    "mf.FedAU(3)",
    "mf.FedAvgM()",
    "'mifa:never_seen=wait'",
]
WRONG_ALGORITHMS = ["'fedavgg'", "mf.MimiC", "3", "object()", "''", "[]"]
LOCALS = [
    "mf.LocalSGD(steps=2)",
    "mf.LocalSGD(steps=1, lr=0.05, momentum=0.5)",
    "mf.LocalSGD(epochs=1, batch_size=None)",
    "mf.LocalSGD(steps=[1, 2, 1, 3])",
    "mf.Local(steps=2, optimizer='adamw', weight_decay=0.1)",
    "mf.Local(steps=1, optimizer=torch.optim.RMSprop, lr_multipliers={'*': 0.5})",
]
MODELS = ["model", "nn.Linear(6, 3)", "nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))", "mf.models.MLP(6, 5, 3)"]
WRONG_MODELS = [
    "3",
    "nn.Linear",
    "nn.Linear(5, 3)",
    "nn.LazyLinear(3)",
    "nn.Linear(6, 3, device='meta')",
    "nn.Identity()",
    "'mlp'",
    "lambda x: x",
]
SPLITS = ["split", "[[0, 1], [2], [3, 4, 5], [6]]", "np.arange(24).reshape(4, 6)", "tuple(split)", "(part for part in split)"]
WRONG_SPLITS = ["[]", "[[]]", "[[0, 99]]", "[[-1]]", "[[0.5]]", "split + [[]]", "3", "'x'", "[['a']]", "np.zeros((4, 24), bool)"]
DATA = {
    "x_train": (
        ["x", "x.numpy()", "x.double()", "x.tolist()"],
        ["x[:5]", "x[:0]", "x * float('nan')", "x[0, 0]", "'x'", "x.to('meta')", "x.to_sparse()", "x[:, :5]"],
    ),
    "y_train": (
        ["y", "y.numpy()", "y.tolist()", "y.to(torch.uint8)"],
        ["y - 1", "y[:5]", "y * 1j", "y.float() / 0", "['a'] * 24", "y + 10**9", "x[:, 0]"],
    ),
    "x_test": (["x[:9]", "x[:9].numpy()"], ["x[:8]", "x[:0]", "x[:9, :5]", "x[:9].to('meta')", "None", "x[:9] / 0"]),
    "y_test": (["y[:9]"], ["y[:8]", "y[:9] - 5", "y[:9].float() / 7", "None", "'y'"]),
    "name": (["'own'"], []),
    "loss": (["'cross-entropy'", "None"], []),
    "scale": (["255.0", "1"], ["0", "float('nan')", "'x'"]),
    "mean": (["(0.5,)", "3"], ["(1, 2, 3)", "('a',)", "()"]),
    "std": (["(0.5,)"], ["(0,)", "(1, 2)", "None", "(float('nan'),)"]),
    "augment": (["False"], ["True", "lambda x: x", "3"]),
    "ids": (["np.arange(24) % 4", "None"], ["[1, 2]"]),
}
SIMULATE = {
    "model": (MODELS, WRONG_MODELS),
    "data": (["data"], ["None", "3", "(x, y)", "mf.Data", "'digits'"]),
    "split": (SPLITS, WRONG_SPLITS),
    "algorithm": (ALGORITHMS, WRONG_ALGORITHMS),
    "availability": (PATTERNS, WRONG_PATTERNS),
    "rounds": (["1", "2", "3", "np.int64(2)"], WHOLE),
    "uploads": (["2", "4"], WHOLE),
    "local": (LOCALS, ["3", "'sgd'", "mf.LocalSGD", "{}", "mf.LocalSGD(steps=[1, 2])"]),
    "global_lr": ([*RATES, "'local'"], WRONG_RATES),
    "average": (["0", "9", "2.5"], [*REAL, "0.5"]),
    "update": (["'sum'", "'mean'"], ["'max'", "None", "3", "[]"]),
    "weighting": (["'uniform'", "'samples'"], ["'size'", "None", "3"]),
    "loss": (
        ["None", "'cross-entropy'", "nn.functional.cross_entropy", "nn.CrossEntropyLoss(label_smoothing=0.1)"],
        ["'l1'", "3", "lambda o, t: 1", "lambda: 0", "nn.CrossEntropyLoss(reduction='none')"],
    ),
    "seed": (["0", "1", "12345"], [value for value in WHOLE if value != "0"]),
    "device": (["'cpu'", "'auto'"], ["'gpu'", "3", "None", "'cuda:99'", "b'cpu'"]),
    "engine": (["'plain'"] * 8 + ["'auto'"], ["'fast'", "None", "3", "'native:2'", "b''"]),
    "precision": (["'fp32'"], ["'fp64'", "None", "32"]),
    "state_budget": (["'auto'", "'1'"], ["None", "'x'", "'-1'", "[]"]),
    "eval_every": (["1", "2"], WHOLE),
    "diagnose": (["None", "'off'"], ["'often'", "True", "-1", "[]"]),
    "out": (["'out'", "Path('out')", "None"], ["3", "b''", "'finished/rows.jsonl'", "[]"]),
    "checkpoint_every": (["1", "None"], [value for value in WHOLE if value != "0"]),
    "each_round": (
        ["None", "lambda m: {'norm': m.params.norm()}", "lambda m: m.stop()"],
        ["3", "'x'", "lambda m: 3", "lambda m: {'round': 1}"],
    ),
}
EXPERIMENT = {
    "num_clients": (["4"], WHOLE),
    "rounds": (["1", "2", "'2'"], WHOLE),
    "algorithm": (ALGORITHMS, ["3", "object()", "[]", "b''"]),
    "availability": (PATTERNS[:4], ["3", "object()", "[]", "mf.availability.Explicit(np.ones((9, 4), bool))"]),
    "lr": (RATES[:4], ["[]", "{}", "True", "object()", "lambda t: 0.1"]),
    "steps": (["1", "None"], WHOLE),
    "momentum": (["0.5", "0"], [*REAL, "1"]),
    "weight_decay": (["0.1", "0"], REAL),
    "dtype": (["'float64'"], ["'int'", "None", "torch.float32"]),
    "engine": (["'plain'"], ["'fast'", "None", "3"]),
    "plugins": (["[]"], ["[1]", "3", "None"]),
    "model": (["'linear'", "'mlp:4'"], ["3", "None", "model"]),
    "seed": (["0", "3"], [value for value in WHOLE if value != "0"]),
}
LOCAL_SGD = {
    "epochs": (["1", "[1, 2]", "None"], WHOLE),
    "batch_size": (["4", "None"], WHOLE),
    "lr": (RATES, [rate for rate in WRONG_RATES if "lambda" not in rate]),
    "steps": (["2"], WHOLE),
    "weight_decay": (["0.1"], REAL),
    "momentum": (["0.5"], [*REAL, "1"]),
    "clip_norm": (["1.0"], REAL),
}
RUNS = ["'finished'", "'other'", "'stopped'", "'objects'", "Path('finished')", "'compared/fedavg-s0'"]
WRONG_RUNS = ["'nowhere'", "''", "'finished/rows.jsonl'", "'a\\x00b'", "3", "None", "b'finished'", "[]"]
LABELS = (["y", "y.numpy()", "y.tolist()"], ["[]", "3", "'abc'", "None", "object()"])
COUNT = (["4", "3"], WHOLE)
Table = dict[str, tuple[list[str], list[str]]]
CALLS: dict[str, tuple[list[str], Table, tuple[str, ...], int]] = {  # name: functions, arguments, required arguments, frequency
    "simulate": (["mf.simulate"], SIMULATE, ("model", "data", "split", "rounds", "local"), 30),
    "run": (
        ["mf.run"],
        {
            "experiment": (["experiment"], ["None", "{}", "'x'", "mf.Experiment", "model"]),
            "out": SIMULATE["out"],
            "progress": (["None"], ["3"]),
            "each_round": SIMULATE["each_round"],
        },
        ("experiment",),
        3,
    ),
    "compare": (
        ["mf.compare"],
        {
            "experiment": (["experiment"], ["None", "{}", "'x'"]),
            "algorithms": (["['fedavg']", "'mimic'", "[mf.MimiC(), mf.MIFA]", "None"], ["[]", "3", "['x']", "[3]"]),
            "seeds": (["1", "[0, 3]"], ["0", "-1", "'x'", "2.5", "[-1]", "[]", "True", "object()"]),
            "out": SIMULATE["out"],
        },
        ("experiment", "algorithms", "seeds"),
        5,
    ),
    "Data": (["mf.Data"], DATA, ("x_train", "y_train", "x_test", "y_test"), 12),
    "LocalSGD": (["mf.LocalSGD"], LOCAL_SGD, (), 8),
    "Local": (
        ["mf.Local"],
        LOCAL_SGD
        | {
            "optimizer": (["'adam'", "'adamw:eps=0.1'", "torch.optim.RMSprop"], ["'adma'", "3", "'adam:lr=2'", "None", "[]"]),
            "nesterov": (["False"], ["1", "'yes'", "None"]),
            "betas": (["(0.9, 0.999)"], ["0.9", "(0.9,)", "(1, 1)", "'x'", "None"]),
            "eps": (["1e-8"], [*REAL, "0"]),
            "lr_multipliers": (["{}", "{'*': 2}"], ["3", "{'*': -1}", "{1: 2}", "'x'"]),
            "loop": (["None"], ["3", "'x'"]),
        },
        (),
        8,
    ),
    "Experiment": (["mf.Experiment"], EXPERIMENT, (), 8),
    "schedule": (
        ["mf.availability.schedule"],
        {
            "pattern": (PATTERNS, WRONG_PATTERNS),
            "rounds": (["1", "5"], WHOLE),
            "num_clients": (["4"], WHOLE),
            "seed": (["0", "7"], [value for value in WHOLE if value != "0"]),
        },
        ("pattern", "rounds", "num_clients"),
        8,
    ),
    "pattern": (
        [
            "mf.availability.Bounded",
            "mf.availability.Static",
            "mf.availability.TimeVarying",
            "mf.availability.Markov",
            "mf.availability.Cyclic",
            "mf.availability.LabelCorrelated",
            "mf.availability.Explicit",
        ],
        {"warm_start": (["True"], []), "": (["1", "0.5", "[0, 1]", "np.ones((3, 4))"], [])},
        ("",),
        5,
    ),
    "partition": (
        ["mf.partition.shards", "mf.partition.classes", "mf.partition.anchored", "mf.partition.iid"],
        {"labels": LABELS, "num_clients": COUNT, "seed": (["0", "5"], [])},
        ("labels", "num_clients"),
        5,
    ),
    "dirichlet": (
        ["mf.partition.dirichlet"],
        {
            "labels": LABELS,
            "num_clients": COUNT,
            "alpha": (["0.5", "10"], [*REAL, "0"]),
            "min_samples": (["1", "2"], WHOLE),
            "tries": (["100"], WHOLE),
            "seed": (["0"], []),
        },
        ("labels", "num_clients"),
        2,
    ),
    "by_ids": (["mf.partition.by_ids"], {"ids": (["y", "['a', 'b', 'a']"], ["[]", "3", "x", "None"])}, ("ids",), 1),
    "rate": (
        ["mf.lr.constant", "mf.lr.schedule", "mf.lr.geometric"],
        {"rate": (["0.1", "1e-3"], [*REAL, "0", "-1"]), "decay": (["0.9"], [*REAL, "0", "1.5"])},
        ("rate",),
        4,
    ),
    "theory rate": (
        ["mf.lr.theory"],
        {
            "c": (["0.1"], [*REAL, "0"]),
            "beta": (["5"], [*REAL, "0"]),
            "L": (["2.0"], REAL),
            "N": (["4"], []),
            "tau_max": (["2"], []),
            "horizon": (["9"], []),
        },
        ("c",),
        2,
    ),
    "build": (
        ["mf.models.build"],
        {
            "spec": (["'mlp'", "'linear'", "'mlp:4,3'", "'logistic'"], ["'lenet'", "'x'", "3", "None", "''", "'mlp:0'"]),
            "data": (["data", "real", "bytes_"], ["None", "3", "x"]),
            "seed": (["0", "3"], ["-1", "'x'", "2.5"]),
        },
        ("spec", "data"),
        4,
    ),
    "layers": (
        ["mf.models.MLP", "mf.models.Logistic", "mf.models.LeNet"],
        {"": (["6, 3", "6, 5, 3"], ["0, 3", "-1, 3", "'a', 3", "2.5, 3", "None, 3"])},
        ("",),
        2,
    ),
    "load": (
        ["mf.datasets.load"],
        {
            "name": (["'digits'", "'synthetic'", "'synthetic:logistic'"], ["'x'", "''", "3", "None", "'digits:1'"]),
            "num_clients": (["4"], []),
            "fetch": (["False"], []),
        },
        ("name", "fetch"),
        3,
    ),
    "algorithm": (
        ["mf.FedProx", "mf.FedAU", "mf.FedAvgM", "mf.MIFA", "mf.MimiC"],
        {"": (["0.1", "3", "'zero'", "'step'"], ["object()", "[]", "float('nan')", "None", "b''"])},
        ("",),
        3,
    ),
    "register": (
        ["mf.register"],
        {
            "name": (["'mine'"], ["''", "3", "None", "'a b'", "'auto'", "b'x'", "'a/b'"]),
            "factory": (["mf.FedAvg", "type('Own', (mf.FedAvg,), {})"], ["3", "'x'"]),
        },
        ("name", "factory"),
        2,
    ),
    "read": (["mf.read"], {"path": (RUNS, WRONG_RUNS)}, ("path",), 3),
    "frame": (["mf.frame"], {"": (["'finished'", "'finished', 'other'", "'.'", "'compared'"], WRONG_RUNS[:5])}, ("",), 2),
    "read a damaged run": (["mf.read"], {"path": (["'finished'"], [])}, ("path",), 6),
}
