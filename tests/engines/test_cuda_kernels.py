"""The CUDA kernels of the stacked engines, compiled for the CPU: their threads run on threads of the CPU."""

import ctypes
import functools
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mimicfl as mf
from mimicfl.data.clients import Clients
from mimicfl.engines.plain import PlainEngine
from mimicfl.engines.stacked import cuda
from mimicfl.engines.stacked.batched import attention, products, program, tiles
from mimicfl.engines.stacked.batched.engine import BatchedEngine
from mimicfl.engines.stacked.cuda.move import VECTORS, move
from tests.engines.engines import assert_same, requests_of

HERE = Path(__file__).parent
ASSEMBLY = re.compile(r"^__device__ inline [\w ]+ (copy|commit|arrived|mma|narrowed)\(.*?(?<=\})$", re.MULTILINE | re.DOTALL)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]


@functools.cache
def compiled(text: str, folder: Path) -> ctypes.CDLL:
    source, library = folder / f"{abs(hash(text))}.cpp", folder / f"{abs(hash(text))}.so"
    source.write_text(text)
    subprocess.run(["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", "-o", str(library), str(source)], check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture(autouse=True)
def emulated(tmp_path_factory, monkeypatch):
    """Launch kernels on the CPU."""
    folder = tmp_path_factory.getbasetemp()

    def launch(file, name, constants, blocks, threads, shared, arguments):
        source = ASSEMBLY.sub("", (cuda.HERE / f"{file}.cu").read_text())
        source = re.sub(r"extern __shared__ (?:__align__\(16\) )?(\w+) (\w+)\[\];", r"\1* \2 = (\1*)emulated_shared.data();", source)
        declared = re.search(rf"\b{name}\(([^)]*)\) \{{", source)[1].replace("const __grid_constant__ ", "")
        words = [part.split() for part in declared.split(",")]
        defined = "".join(f"#define {key} {int(value)}\n" for key, value in constants.items())
        passed = ", ".join(word[-1] for word in words)
        # Structures are passed as pointers: ctypes can pass them by value, but not arrays of them.
        given = ", ".join(f"{' '.join(w[:-1])}& {w[-1]}" if w[0][0].isupper() else " ".join(w) for w in words)
        body = f"run({blocks}, {threads}, {shared}, [&] {{ {name}({passed}); }});"
        text = f'#include "{HERE / "cuda_emulation.h"}"\n{defined}{source}extern "C" void start({given}) {{ {body} }}\n'
        values = [ctypes.c_void_p(each.data_ptr()) if isinstance(each, Tensor) else each for each in arguments]
        values = [ctypes.byref(each) if isinstance(each, (ctypes.Structure, ctypes.Array)) else each for each in values]
        compiled(text, folder).start(*values)

    monkeypatch.setattr(cuda, "launch", launch)
    monkeypatch.setattr("mimicfl.engines.stacked.cuda.move.launch", launch)
    torch.manual_seed(0)


SIZES = [(40, 96, 64), (33, 70, 37), (64, 32, 100)]  # rows, columns, summed entries


@pytest.mark.parametrize(("number", "size", "turned"), [(n, SIZES[n % 3], n % 4) for n in range(len(tiles.FLOAT_TILES))])
def test_products_have_the_accuracy_of_float32(number, size, turned, monkeypatch):
    monkeypatch.setattr(products, "float_tile", lambda *given: tiles.FLOAT_TILES[number])
    rows, columns, depth = size
    a, b = torch.randn(2, rows, depth), torch.randn(2, depth, columns)
    a, b = a.mT.contiguous().mT if turned % 2 else a, b.mT.contiguous().mT if turned // 2 else b
    true = a.double() @ b.double()
    assert float((products.multiply(a, b) - true).norm() / true.norm()) < 1e-6


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys", "entries"), [(20, 20, 24), (5, 30, 32), (7, 7, 4)])
def test_attention_and_its_gradient(causal, queries, keys, entries):
    def rows(length):  # [m, B, H, L, E], not in this order in memory
        return torch.randn(2, length, 3, 1, entries).permute(0, 2, 3, 1, 4).requires_grad_()

    given, scale = (rows(queries), rows(keys), rows(keys)), 0.3
    true = F.scaled_dot_product_attention(*given, is_causal=causal, scale=scale)
    dy = torch.randn_like(true)
    out = torch.full_like(given[0].detach(), torch.nan)
    held = [x.detach() for x in given]
    attention._launch("attend", tuple(held), (out,), causal, scale, queries + 2 * keys, 1)
    torch.testing.assert_close(out, true)
    back = tuple(torch.full_like(x, torch.nan) for x in held)
    attention._launch("attend_back", (*held, dy), back, causal, scale, 2 * queries + 2 * keys, 2)
    for mine, right in zip(back, torch.autograd.grad(true, given, dy), strict=True):
        torch.testing.assert_close(mine, right)


def test_gradients_of_embeddings():
    m, rows, entries = 2, 70, 40
    dy, ids = torch.randn(m, 3, 11, entries), torch.randint(0, 9, (m, 3, 11)) * 7
    ids += torch.arange(m).view(m, 1, 1) * rows
    true = torch.ops.aten.embedding_dense_backward(dy, ids, m * rows, -1, False)
    torch.testing.assert_close(products.collect(dy, ids, rows), true)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("terms", [False, True])
def test_the_update_of_all_lanes(half, terms):
    m, sizes, row = 3, [5000, 64, 37, 20], 5184
    d = sum(sizes)
    g, start, shift, w = (torch.randn(m, row)[:, :d] for _ in range(4))
    origin, k, steps = torch.tensor([1, 1, 0]), torch.tensor([0, 2, 3]), torch.tensor([4, 2, 4])  # the second lane is finished
    eta, mu = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.5, 0.0, 0.7])
    dtype = torch.bfloat16 if half else torch.float32
    pieces = [torch.randn(m, size).to(dtype) for size in sizes]
    copy = torch.zeros(m, row, dtype=torch.bfloat16)[:, :d]
    h = torch.cat(pieces, dim=1).float()
    if terms:
        h = h + shift - (mu * eta)[:, None] * g
    going = torch.tensor([True, False, True])[:, None]
    after = torch.where(going, g + h, g)
    moved = torch.where(going, start[origin] - eta[:, None] * after, 0.0 if half else w)
    named = {"w": w, "g": g, "half": copy if half else None, "start": start, "origin": origin, "k": k, "steps": steps, "eta": eta}
    held = {name: named.get(name) for name in VECTORS} | ({"shift": shift, "mu": mu} if terms else {})
    move(held, pieces)
    torch.testing.assert_close(g, after)
    torch.testing.assert_close(copy if half else w, moved.to(dtype))


