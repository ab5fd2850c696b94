"""`regression`: one number or a vector of numbers per sample, mean squared error."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from sweeper.errors import SpecError
from sweeper.records import DataInfo
from sweeper.tasks.base import Metric, Task
from sweeper.tasks.metrics import R2, SampleMean, absolute_error, squared_error


class Regression(Task):
    """Outputs (N, values), targets (N,) or (N, values), integers allowed; a vector counts by the mean of its values."""

    def __init__(self, info: DataInfo) -> None:
        if len(info.target_shape) > 1:
            raise SpecError(
                ("task", "name"),
                f"regression needs a number or a row of numbers for each sample, but the targets of {info.name} have"
                f" the shape {info.target_shape}",
                "Flatten the targets in your data function, or write a task of your own.",
            )
        self.info = dataclasses.replace(info, num_outputs=info.target_shape[0] if info.target_shape else 1)

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        losses = squared_error(output, batch[1])
        return losses.sum(), losses.new_full((), len(losses))

    def metrics(self) -> dict[str, Metric]:
        return {
            "mae": SampleMean(absolute_error),
            "rmse": SampleMean(squared_error, finish=torch.sqrt),
            "r2": R2(),
        }
