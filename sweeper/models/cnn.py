"""`cnn`: a small convolutional network for images from 8x8 to about 64x64."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import nn

from sweeper.models.params import image_shape
from sweeper.records import DataInfo
from sweeper.spec import Fraction, PositiveInt, Section

WIDEST = 8
SMALLEST_POOLED_SIDE = 4


class CnnParams(Section):
    """`depth` 3x3 convolutions, the first with `width` channels, each with twice those before it, up to 8 * `width`.

    A 2x2 pool halves the image after every second convolution and after the last one, as long as its smaller side
    has 4 pixels. `hidden` units stand before the output; dropout follows them.
    """

    width: PositiveInt = 16
    depth: Annotated[int, Field(ge=1, le=1000)] = 2
    hidden: PositiveInt = 64
    dropout: Fraction = 0.0
    batch_norm: bool = False


def build(params: CnnParams, info: DataInfo) -> nn.Module:
    """(batch, channels, height, width) -> (batch, num_outputs). Raises `SpecError` for data that are no images."""
    channels, height, width = image_shape(info, "cnn")
    layers: list[nn.Module] = []
    for index in range(params.depth):
        wider = params.width * min(2**index, WIDEST)
        # A bias before batch norm is taken off again by its mean: a parameter without effect.
        layers.append(nn.Conv2d(channels, wider, 3, padding=1, bias=not params.batch_norm))
        if params.batch_norm:
            layers.append(nn.BatchNorm2d(wider))
        layers.append(nn.ReLU())
        channels = wider
        end_of_pair = index % 2 == 1 or index == params.depth - 1
        if end_of_pair and min(height, width) >= SMALLEST_POOLED_SIDE:
            layers.append(nn.MaxPool2d(2))
            height, width = height // 2, width // 2
    layers += [nn.Flatten(), nn.Linear(channels * height * width, params.hidden), nn.ReLU()]
    if params.dropout:
        layers.append(nn.Dropout(params.dropout))
    return nn.Sequential(*layers, nn.Linear(params.hidden, info.num_outputs))
