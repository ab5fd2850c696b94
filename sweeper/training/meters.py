"""Counts of the training steps since the last validation, kept on the device and read in one go."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sweeper.training.clipping import ClipResult


@dataclass(frozen=True)
class Reading:
    """One reading, on the host. `streak` is the longest run of skipped steps, which may reach back further."""

    loss_sum: float
    weight_sum: float
    norm_sum: float
    good_steps: int
    clipped: int
    skipped: int
    streak: int
    bad_losses: int

    @property
    def train_loss(self) -> float:
        """Mean over samples since the last validation, whatever the micro-batches were."""
        return self.loss_sum / self.weight_sum if self.weight_sum else float("nan")

    @property
    def grad_norm(self) -> float:
        """Mean norm before clipping of the steps that happened; NaN, never 0, when none did."""
        return self.norm_sum / self.good_steps if self.good_steps else float("nan")

    @property
    def clipped_fraction(self) -> float:
        return self.clipped / self.good_steps if self.good_steps else float("nan")


class Meters:
    """Eight counters in one tensor of shape (8,): reading them costs one wait for the device."""

    def __init__(self, device: torch.device) -> None:
        # float64 keeps a sum over a long epoch exact to the last digits shown; MPS has none.
        self._values = torch.zeros(8, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        self._run = torch.zeros((), dtype=torch.int64, device=device)
        names = self._values.unbind()
        self._loss, self._weight, self._norm, self._good, self._clipped, self._skipped, self._streak, self._bad = names

    def add_loss(self, loss_sum: Tensor, weight: Tensor) -> None:
        """One micro-batch: the sum of its losses and of their weights, both of shape ()."""
        self._loss += loss_sum
        self._weight += weight
        self._bad += ~torch.isfinite(loss_sum + weight)

    def add_step(self, clip: ClipResult, bad: Tensor) -> None:
        """One window; `bad` of shape (), bool: its step was skipped."""
        good = ~bad
        self._norm += torch.where(good, clip.norm, 0.0)
        self._good += good
        self._clipped += clip.clipped & good
        self._skipped += bad
        self._run += 1
        self._run *= bad
        torch.maximum(self._streak, self._run, out=self._streak)

    def read(self) -> Reading:
        """Waits for the device once."""
        loss, weight, norm, good, clipped, skipped, streak, bad = self._values.tolist()
        return Reading(loss, weight, norm, int(good), int(clipped), int(skipped), int(streak), int(bad))

    def reset(self) -> None:
        """Start the next interval. The present run of skipped steps goes on: 20 in a row may span a validation."""
        self._values.zero_()

    def state_dict(self) -> dict[str, int]:
        return {"run": int(self._run)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._run.fill_(state["run"])
