"""Frozen networks that turn images into features: ResNet-20, -44 and -50, VGG-16, or your own TorchScript module.

A frozen network maps each record independently of the others, so its features cost no privacy if its weights come from
public data. Parameters of ResNet-50 and VGG-16 (with batch norm) carry torchvision's names, and those of the small
networks follow the same pattern. The last (classifying) layer is left out, and its weights are ignored.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from sordino import files
from sordino.data.catalog import Pictures
from sordino.errors import SordinoError, check_known, listed

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as most published weights expect
MIN_SIDE_PIXELS = 32  # pixels per side; smaller images are padded with black
CLASSIFIER_PREFIXES = ("fc.", "linear.", "classifier.")  # names of classifying layers


# -------------------------------------------------------------------------------------------------------- the networks


class Basic(nn.Module):
    """Two 3 by 3 convolutions beside a shortcut."""

    def __init__(self, before: int, width: int, stride: int, projection: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(before, width, stride) if projection and stride > 1 else None
        self.stride, self.more = stride, width - before

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        if self.downsample is not None:
            x = self.downsample(x)
        elif self.stride > 1:  # every second pixel, and channels of zeros for those that x lacks
            x = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.more // 2, self.more // 2))
        return functional.relu(y + x)


class Bottleneck(nn.Module):
    """1 by 1, 3 by 3 and 1 by 1 convolutions beside a shortcut. The middle convolution has the stride."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample = None if before == 4 * width else _shortcut(before, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        y = functional.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return functional.relu(y + (x if self.downsample is None else self.downsample(x)))


def _shortcut(before: int, after: int, stride: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))


class SmallResNet(nn.Module):
    """The residual network for CIFAR of He et al. (2016, section 4.2), 6 `blocks` + 2 layers deep: 64 features.

    Its shortcuts have no weights, as published. With `projection` they are 1 by 1 convolutions.
    """

    def __init__(self, blocks: int, projection: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _layer(partial(Basic, projection=projection), 16, 16, 16, blocks, 1)
        self.layer2 = _layer(partial(Basic, projection=projection), 16, 32, 32, blocks, 2)
        self.layer3 = _layer(partial(Basic, projection=projection), 32, 64, 64, blocks, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.conv1(x)))
        return self.layer3(self.layer2(self.layer1(x))).mean((2, 3))  # type: ignore[no-any-return]


class ResNet50(nn.Module):
    """2048 features."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = _layer(Bottleneck, 64, 64, 256, 3, 1)
        self.layer2 = _layer(Bottleneck, 256, 128, 512, 4, 2)
        self.layer3 = _layer(Bottleneck, 512, 256, 1024, 6, 2)
        self.layer4 = _layer(Bottleneck, 1024, 512, 2048, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        return self.layer4(self.layer3(self.layer2(self.layer1(x)))).mean((2, 3))  # type: ignore[no-any-return]


def _layer(
    block: Callable[[int, int, int], nn.Module], before: int, width: int, after: int, blocks: int, stride: int
) -> nn.Sequential:
    return nn.Sequential(block(before, width, stride), *(block(after, width, 1) for _ in range(blocks - 1)))


class VGG16(nn.Module):
    """The convolutions of VGG-16 with batch norm: 512 features, one position of them at 32 by 32 pixels."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            for _ in range(depth):
                layers += [nn.Conv2d(before, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU()]
                before = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x).mean((2, 3))  # type: ignore[no-any-return]


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "resnet20": partial(SmallResNet, 3),
    "resnet44": partial(SmallResNet, 7),
    "resnet50": ResNet50,
    "vgg16": VGG16,
}


# --------------------------------------------------------------------------------------------------------- the weights


def network(name: str, weights: str | Path) -> nn.Module:
    """A network of `NETWORKS` with the weights of a .safetensors file or of a state dict saved by torch; runs no code
    of the file."""
    check_known("network", name, NETWORKS)
    state = _state(Path(weights).expanduser())
    make = NETWORKS[name]
    if name in ("resnet20", "resnet44") and any(".downsample." in key for key in state):
        make = partial(make, projection=True)
    module = make()
    expected = module.state_dict()
    missing = [key for key in expected if key not in state and not key.endswith("num_batches_tracked")]
    other = [key for key in state if key not in expected]
    if missing or other:
        lacks = f" lacks {listed(missing)}" if missing else ""
        brings = f"{' and' if missing else ''} brings {listed(other)}, which {name} has not" if other else ""
        raise SordinoError(f"weights: '{weights}'{lacks}{brings}; give the weights of a {name}.")
    for key, value in state.items():
        if value.shape != expected[key].shape:
            raise SordinoError(
                f"weights: {key} in '{weights}' has shape {tuple(value.shape)}, where {name} has "
                f"{tuple(expected[key].shape)}; give the weights of a {name}."
            )
    module.load_state_dict(state, strict=False)
    return module


