"""Images as a network reads them, from rows as files have them (`images` says how)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from sordino.errors import SordinoError
from sordino.models.images import Layout, Normalisation


class Pixels(nn.Module):
    """Images (n, channels, height, width) from rows of one layout: transposed, resized and normalised.

    Args:
      found: how rows are laid out.
      channels: that the network reads; grey images serve a network of colours by equal channels.
      side: pixels per side after resizing; None keeps the size.
      how: mean and std; None changes nothing.

    Raises:
      SordinoError: the network reads grey images, and these have colours.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, found: Layout, channels: int, side: int | None, how: Normalisation | None) -> None:
        super().__init__()
        if found.channels not in (1, channels):
            raise SordinoError(
                f"image: the network reads {channels} channel, and these images have {found.channels}; make them grey."
            )
        self.found, self.channels = found, channels
        self.side = None if side is None or (found.height, found.width) == (side, side) else side
        self.mode = "bilinear" if how is None else how.mode
        self.normalised = how is not None and how.changes
        for name, value in (("mean", how.mean if how else (0.0,)), ("std", how.std if how else (1.0,))):
            self.register_buffer(name, torch.tensor(value).view(1, -1, 1, 1), persistent=False)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of one image as a row has it."""
        height, width, channels, first = self.found
        return (channels, height, width) if first else (height, width, channels)

    @property
    def output_shape(self) -> tuple[int, int, int]:
        """The shape of one image as the network reads it."""
        return self.channels, self.side or self.found.height, self.side or self.found.width

    @property
    def changes(self) -> bool:
        """Whether a row is more than reshaped."""
        moved = not self.found.channels_first and self.found.channels > 1
        return moved or self.side is not None or self.normalised or self.channels != self.found.channels

    def forward(self, x: Tensor) -> Tensor:
        x = (x if self.found.channels_first else x.movedim(-1, 1)).expand(-1, self.channels, -1, -1)
        if self.side is not None:
            x = interpolate(x, (self.side, self.side), mode=self.mode, antialias=True, align_corners=False)
        return (x - self.mean) / self.std if self.normalised else x.contiguous()