class Encoder(nn.Module):
    """A causal encoder layer of PyTorch; the embedding is tied to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 32)
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.register_buffer("later", torch.ones(8, 8, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(self.embed(tokens), src_mask=self.later, is_causal=True) @ self.embed.weight.t()


def test_a_stacked_transformer_uses_the_kernels_and_equals_plain(monkeypatch):
    """Attention runs in the emulated kernels here; on a CPU, products and embeddings are PyTorch's, called where the kernels would be."""
    monkeypatch.setattr("mimicfl.engines.stacked.batched.rewrite.is_short", lambda *given: True)
    monkeypatch.setattr("mimicfl.engines.stacked.batched.program.has_tensor_cores", lambda device: True)
    monkeypatch.setattr("mimicfl.engines.stacked.batched.engine.by_pieces", lambda *given: True)
    model, x = Encoder(), torch.randint(0, 40, (15, 9))
    data = mf.Data(x[:, :-1], x[:, 1:], x[:2, :-1], x[:2, 1:], task="token-prediction")
    clients = Clients(data, np.split(np.arange(15), [4, 8, 11]), torch.device("cpu"), torch.float32)
    requests = requests_of(model, clients, mf.LocalSGD(epochs=1, batch_size=4))
    loss = mf.tasks.TokenPrediction()
    engine, used = BatchedEngine(model, clients, loss, lanes=3), []
    found = program.use_kernels
    monkeypatch.setattr(program, "use_kernels", lambda *given: (found(*given), used.append(given[0])))
    assert_same(engine.train(requests), PlainEngine(model, clients, loss).train(requests), 1e-4)
    called = [str(node.target) for node in used[0].graph.nodes]
    counts = {name: called.count(f"mimicfl.{name}.default") for name in ("attend", "attend_back", "embedding_back", "product")}
    assert counts == {"attend": 1, "attend_back": 1, "embedding_back": 1, "product": 15}
