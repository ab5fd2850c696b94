"""`multilabel`: any number of labels per sample, each true or false."""

from __future__ import annotations

import dataclasses

from torch import Tensor
from torch.nn import functional as F

from sweeper.errors import DataError, SpecError
from sweeper.records import DataInfo
from sweeper.tasks.base import Metric, Task, rows
from sweeper.tasks.metrics import SampleMean, correct_labels


class Multilabel(Task):
    """Outputs are logits (N, labels), targets (N, labels) of 0 and 1; a sample's loss is the mean over its labels.

    The logits form, because the one on probabilities has no safe half precision and raises under CUDA's autocast.
    """

    def __init__(self, info: DataInfo) -> None:
        if len(info.target_shape) != 1:
            raise SpecError(
                ("task", "name"),
                f"multilabel needs a row of 0 and 1 for each sample, but the targets of {info.name} have the shape"
                f" {info.target_shape}",
                "Use `task.name: classification` if each sample has one class.",
            )
        if info.target_range is not None and not 0 <= info.target_range[0] <= info.target_range[1] <= 1:
            low, high = info.target_range
            raise DataError(
                f"multilabel needs targets from 0 to 1, but those of {info.name} go from {low:g} to {high:g}."
                "\n  Write 1 for each label that a sample has, and 0 for the others."
            )
        self.info = dataclasses.replace(info, num_outputs=info.target_shape[0])

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        output, targets = rows(output, batch[1])
        losses = F.binary_cross_entropy_with_logits(output, targets, reduction="none").mean(1)
        return losses.sum(), losses.new_full((), len(losses))

    def metrics(self) -> dict[str, Metric]:
        return {"accuracy": SampleMean(correct_labels)}
