"""How rows of pixels are laid out, and what a network needs of them: channels first, its own size, mean and std.

A row holds an image as its file does: height x width x channels (most files), or channels x height x width. `Pixels`
turns rows into what a network reads. It maps each record by itself and by public constants, so it costs no privacy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sordino.errors import SordinoError

CHANNELS = (1, 3)  # grey or colours
MODES = {2: "bilinear", 3: "bicubic"}  # `resample` in a preprocessor_config.json, as Pillow numbers them
PREPROCESSOR = "preprocessor_config.json"
# The shape of an image with so many features, as the published sets lay it out.
IMAGE_SHAPES = {64: (8, 8, 1), 784: (28, 28, 1), 3072: (32, 32, 3)}
HOW = "write image = 32x32x3 (height x width x channels, as most files have it) or 3x32x32 (channels first)"


class Layout(NamedTuple):
    """The shape of one image as a row holds it."""

    height: int
    width: int
    channels: int
    channels_first: bool

    @property
    def features(self) -> int:
        """Numbers per row."""
        return self.height * self.width * self.channels

    @property
    def text(self) -> str:
        """As the option `image` writes it."""
        size = (self.height, self.width)
        return "x".join(map(str, (self.channels, *size) if self.channels_first else (*size, self.channels)))


class Normalisation(NamedTuple):
    """Public constants per channel, for pixels in [0, 1], and how images are resized."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    mode: str = "bilinear"

    @property
    def changes(self) -> bool:
        """Whether pixels are changed at all; if not, any numbers may be pixels."""
        return any(self.mean) or any(each != 1 for each in self.std)


def layout(shape: str | Sequence[int]) -> Layout:
    """The layout that a shape means. The axis of 1 or 3 numbers, first or last, holds the channels.

    Args:
      shape: as in "32x32x3", "3x32x32" or "28x28", or the same as numbers.

    Returns:
      The layout.

    Raises:
      SordinoError: the shape is not that of an image, or either end may hold the channels.

    >>> layout("32x32x3").channels_first, layout((3, 32, 32)).channels_first
    (False, True)
    """
    words = shape.lower().split("x") if isinstance(shape, str) else [str(each) for each in shape]
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words) or len(words) not in (2, 3):
        raise SordinoError(f"image: '{shape}' is not the shape of an image; {HOW}.")
    sides = [int(word) for word in words]
    if len(sides) == 2:
        return Layout(sides[0], sides[1], 1, False)
    if 1 in (sides[0], sides[2]):  # grey: a row is the same with the channel first or last
        height, width = sides[1:] if sides[0] == 1 else sides[:2]
        return Layout(height, width, 1, False)
    first, last = sides[0] in CHANNELS, sides[2] in CHANNELS
    if first == last:
        raise SordinoError(
            f"image: of '{'x'.join(words)}', {'either end' if first else 'no end'} may be the channels (1 or 3 of "
            f"them); {HOW}."
        )
    a, b, c = sides
    return Layout(b, c, a, True) if first else Layout(a, b, c, False)


def usual(features: int) -> str | None:
    """The layout of rows that say nothing of it, as published sets of small images have it; None for other rows.

    >>> usual(3072)
    '32x32x3'
    """
    return Layout(*IMAGE_SHAPES[features], False).text if features in IMAGE_SHAPES else None


def agreed(model: str, image: str | None, shape: Sequence[int]) -> str | None:
    """The option `image` of a run: what the user wrote, what the records' own shape says, or both where they agree.

    Args:
      model: its name, for errors.
      image: the option; None where it is not set.
      shape: of one record, as the source has it; empty where records are plain rows.

    Returns:
      The option; None where neither says anything.

    Raises:
      SordinoError: they differ, or the records are not images.

    >>> agreed("cnn", None, (28, 28, 1))
    '28x28x1'
    """
    if not shape:
        return None if image is None else layout(image).text
    if len(shape) not in (2, 3):
        raise SordinoError(f"model: {model} reads images, but one record has the shape {'x'.join(map(str, shape))}.")
    own = layout(shape)
    if image is not None and layout(image) != own:
        raise SordinoError(
            f"image: {image}, but the records have the shape {own.text}; leave image out, or save the records so."
        )
    return own.text


