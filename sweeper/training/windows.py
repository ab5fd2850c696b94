"""Which samples make a micro-batch, and which micro-batches make an optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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

    The last window of an epoch may hold fewer micro-batches and samples; none crosses into the next epoch. Where
    memory is short, batches are cut into parts of `largest_part` samples: the windows keep their samples.
    """

    num_samples: int
    batch_size: int
    accumulation_steps: int
    largest_part: int | None = None

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
        windows = [plan[start : start + size] for start in range(0, len(plan), size)]
        return [[part for batch in window for part in self._parts(batch)] for window in windows]

    @property
    def micro_batch_size(self) -> int:
        return min(self.batch_size, self.largest_part or self.batch_size)

    @property
    def parts_per_batch(self) -> int:
        """Into how many parts a whole batch is cut."""
        return -(-self.batch_size // self.micro_batch_size)

    def _parts(self, batch: list[int]) -> Plan:
        """As equal as can be: no part is a lone sample, unless all are about that small."""
        if self.micro_batch_size >= self.batch_size:
            return [batch]
        count = -(-len(batch) // self.micro_batch_size)
        ends = [len(batch) * part // count for part in range(count + 1)]
        return [batch[start:end] for start, end in pairwise(ends)]


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
