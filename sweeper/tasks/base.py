"""What the training loop asks of a task and of a metric."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from sweeper.errors import SpecError
from sweeper.records import DataInfo


class Metric(Protocol):
    """One number about a whole split, gathered over micro-batches; every torchmetrics metric is one.

    The value must not depend on how the samples are split into batches, and `update` must read nothing to the host.
    """

    def update(self, output: Any, target: Any, /) -> None: ...

    def compute(self) -> Tensor: ...

    def reset(self) -> None: ...

    def to(self, device: torch.device, /) -> Any: ...


class Task(ABC):
    """`info` is the data as this task sees it: a model for it has `info.num_outputs` outputs."""

    info: DataInfo

    @abstractmethod
    def loss(self, output: Any, batch: Any) -> tuple[Tensor, Tensor]:
        """(sum of the samples' weighted losses, sum of their weights): two scalars on the output's device.

        Their quotient over any set of micro-batches is the loss over all samples in them, however they were split.
        Call it outside autocast: it works in float32 whatever the output's type, and in float64 for float64.
        """

    @abstractmethod
    def metrics(self) -> dict[str, Metric]:
        """New, empty metrics by name, without `val_`. They are updated with (output, batch[1])."""

    def forward(self, model: torch.nn.Module, batch: Any) -> Any:
        """The model's output for a batch `(inputs, targets)`."""
        return model(batch[0])

    def to(self, device: torch.device) -> Self:
        """Move what `loss` needs, such as class weights; this same task comes back."""
        return self


def full_precision(output: Tensor) -> Tensor:
    """Half precision as float32: a loss or a sum in 8 or 11 bits is too coarse. Float64 stays."""
    return output if output.dtype == torch.float64 else output.float()


def rows(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Both as (samples, values), the target in the output's type.

    An output (N, 1) beside targets (N,) would broadcast to N x N without a word; shapes that do not pair up are a
    `SpecError` that names both.
    """
    output = full_precision(output)
    wide_output, wide_target = output.reshape(len(output), -1), target.reshape(len(target), -1)
    if wide_output.shape != wide_target.shape:
        raise SpecError(
            ("model", "name"),
            f"the model answers with the shape {tuple(output.shape)} where the targets have {tuple(target.shape)}",
            "Give it as many outputs as a target has values (`data.num_outputs` in `build(params, data)`).",
        )
    return wide_output, wide_target.to(output.dtype)


def is_float(dtype: str) -> bool:
    """Whether a `DataInfo` dtype, such as `float32` or `int64`, is one of fractions."""
    return "float" in dtype
