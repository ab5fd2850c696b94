"""Metrics as sums over samples, kept where the outputs are and never read to the host before `compute`.

Sums are in float64 where the device has it (Apple's `mps` has not): so a value is the same for every batch size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from sweeper.tasks.base import rows


def _sum_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


class SampleMean:
    """The mean over samples of `per_sample(output, target) -> (N,)`, with `finish` applied to the mean."""

    def __init__(
        self, per_sample: Callable[[Tensor, Tensor], Tensor], finish: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.per_sample = per_sample
        self.finish = finish
        self.reset()

    def reset(self) -> None:
        self.total: Tensor | float = 0.0
        self.count = 0

    def to(self, device: torch.device) -> Self:
        """Nothing to move: the sums begin with a reset, on the device of the first output."""
        return self

    def update(self, output: Tensor, target: Tensor) -> None:
        values = self.per_sample(output.detach(), target)
        self.total = self.total + values.sum(dtype=_sum_dtype(values.device))
        self.count += len(values)

    def compute(self) -> Tensor:
        """A scalar; NaN without samples."""
        if self.count == 0:
            return torch.tensor(math.nan)
        mean = torch.as_tensor(self.total) / self.count
        return self.finish(mean) if self.finish else mean


class R2:
    """1 - residual / total sum of squares, the mean of it over the values of a vector target.

    One pass, with the batches' means and squares merged after Chan, Golub and LeVeque (1979), "Updating formulae and
    a pairwise algorithm for computing sample variances": the plain sum of squares loses the spread of targets whose
    mean is far from zero. A constant target counts as scikit-learn's `r2_score` counts it: 1 if met exactly, else 0;
    a single sample has no spread, and no R2.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.mean: Tensor | float = 0.0
        self.spread: Tensor | float = 0.0
        self.residual: Tensor | float = 0.0
        self.count = 0

    def to(self, device: torch.device) -> Self:
        """Nothing to move: the sums begin with a reset, on the device of the first output."""
        return self

    def update(self, output: Tensor, target: Tensor) -> None:
        dtype = _sum_dtype(output.device)
        output, target = (part.to(dtype) for part in rows(output.detach(), target))
        added, total = len(target), self.count + len(target)
        mean = target.mean(0)
        step = mean - self.mean
        self.spread = self.spread + (target - mean).square().sum(0) + step.square() * (self.count * added / total)
        self.mean = self.mean + step * (added / total)
        self.residual = self.residual + (target - output).square().sum(0)
        self.count = total

    def compute(self) -> Tensor:
        """A scalar; NaN for fewer than two samples."""
        if self.count < 2:
            return torch.tensor(math.nan)
        spread, residual = torch.as_tensor(self.spread), torch.as_tensor(self.residual)
        explained = 1 - residual / spread
        constant = (residual == 0).to(explained.dtype)
        return torch.where(spread == 0, constant, explained).mean()


def correct(output: Tensor, target: Tensor) -> Tensor:
    """1 where the largest of (N, classes) stands at the target's class."""
    return output.argmax(1) == target


def correct_labels(output: Tensor, target: Tensor) -> Tensor:
    """The share of a sample's labels that a logit's sign, i.e. a probability above 0.5, tells rightly."""
    output, target = rows(output, target)
    return ((output > 0) == (target > 0.5)).float().mean(1)


def absolute_error(output: Tensor, target: Tensor) -> Tensor:
    output, target = rows(output, target)
    return (output - target).abs().mean(1)


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    output, target = rows(output, target)
    return (output - target).square().mean(1)
