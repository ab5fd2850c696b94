"""What the numbers of a picture mean: bytes -> [0, 1] -> normalised to [-1, 1]. Augmentation works in between."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

MEAN, STD = 0.5, 0.5


@runtime_checkable
class Pictures(Protocol):
    """A dataset of pictures that can be had before they are normalised."""

    def unit_sample(self, index: int) -> tuple[Tensor, Any]:
        """The picture (channels, height, width) as float32 in [0, 1], a tensor of its own, and its target."""


def to_unit(pixels: Tensor) -> Tensor:
    """Bytes as float32 in [0, 1]."""
    return pixels.to(torch.float32).div_(255)


def normalise(unit: Tensor) -> Tensor:
    """[0, 1] to [-1, 1]: mean 0.5 and deviation 0.5, the same for every channel and every data set."""
    return (unit - MEAN) / STD
