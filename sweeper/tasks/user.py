"""`pkg.module:Class`: a task of the user's. Called without arguments, it has `loss` and `metrics`, and may have
`prepare(info) -> DataInfo`, `forward(model, batch)` and `to(device)`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from sweeper.errors import SpecError
from sweeper.imports import import_object
from sweeper.records import DataInfo
from sweeper.tasks.base import Metric, Task

WANTED = (
    "A task is a class with `loss(output, batch) -> (sum of losses, sum of weights)` and `metrics() -> {name: metric}`."
)

METRIC_NAME = r"\w[\w.-]*"
METRIC_METHODS = ("update", "compute", "reset", "to")


class UserTask(Task):
    """The user's object behind the names of `Task`; what it leaves out is as `Task` has it.

    Its own exceptions pass through; what it lacks or returns wrongly is a `SpecError`.
    """

    def __init__(self, import_path: str, info: DataInfo) -> None:
        self.import_path = import_path
        made = import_object(import_path, ("task", "name"))
        if not callable(made):
            raise self._fault(f"is of type {type(made).__name__}, not a class")
        self.own: Any = made()
        missing = [name for name in ("loss", "metrics") if not callable(getattr(self.own, name, None))]
        if missing:
            raise self._fault(f"has no method {' and no method '.join(f'`{name}`' for name in missing)}")
        self._check_metrics()
        self.info = self.own.prepare(info) if hasattr(self.own, "prepare") else info
        if not isinstance(self.info, DataInfo):
            raise self._fault(
                f"returned an object of type {type(self.info).__name__} from `prepare`, not a sweeper.DataInfo"
            )

    def _check_metrics(self) -> None:
        metrics = self.own.metrics()
        if not isinstance(metrics, Mapping):
            raise self._fault(f"returned an object of type {type(metrics).__name__} from `metrics`")
        for name, metric in metrics.items():
            if not re.fullmatch(METRIC_NAME, str(name)) or name == "loss":
                why = "val_loss is the loss's name" if name == "loss" else "MLflow takes letters, digits and _ - . only"
                raise self._fault(f"names a metric {name!r}, which cannot be: {why}")
            lacking = [method for method in METRIC_METHODS if not callable(getattr(metric, method, None))]
            if lacking:
                raise self._fault(f"has a metric {name!r} without {', '.join(lacking)}; torchmetrics' have all")

    def loss(self, output: Any, batch: Any) -> tuple[Tensor, Tensor]:
        answer = self.own.loss(output, batch)
        if not isinstance(answer, tuple | list) or len(answer) != 2:
            raise self._fault(f"returned an object of type {type(answer).__name__} from `loss`, not two sums")
        total, weight = answer
        if not isinstance(total, Tensor) or total.ndim or (isinstance(weight, Tensor) and weight.ndim):
            raise self._fault("returned something else than two scalars from `loss`")
        return total, weight if isinstance(weight, Tensor) else total.detach().new_full((), weight)

    def metrics(self) -> dict[str, Metric]:
        return dict(self.own.metrics())

    def forward(self, model: torch.nn.Module, batch: Any) -> Any:
        return self.own.forward(model, batch) if hasattr(self.own, "forward") else super().forward(model, batch)

    def to(self, device: torch.device) -> Self:
        if hasattr(self.own, "to"):
            self.own.to(device)
        return self

    def _fault(self, what: str) -> SpecError:
        return SpecError(("task", "name"), f"{self.import_path} {what}", WANTED)
