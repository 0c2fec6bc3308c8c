"""Small networks by name."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from sordino.errors import SordinoError, check_known
from sordino.models.images import IMAGE_SHAPES, Layout
from sordino.models.pixels import Pixels
from sordino.models.torch_model import TorchModel

NETS = ("mlp", "cnn", "resnet18-gn")
LEAST_SIDE = 8  # pixels that the CNN reads


def build(
    name: str,
    features: int,
    classes: int,
    shape: tuple[int, ...] | None = None,
    seed: int = 0,
    pixels: Pixels | None = None,
    autocast: torch.dtype | None = None,
) -> TorchModel:
    """A small network by name.

    Args:
      name: one of `NETS`.
      features: numbers per record.
      classes: number of classes.
      shape: of an image, channels first. By default rows are images of a known size with channels last.
      seed: determines the first parameters.
      pixels: how rows become images, in place of `shape`: transposed, resized and normalised.
      autocast: the type of the forward and backward passes.

    Returns:
      The model.

    Raises:
      SordinoError: the name is unknown, or the shape does not fit.
    """
    check_known("model", name, NETS)
    if shape is not None and math.prod(shape) != features:
        raise SordinoError(f"shape: {shape} holds {math.prod(shape)} numbers, but a row has {features}.")
    if name == "mlp":
        shape = (features,)
    elif shape is None and pixels is None and features in IMAGE_SHAPES:
        pixels = Pixels(Layout(*IMAGE_SHAPES[features], False), IMAGE_SHAPES[features][2], None, None)
    if pixels is not None:
        shape = pixels.output_shape
    elif name != "mlp" and (shape is None or len(shape) != 3):
        raise SordinoError(
            f"shape: {name} reads images; pass (channels, height, width) for rows of {features} numbers."
        )
    assert shape is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name == "mlp":
            return TorchModel(mlp(features, classes), shape=shape, autocast=autocast)
        if name == "cnn" and min(shape[1:]) < LEAST_SIDE:
            raise SordinoError(f"shape: cnn reads images of at least {LEAST_SIDE} pixels per side, not {shape[1:]}.")
        net = cnn(shape, classes) if name == "cnn" else resnet18(shape[0], classes)
        if pixels is not None and pixels.changes:
            net, shape = nn.Sequential(pixels, net), pixels.shape
        check = name == "cnn"  # a small ResNet is checked by the tests
        return TorchModel(net, shape=shape, autocast=autocast, check=check)


def mlp(features: int, classes: int, hidden: int = 64) -> nn.Module:
    """A network with one hidden layer."""
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
    """Two convolutions and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.GroupNorm(groups(outputs), outputs) for _ in range(2)])
        around = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(groups(outputs), outputs)
        )
        self.around = nn.Identity() if inputs == outputs and stride == 1 else around

    def forward(self, x: Tensor) -> Tensor:
        z = self.norms[0](self.first(x)).relu()
        z = self.norms[1](self.second(z)) + self.around(x)
        return torch.relu(z)


def groups(channels: int) -> int:
    """The number of groups of a group norm."""
    return min(32, channels // 4)


def resnet18(channels: int, classes: int) -> nn.Module:
    """ResNet-18 with group norm for small images: a 3 x 3 stem, no pooling before the blocks."""
    widths = (64, 128, 256, 512)
    stem = nn.Sequential(nn.Conv2d(channels, 64, 3, 1, 1, bias=False), nn.GroupNorm(groups(64), 64), nn.ReLU())
    body: list[nn.Module] = []
    inputs = 64
    for k, outputs in enumerate(widths):
        body += [Block(inputs, outputs, 1 if k == 0 else 2), Block(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