def script(path: str | Path) -> nn.Module:
    """Load a module saved by torch.jit.save, whose code is confined to TorchScript.

    Files of torch.save(module) and torch.export are refused, because pickle reads them and may run any code.
    """
    file = _existing(Path(path).expanduser(), "module")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its successor, torch.export, is the unsafe one
        try:
            return torch.jit.load(str(file), map_location="cpu")  # type: ignore[no-any-return, no-untyped-call]
        except (RuntimeError, ValueError, OSError) as error:
            why = str(error).strip().split("\n")[0]
            raise SordinoError(
                f"module: '{path}' is not TorchScript ({why}); save it with torch.jit.save (or give --network and the "
                "weights alone)."
            ) from None


def _state(path: Path) -> dict[str, Tensor]:
    """The tensors of the file by name, without wrappers and classifying layers."""
    _existing(path, "weights")
    state: Any
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            state = load_file(path)
        except SafetensorError as error:
            raise SordinoError(f"weights: '{path}' cannot be read ({error}); give a complete file.") from None
    else:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception:  # a file of another kind fails in many ways
            raise SordinoError(
                f"weights: '{path}' is not a state dict of plain tensors (other content might run code, so it is not "
                "read); save "
                "module.state_dict(), as .pt or .safetensors."
            ) from None
    for wrapper in ("state_dict", "model", "net"):
        if isinstance(state, Mapping) and isinstance(state.get(wrapper), Mapping):
            state = state[wrapper]
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise SordinoError(f"weights: '{path}' does not hold a state dict; save module.state_dict().")
    named = {str(key).removeprefix("module."): value for key, value in state.items()}
    return {key: value for key, value in named.items() if not key.startswith(CLASSIFIER_PREFIXES)}


def _existing(path: Path, field: str) -> Path:
    if not path.is_file():
        raise files.absent(field, path)
    return path


# -------------------------------------------------------------------------------------------------------- the features


def extract(
    module: nn.Module,
    images: Pictures,
    batch: int = 256,
    device: str = "cpu",
    progress: Callable[[int], None] | None = None,
    *,
    mean: tuple[float, ...] = MEAN,
    std: tuple[float, ...] = STD,
    size: int | None = None,
) -> np.ndarray:
    """float32 features of images (n, height, width, 1 or 3) of bytes, `batch` at a time.

    `progress` is called with the number of images done.

    Grey images get three equal channels. `mean` and `std` are public constants per channel, for pixels in [0, 1].
    `size` is the side after resizing; without it, images below 32 by 32 are padded with black.
    """
    module = module.to(device).eval()
    out: np.ndarray | None = None
    for start in range(0, len(images), batch):
        pixels = prepared(torch.from_numpy(np.array(images[start : start + batch], order="C")), mean, std, size, device)
        with torch.inference_mode():
            try:
                features = module(pixels)
            except RuntimeError as error:
                why = str(error).strip().split("\n")[-1]
                raise SordinoError(f"module: it fails on input {tuple(pixels.shape)} ({why}).") from None
        if not isinstance(features, Tensor) or len(features) != len(pixels):
            raise SordinoError("module: its output must be one tensor of n rows for input (n, 3, height, width).")
        values = features.flatten(1).float().cpu().numpy()
        if not np.isfinite(values).all():
            raise SordinoError("module: its features are not all finite; check the weights, mean and std.")
        if out is None:
            out = np.empty((len(images), values.shape[1]), np.float32)
        out[start : start + len(values)] = values
        if progress is not None:
            progress(len(values))
    if out is None:
        raise SordinoError("data: there are no images; check the files.")
    return out


def prepared(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...], size: int | None, device: str) -> Tensor:
    """(n, 3, height, width): pixels in [0, 1], padded or resized, then normalised."""
    x = images.to(device).permute(0, 3, 1, 2).float() / 255
    x = x.expand(-1, 3, -1, -1)
    if size is not None:
        x = functional.interpolate(x, (size, size), mode="bilinear", antialias=True, align_corners=False)
    else:
        broadcast, right = (max(0, MIN_SIDE_PIXELS - side) for side in x.shape[2:])
        x = functional.pad(x, (right // 2, right - right // 2, broadcast // 2, broadcast - broadcast // 2))
    centre, scale = (torch.tensor(values, device=x.device).view(1, -1, 1, 1) for values in (mean, std))
    return (x - centre) / scale


def save_statistics(path: str | Path, x: np.ndarray) -> None:
    """Write mean, cov and n of features for `public_stats`. For private data this is a release."""
    wide = x.astype(np.float64)
    np.savez(path, mean=wide.mean(0), cov=np.atleast_2d(np.cov(wide, rowvar=False, ddof=0)), n=len(x))