def fitting(model: str, image: str | None, features: int) -> Layout:
    """The layout of rows of so many numbers.

    Raises:
      SordinoError: nothing says the layout, or it holds another number of numbers.
    """
    if image is None:
        raise SordinoError(
            f"image: {model} must know how a row of {features:,} numbers is laid out; {HOW}. An .npz whose x has four "
            "axes says it by itself."
        )
    found = layout(image)
    if found.features != features:
        raise SordinoError(
            f"image: {image} holds {found.features:,} numbers, but these rows have {features:,}; {HOW}, whichever the "
            "rows are."
        )
    return found


def per_channel(key: str, values: Sequence[float] | None, channels: int, default: Sequence[float]) -> tuple[float, ...]:
    """One public constant per channel. One number serves all channels.

    Raises:
      SordinoError: their number does not fit, or a std is not above 0.

    >>> per_channel("mean", (0.5,), 3, ())
    (0.5, 0.5, 0.5)
    """
    given = tuple(default) if values is None else tuple(values)
    given = given * channels if len(given) == 1 else given
    if len(given) != channels or not all(map(math.isfinite, given)):
        raise SordinoError(f"{key}: {list(given)} must be one finite number per channel, and there are {channels}.")
    if key == "std" and min(given) <= 0:
        raise SordinoError(f"std: {list(given)} must be above 0.")
    return given


def normalisation(
    channels: int,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    default: Normalisation,
    weights: str | Path | None = None,
) -> Normalisation:
    """The declared mean and std, or those in the folder of the weights, or the default.

    Args:
      channels: of the images that the network reads.
      mean: declared by the user.
      std: declared by the user.
      default: as the weights of this architecture are published.
      weights: a folder that may hold a preprocessor_config.json.

    Raises:
      SordinoError: constants do not fit the channels, or the file asks for something else than mean and std.

    >>> normalisation(1, (0.5,), (0.25,), Normalisation((0.0,), (1.0,))).mean
    (0.5,)
    """
    if weights is not None and (file := Path(weights).expanduser() / PREPROCESSOR).is_file():
        default = _of_file(file)
    return Normalisation(
        per_channel("mean", mean, channels, default.mean), per_channel("std", std, channels, default.std), default.mode
    )


def normalises(options: Mapping[str, Any], published: Normalisation | None) -> bool:
    """Whether a model with these options subtracts a mean from pixels, or divides them.

    >>> normalises({"mean": (0.0,), "std": (1.0,)}, Normalisation((0.5,), (0.5,)))
    False
    """
    default = published or Normalisation((0.0,), (1.0,))
    return Normalisation(options.get("mean") or default.mean, options.get("std") or default.std).changes


def _of_file(file: Path) -> Normalisation:
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
        resample = known.get("resample", 2)
        if not known.get("do_normalize", True):
            return Normalisation((0.0,), (1.0,), MODES.get(resample, "bilinear"))
        return Normalisation(
            tuple(map(float, known["image_mean"])), tuple(map(float, known["image_std"])), MODES[resample]
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SordinoError(
            f"weights: '{file}' does not say mean, std and resampling ({type(error).__name__}: {error}); repair or "
            "remove it, and set mean and std."
        ) from None


def check_pixels(x: Any, model: str) -> None:
    """Refuse rows that are not pixels in [0, 1], because mean and std are meant for those.

    Raises:
      SordinoError: a number lies outside.
    """
    if len(x) and not (float(x.min()) >= 0 and float(x.max()) <= 1):
        raise SordinoError(
            f"data: {model} subtracts a mean from pixels in [0, 1], and some numbers lie outside; divide bytes by 255. "
            "If the rows are normalised already, set mean = [0] and std = [1]."
        )
