"""Which samples make a micro-batch, and which micro-batches make an optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sweeper.spec import derive_seed

Plan = list[list[int]]


def epoch_order(num_samples: int, seed: int, epoch: int) -> list[int]:
    """The shuffled sample indices of one epoch: a function of seed and epoch alone, so that any epoch can be redone."""
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch))
    return torch.randperm(num_samples, generator=generator).tolist()


def micro_batches(order: Sequence[int], batch_size: int) -> Plan:
    """Cut the order into micro-batches. A lone last sample joins the one before it: batch norm cannot train on one."""
    plan = [list(order[start : start + batch_size]) for start in range(0, len(order), batch_size)]
    if len(plan) > 1 and batch_size > 1 and len(plan[-1]) == 1:
        lone = plan.pop()
        plan[-1] += lone
    return plan


@dataclass(frozen=True)
class Windows:
    """The shape of every epoch: its micro-batches grouped into windows, one optimizer step each.

    The last window of an epoch may hold fewer micro-batches and samples; none crosses into the next epoch.
    """

    num_samples: int
    batch_size: int
    accumulation_steps: int

    def plan(self, order: Sequence[int]) -> Plan:
        return micro_batches(order, self.batch_size)

    @property
    def micro_batches_per_epoch(self) -> int:
        return len(micro_batches(range(self.num_samples), self.batch_size))

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.micro_batches_per_epoch // self.accumulation_steps)

    def group(self, plan: Plan) -> list[Plan]:
        size = self.accumulation_steps
        return [plan[start : start + size] for start in range(0, len(plan), size)]


def validation_steps(steps_per_epoch: int, validations_per_epoch: int) -> list[int]:
    """After which steps (counted from 1) of an epoch a validation follows; equally spaced, the last at its end.

    Raises ValueError when the epoch has fewer steps than validations.
    """
    if validations_per_epoch > steps_per_epoch:
        raise ValueError(
            f"validations_per_epoch ({validations_per_epoch}) exceeds the optimizer steps of an epoch "
            f"({steps_per_epoch}); lower it, or limit effective_batch_size"
        )
    return [round(steps_per_epoch * part / validations_per_epoch) for part in range(1, validations_per_epoch + 1)]
