"""Building blocks of random networks for images [C, H, W] and signals [C, L]."""

import random

import torch

from .networks import Shape, Text, one, piece


def _conv(r: random.Random, shape: Shape, more: str = "") -> str:
    d = len(shape) - 1
    kernel = r.choice([1, 2, 3, 3, (3, 1)[:d] if d == 2 else 3])
    stride, dilation = r.choice([1, 1, 1, 2, (2, 1) if d == 2 else 2]), r.choice([1, 1, 1, 2])
    padding = r.choice([0, 1, 1, (1, 0) if d == 2 else 1, *(["'same'"] if stride == 1 else []), "'valid'"])
    groups = r.choice([1, 1, 1, shape[0]])
    outs = groups * r.randrange(1, 4)
    words = f"stride={stride}, padding={padding}, dilation={dilation}, groups={groups}, bias={r.random() < 0.7}{more}"
    return f"nn.Conv{d}d({shape[0]}, {outs}, {kernel}, {words})"


@piece("image signal")
def conv(r: random.Random, shape: Shape, n: str) -> Text:
    return [f"self.{n} = {_conv(r, shape)}"], [f"x = self.{n}(x)"]


@piece("image signal")
def conv_padding_mode(r: random.Random, shape: Shape, n: str) -> Text:
    mode = r.choice(["reflect", "circular", "replicate"])
    return [f"self.{n} = nn.Conv{len(shape) - 1}d({shape[0]}, 3, 3, padding=1, padding_mode='{mode}')"], [f"x = self.{n}(x)"]


@piece("image signal")
def conv_in_place(r: random.Random, shape: Shape, n: str) -> Text:
    return [f"self.{n} = nn.Sequential({_conv(r, shape)}, nn.ReLU(inplace=True))"], [f"x = self.{n}(x)"]


@piece("image signal")
def depthwise(r: random.Random, shape: Shape, n: str) -> Text:
    c, d = shape[0], len(shape) - 1
    return [f"self.{n} = nn.Conv{d}d({c}, {c * r.choice([1, 2])}, 3, padding=1, groups={c})"], [f"x = self.{n}(x)"]


@piece("image signal")
def transposed(r: random.Random, shape: Shape, n: str) -> Text:
    words = r.choice(["", ", stride=2", ", stride=2, padding=1, output_padding=1", ", padding=1, bias=False"])
    return [f"self.{n} = nn.ConvTranspose{len(shape) - 1}d({shape[0]}, 2, {r.choice([2, 3])}{words})"], [f"x = self.{n}(x)"]


@piece("image")
def functional_conv(r: random.Random, shape: Shape, n: str) -> Text:
    line = r.choice(
        ["F.conv2d(x, self.{n}, None, 1, 1)", "F.conv2d(input=x, weight=self.{n}, padding=1)", "torch.conv2d(x, self.{n}, stride=(2,))"]
    )
    return [f"self.{n} = nn.Parameter(0.3 * torch.randn(3, {shape[0]}, 3, 3))"], [f"x = {line.format(n=n)}"]


@piece("image signal")
def weight_norm_conv(r: random.Random, shape: Shape, n: str) -> Text:
    return [f"self.{n} = nn.utils.parametrizations.weight_norm({_conv(r, shape)})"], [f"x = self.{n}(x)"]


@piece("image signal")
def spectral_norm_conv(r: random.Random, shape: Shape, n: str) -> Text:
    return [f"self.{n} = nn.utils.parametrizations.spectral_norm({_conv(r, shape)})"], [f"x = self.{n}(x)"]


@piece("image signal")
def conv_twice(r: random.Random, shape: Shape, n: str) -> Text:
    c = shape[0]
    return [f"self.{n} = nn.Conv{len(shape) - 1}d({c}, {c}, 3, padding=1)"], [f"x = self.{n}(torch.tanh(self.{n}(x)))"]


