"""What is learned: `classification`, `multilabel`, `regression`, or the user's `pkg.module:Class`.

Here live the names, which need no torch: a study file is checked with them. `build_task` opens the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sweeper.errors import SpecError
from sweeper.imports import is_import_path
from sweeper.records import DataInfo
from sweeper.spec import TaskSpec

if TYPE_CHECKING:
    from sweeper.tasks.base import Task

__all__ = ["build_task", "metric_names"]

METRIC_NAMES = {
    "classification": ("accuracy",),
    "multilabel": ("accuracy",),
    "regression": ("mae", "rmse", "r2"),
}


def metric_names(spec: TaskSpec) -> tuple[str, ...] | None:
    """The names of the task's metrics, without `val_` and beside the loss. None for a user's task: only it knows.

    Raises `SpecError` for an unknown task and for settings that the task does not have.
    """
    if not is_import_path(spec.name) and spec.name not in METRIC_NAMES:
        raise SpecError(
            ("task", "name"),
            f"there is no task {spec.name!r}",
            f"There are {', '.join(f'`{name}`' for name in METRIC_NAMES)} and your own `pkg.module:Class`.",
        )
    if spec.name != "classification":
        for key in ("class_weights", "label_smoothing"):
            if getattr(spec, key) != TaskSpec.model_fields[key].default:
                raise SpecError(
                    ("task", key),
                    f"{key} ({getattr(spec, key)}) is a setting of classification, not of {spec.name}",
                    "Remove it.",
                )
    return METRIC_NAMES.get(spec.name)


def build_task(spec: TaskSpec, info: DataInfo) -> Task:
    """The task for this data, on the CPU. Its `info` is `info` with the `num_outputs` that a model for it needs.

    Raises `SpecError` when task and data do not belong together, `DataError` when the data has too few classes.
    """
    metric_names(spec)
    from sweeper.tasks.classification import Classification
    from sweeper.tasks.multilabel import Multilabel
    from sweeper.tasks.regression import Regression
    from sweeper.tasks.user import UserTask

    if is_import_path(spec.name):
        return UserTask(spec.name, info)
    if spec.name == "classification":
        return Classification(spec, info)
    return Multilabel(info) if spec.name == "multilabel" else Regression(info)
