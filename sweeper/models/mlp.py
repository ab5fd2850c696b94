"""`mlp`: fully connected layers over the flattened sample."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field
from torch import nn

from sweeper.records import DataInfo
from sweeper.spec import Fraction, PositiveInt, Section


class MlpParams(Section):
    """`depth` hidden layers of `width` units each; depth 0 is a linear model. Dropout follows every hidden layer."""

    width: PositiveInt = 128
    depth: Annotated[int, Field(ge=0, le=1000)] = 1
    dropout: Fraction = 0.0
    batch_norm: bool = False


def build(params: MlpParams, info: DataInfo) -> nn.Module:
    """(batch, *input_shape) -> (batch, num_outputs)."""
    layers: list[nn.Module] = [nn.Flatten()]
    features = math.prod(info.input_shape)
    for _ in range(params.depth):
        # A bias before batch norm is taken off again by its mean: a parameter without effect.
        layers.append(nn.Linear(features, params.width, bias=not params.batch_norm))
        if params.batch_norm:
            layers.append(nn.BatchNorm1d(params.width))
        layers.append(nn.ReLU())
        if params.dropout:
            layers.append(nn.Dropout(params.dropout))
        features = params.width
    return nn.Sequential(*layers, nn.Linear(features, info.num_outputs))