@piece("image signal")
def conv_tied(r: random.Random, shape: Shape, n: str) -> Text:
    c, d = shape[0], len(shape) - 1
    made = [
        f"self.{n} = nn.Conv{d}d({c}, {c}, 3, padding=1)",
        f"self.{n}b = nn.Conv{d}d({c}, {c}, 3, padding=1)",
        f"self.{n}b.weight = self.{n}.weight",
    ]
    return made, [f"x = self.{n}b(torch.relu(self.{n}(x)))"]


@piece("image signal")
def conv_frozen(r: random.Random, shape: Shape, n: str) -> Text:
    return [f"self.{n} = {_conv(r, shape)}", f"self.{n}.requires_grad_(False)"], [f"x = self.{n}(x)"]


@piece("image signal")
def residual(r: random.Random, shape: Shape, n: str) -> Text:
    c, d = shape[0], len(shape) - 1
    made = f"nn.Sequential(nn.Conv{d}d({c}, 4, 3, padding=1), nn.{r.choice(['ReLU', 'Tanh', 'GELU'])}(), nn.Conv{d}d(4, {c}, 1))"
    line = r.choice(["x = x + self.{n}(x)", "x = torch.relu(x + self.{n}(x))", "x = torch.add(self.{n}(x), x)"])
    return [f"self.{n} = {made}"], [line.format(n=n)]


@piece("image signal")
def branches(r: random.Random, shape: Shape, n: str) -> Text:
    c, d = shape[0], len(shape) - 1
    made = [f"self.{n} = nn.Conv{d}d({c}, 2, 1)", f"self.{n}b = nn.Conv{d}d({c}, 2, 3, padding=1)"]
    return made, one(r, f"x = torch.cat([self.{n}(x), self.{n}b(x)], 1)", f"x = self.{n}(x) * torch.sigmoid(self.{n}b(x))")


@piece("image signal")
def group_norm(r: random.Random, shape: Shape, n: str) -> Text:
    groups = r.choice([g for g in range(1, shape[0] + 1) if shape[0] % g == 0])
    return [f"self.{n} = nn.GroupNorm({groups}, {shape[0]}, affine={r.random() < 0.8})"], [f"x = self.{n}(x)"]


@piece("image signal")
def instance_norm(r: random.Random, shape: Shape, n: str) -> Text:
    return [f"self.{n} = nn.InstanceNorm{len(shape) - 1}d({shape[0]}, affine={r.random() < 0.5})"], [f"x = self.{n}(x)"]


@piece("image signal")
def batch_norm(r: random.Random, shape: Shape, n: str) -> Text:
    words = r.choice(["", "", ", track_running_stats=False", ", momentum=None", ", affine=False", ", momentum=0.6"])
    return [f"self.{n} = nn.BatchNorm{len(shape) - 1}d({shape[0]}{words})"], [f"x = self.{n}(x)"]


@piece("image signal")
def frozen_batch_norm(r: random.Random, shape: Shape, n: str) -> Text:
    made = [f"self.{n} = nn.BatchNorm{len(shape) - 1}d({shape[0]})", f"self.{n}.running_mean += 0.2"]
    return made, [f"self.{n}.eval()", f"x = self.{n}(x)"]


@piece("image signal")
def running_instance_norm(r: random.Random, shape: Shape, n: str) -> Text:
    return [f"self.{n} = nn.InstanceNorm{len(shape) - 1}d({shape[0]}, track_running_stats=True)"], [f"x = self.{n}(x)"]


@piece("image signal")
def max_pool(r: random.Random, shape: Shape, n: str) -> Text:
    words = r.choice(
        ["2", "2", "3, 2", "2, 1", "3, stride=1, padding=1", "3, 2, padding=1, ceil_mode=True", "2, 1, dilation=2", "2, ceil_mode=True"]
    )
    d = len(shape) - 1
    made = ([f"self.{n} = nn.MaxPool{d}d({words})"], [f"x = self.{n}(x)"])
    return r.choice([made, ([], [f"x = F.max_pool{d}d(x, {words})"])])


