"""`classification`: one class per sample, softmax cross entropy."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from sweeper.errors import DataError, SpecError
from sweeper.records import DataInfo
from sweeper.spec import TaskSpec
from sweeper.tasks.base import Metric, Task, full_precision, is_float
from sweeper.tasks.metrics import SampleMean, correct


class Classification(Task):
    """Outputs (N, classes), targets (N,) of class indices.

    A sample weighs as much as its class, label smoothing or not: the quotient of `loss` is then torch's
    `cross_entropy(weight=..., label_smoothing=..., reduction="mean")` over all samples.
    """

    def __init__(self, spec: TaskSpec, info: DataInfo) -> None:
        if is_float(info.target_dtype) or info.target_shape:
            _refuse_targets(info)
        if not info.class_counts:
            raise DataError(
                f"The targets of {info.name} are integers, but no class indices: some are negative, or larger than the "
                "number of samples.\n  Number the classes 0, 1, 2, ..., or use `task.name: regression` for counts."
            )
        if info.num_outputs < 2:
            names = f" ({', '.join(info.class_names)})" if info.class_names else ""
            raise DataError(
                f"{info.name} has {info.num_outputs} class{names}; classification needs at least 2."
                "\n  Add a class, or use `task.name: regression` if the targets are numbers."
            )
        self.info = info
        self.label_smoothing = spec.label_smoothing
        self.weights = class_weights(spec, info)

    def to(self, device: torch.device) -> Self:
        if self.weights is not None:
            self.weights = self.weights.to(device)
        return self

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if output.shape[1:] != (self.info.num_outputs,):
            raise SpecError(
                ("model", "name"),
                f"the model answers with the shape {tuple(output.shape)}, where each sample needs a number for each of "
                f"the {self.info.num_outputs} classes",
                "Give it `data.num_outputs` outputs in `build(params, data)`.",
            )
        output, targets = full_precision(output), batch[1].long()
        weights = None if self.weights is None else self.weights.to(output.dtype)
        total = F.cross_entropy(output, targets, weight=weights, reduction="sum", label_smoothing=self.label_smoothing)
        return total, output.new_full((), len(targets)) if weights is None else weights[targets].sum()

    def metrics(self) -> dict[str, Metric]:
        return {"accuracy": SampleMean(correct)}


def class_weights(spec: TaskSpec, info: DataInfo) -> Tensor | None:
    """(classes,) as the study file wants them; `balanced` is samples / (classes * samples of the class).

    Raises `SpecError` for a list of another length, `DataError` for a class that has no sample to be weighed by.
    """
    if spec.class_weights == "none":
        return None
    if spec.class_weights == "balanced":
        if 0 in info.class_counts:
            empty = info.class_counts.index(0)
            name = info.class_names[empty] if info.class_names else empty
            raise DataError(
                f"Class {name} of {info.name} has no training sample, so `task.class_weights: balanced` has no weight"
                " for it.\n  Write the weights as a list, or remove the class."
            )
        share = sum(info.class_counts) / info.num_outputs
        return torch.tensor([share / count for count in info.class_counts])
    if len(spec.class_weights) != info.num_outputs:
        raise SpecError(
            ("task", "class_weights"),
            f"there are {len(spec.class_weights)} weights for the {info.num_outputs} classes of {info.name}",
            f"Give one for each class{': ' + ', '.join(info.class_names) if info.class_names else ''}.",
        )
    return torch.tensor(spec.class_weights)


def _refuse_targets(info: DataInfo) -> None:
    other = "multilabel` (labels of 0 and 1) or `regression" if info.target_shape else "regression"
    shape = f" of the shape {info.target_shape}" if info.target_shape else ""
    raise SpecError(
        ("task", "name"),
        f"classification needs one class index for each sample, but the targets of {info.name} are"
        f" {info.target_dtype} values{shape}",
        f"Use `task.name: {other}`, or give the classes as integers.",
    )
