"""Expressions for arguments of the Python API: per kind, valid values and wrong ones, which must be refused; and odd ones."""

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
RUNS = ["'finished'", "'other'", "'stopped'", "'objects'", "Path('finished')", "'compared/fedavg-s0'"]
WRONG_RUNS = ["'nowhere'", "''", "'finished/rows.jsonl'", "'a\\x00b'", "3", "None", "b'finished'", "[]"]
LABELS = (["y", "y.numpy()", "y.tolist()"], ["[]", "3", "'abc'", "None", "object()"])
COUNT = (["4", "3"], WHOLE)
