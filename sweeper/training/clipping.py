"""Measure and clip the gradients of one whole window, without waiting for the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class ClipResult(NamedTuple):
    """`norm` before clipping; whether anything was clipped. Both of shape (), on the gradients' device."""

    norm: Tensor
    clipped: Tensor


@dataclass(frozen=True)
class Clipper:
    """Clip by norm, by value, or only measure (both None). `norm_type` is 2 or infinity."""

    max_norm: float | None
    max_value: float | None
    norm_type: float

    def __call__(self, gradients: list[Tensor], factor: Tensor) -> ClipResult:
        """Multiply the gradients in place by `factor` (shape ()), then clip them in place.

        Once per optimizer step, after unscaling, when the whole window has been accumulated. Gradients whose norm is
        not finite are only multiplied by `factor`: the step that follows must be skipped.
        Source of clipping by norm: Pascanu et al. 2013, arXiv:1211.5063, algorithm 1.
        """
        norm = torch.nn.utils.get_total_norm(gradients, self.norm_type) * factor
        if self.max_norm is not None:
            clipped = norm > self.max_norm
            coefficient = torch.where(clipped & torch.isfinite(norm), self.max_norm / norm, 1.0)
            torch._foreach_mul_(gradients, factor * coefficient)
            return ClipResult(norm, clipped)
        torch._foreach_mul_(gradients, factor)
        if self.max_value is None:
            return ClipResult(norm, torch.zeros_like(norm, dtype=torch.bool))
        largest = torch.nn.utils.get_total_norm(gradients, math.inf)
        torch._foreach_clamp_min_(gradients, -self.max_value)
        torch._foreach_clamp_max_(gradients, self.max_value)
        return ClipResult(norm, largest > self.max_value)