@piece("image signal")
def avg_pool(r: random.Random, shape: Shape, n: str) -> Text:
    words = r.choice(
        ["2", "3, 2", "2, 1", "3, 1, padding=1", "3, 2, padding=1, ceil_mode=True", "3, 1, padding=1, count_include_pad=False"]
    )
    d = len(shape) - 1
    made = ([f"self.{n} = nn.AvgPool{d}d({words})"], [f"x = self.{n}(x)"])
    return r.choice([made, ([], [f"x = F.avg_pool{d}d(x, {words})"])])


@piece("image signal")
def adaptive_pool(r: random.Random, shape: Shape, n: str) -> Text:
    return [f"self.{n} = nn.Adaptive{r.choice(['Avg', 'Max'])}Pool{len(shape) - 1}d({r.choice([2, 3])})"], [f"x = self.{n}(x)"]


@piece("image")
def rearranged(r: random.Random, shape: Shape, n: str) -> Text:
    lines = [
        "F.pad(x, (1, 0, 0, 1))",
        "F.interpolate(x, scale_factor=2)",
        "x.transpose(2, 3)",
        "x.flip(3)",
        "x[:, :, 1:]",
        "x - x.mean((2, 3), keepdim=True)",
    ]
    return [], [f"x = {r.choice([*lines, 'x.reshape(len(x), -1, *x.shape[2:])', 'x.contiguous(memory_format=torch.channels_last)'])}"]


@piece("image")
def channels_linear(r: random.Random, shape: Shape, n: str) -> Text:
    return [f"self.{n} = nn.Linear({shape[0]}, 3)"], [f"x = self.{n}(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)"]


@piece("image", "sequence")
def patches(r: random.Random, shape: Shape, n: str) -> Text:
    return [], ["x = x.flatten(2).transpose(1, 2)"]


@piece("image", "signal")
def rows(r: random.Random, shape: Shape, n: str) -> Text:
    return [], one(r, "x = x.flatten(2)", "x = x.mean(2)", "x = x.flatten(1, 2)")


# --- layers that the native engine compiles


@piece("image")
def plain_conv(r: random.Random, shape: Shape, n: str) -> Text:
    words = r.choice(["", ", padding=1", ", stride=2", ", stride=2, padding=1", ", bias=False", ", padding=(1, 0)"])
    return [f"self.{n} = nn.Conv2d({shape[0]}, {r.choice([2, 3, 5])}, {r.choice([2, 3, 3])}{words})"], [f"x = self.{n}(x)"]


@piece("image")
def plain_pool(r: random.Random, shape: Shape, n: str) -> Text:
    return [f"self.{n} = nn.{r.choice(['MaxPool2d', 'MaxPool2d', 'AvgPool2d'])}({r.choice(['2', '2', '3, 2', '2, 1'])})"], [
        f"x = self.{n}(x)"
    ]


@piece("vector")
def plain_linear(r: random.Random, shape: Shape, n: str) -> Text:
    return [f"self.{n} = nn.Linear({shape[0]}, {r.choice([4, 6, 9])}, bias={r.random() < 0.8})"], [f"x = self.{n}(x)"]


@piece("image signal sequence", "vector")
def flat(r: random.Random, shape: Shape, n: str) -> Text:
    lines = [
        "x.flatten(1)",
        "torch.flatten(x, 1)",
        "x.reshape(len(x), -1)",
        "x.reshape(x.shape[0], -1)",
        "torch.flatten(x, start_dim=1)",
        f"self.{n}(x)",
    ]
    line = r.choice([*lines, f"x.reshape(-1, {torch.Size(shape).numel()})", "x.contiguous().view(x.size(0), -1)"])
    return ([f"self.{n} = nn.Flatten()"] if n in line else []), [f"x = {line}"]


@piece("image signal sequence", "vector")
def to_vector(r: random.Random, shape: Shape, n: str) -> Text:
    return [], one(
        r,
        "x = x.flatten(1)",
        "x = x.flatten(2).mean(2)",
        "x = x.flatten(2).amax(2)",
        "x = x.flatten(2).logsumexp(2)",
        "x = x[..., -1].flatten(1)",
    )
