"""Small networks by name."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from sordino.errors import SordinoError, nearest
from sordino.models.torch_model import TorchModel

NETS = ("mlp", "cnn", "resnet18-gn")
IMAGE_SHAPES = {
    64: (8, 8, 1),
    784: (28, 28, 1),
    3072: (32, 32, 3),
}  # what rows of so many features are: as `data` lays them


class Channels(nn.Module):
    """Images with their channels innermost, as rows of data hold them, to channels first."""

    def forward(self, x: Tensor) -> Tensor:
        return x.movedim(-1, 1).contiguous()


def build(name: str, features: int, classes: int, shape: tuple[int, ...] | None = None, seed: int = 0) -> TorchModel:
    """A network for rows of `features` numbers; its first parameters follow from `seed` alone.

    shape: of an image, channels first. Without it, rows are images of a known size whose channels stand innermost.
    """
    if name not in NETS:
        raise SordinoError(f"model: '{name}' is unknown.{nearest(name, NETS)}")
    if shape is not None and math.prod(shape) != features:
        raise SordinoError(f"shape: {shape} holds {math.prod(shape)} numbers, but a row has {features}.")
    known = IMAGE_SHAPES.get(features) if name != "mlp" and shape is None else None
    if name == "mlp":
        shape = (features,)
    elif known is not None:
        shape = (known[2], *known[:2])
    elif shape is None or len(shape) != 3:
        raise SordinoError(f"shape: {name} reads images; give (channels, height, width) of rows of {features} numbers.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name == "mlp":
            return TorchModel(mlp(features, classes), shape=shape)
        net = cnn(shape, classes) if name == "cnn" else resnet18(shape[0], classes)
        if known is not None and shape[0] > 1:
            net, shape = nn.Sequential(Channels(), net), known
        return TorchModel(net, shape=shape, check=name == "cnn")  # a small ResNet is checked by the tests


def mlp(features: int, classes: int, hidden: int = 64) -> nn.Module:
    """One hidden layer."""
    return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two convolutions and two linear layers: 26,010 parameters for 28 x 28 grey pixels and ten classes."""
    channels, height, width = shape
    small = min(height, width) < 16
    first = nn.Conv2d(channels, 16, 3, padding=1) if small else nn.Conv2d(channels, 16, 8, stride=2, padding=3)
    body = nn.Sequential(
        first,
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
    )
    with torch.no_grad():
        wide = body(torch.zeros(1, *shape)).shape[1]
    return nn.Sequential(*body, nn.Linear(wide, 32), nn.Tanh(), nn.Linear(32, classes))


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, given: int, made: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(given, made, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(made, made, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.GroupNorm(groups(made), made) for _ in range(2)])
        around = nn.Sequential(nn.Conv2d(given, made, 1, stride, bias=False), nn.GroupNorm(groups(made), made))
        self.around = nn.Identity() if given == made and stride == 1 else around

    def forward(self, x: Tensor) -> Tensor:
        z = self.norms[0](self.first(x)).relu()
        z = self.norms[1](self.second(z)) + self.around(x)
        return torch.relu(z)


def groups(channels: int) -> int:
    return min(32, channels // 4)


def resnet18(channels: int, classes: int) -> nn.Module:
    """For small images (a 3 x 3 stem, no pooling before the blocks), with group norm."""
    widths = (64, 128, 256, 512)
    stem = nn.Sequential(nn.Conv2d(channels, 64, 3, 1, 1, bias=False), nn.GroupNorm(groups(64), 64), nn.ReLU())
    body: list[nn.Module] = []
    given = 64
    for k, made in enumerate(widths):
        body += [Block(given, made, 1 if k == 0 else 2), Block(made, made, 1)]
        given = made
    return nn.Sequential(stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(given, classes))
