"""What one validation and one trial leave behind, as plain values: the words between loop, trial and views."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

StopReason = Literal[
    "max_epochs",
    "early_stopped",
    "time_limit",
    "pruned",
    "diverged",
    "out_of_memory",
    "outside_limits",
    "failed",
]


@dataclass(frozen=True)
class Ending:
    """What a stop reason means to Optuna. `counts`: it uses up one of `budget.trials`."""

    state: Literal["COMPLETE", "PRUNED", "FAIL"]
    feasible: bool = True
    counts: bool = True


ENDINGS: dict[StopReason, Ending] = {
    "max_epochs": Ending("COMPLETE"),
    "early_stopped": Ending("COMPLETE"),
    "time_limit": Ending("COMPLETE"),
    "pruned": Ending("PRUNED"),
    "diverged": Ending("PRUNED", feasible=False),
    "out_of_memory": Ending("PRUNED", feasible=False),
    "outside_limits": Ending("PRUNED", feasible=False, counts=False),
    "failed": Ending("FAIL", counts=False),
}
LONGEST_SUMMARY = 300


@dataclass(frozen=True)
class EpochRecord:
    """Everything measured between two validations. Epochs and validations count from 0.

    `metrics` holds each name as MLflow shows it (`val_accuracy`, `optim/grad_norm`, `speed/train_s`, ...);
    values may be NaN or infinite, and are what was measured. `timestamp_ms` (since the epoch of Unix) is taken
    once, here, so that sending the record to MLflow again adds nothing.
    """

    validation: int
    epoch: int
    step: int
    epoch_complete: bool
    timestamp_ms: int
    metrics: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> EpochRecord:
        return cls(**values)


@dataclass(frozen=True)
class TrialOutcome:
    """How a trial ended: what is told to Optuna, tagged in MLflow and said on screen.

    `value` is the best value of the monitor (None if there never was a finite one), `best_epoch` its epoch.
    `error` is the traceback of a failed trial, `note` what else its reader must know.
    """

    stop_reason: StopReason
    value: float | None = None
    best_epoch: int | None = None
    error: str | None = None
    note: str | None = None

    @property
    def summary(self) -> str:
        """The error in one line: the one behind the last frame of a traceback, the first of a sentence with advice."""
        lines = (self.error or "").strip().splitlines() or [""]
        if not lines[0].startswith("Traceback"):
            return lines[0][:LONGEST_SUMMARY]
        frames = [place for place, line in enumerate(lines) if line.startswith("  File ")]
        behind = [line for line in lines[frames[-1] + 1 :] if not line.startswith("    ")] if frames else lines[1:]
        return (behind[0] if behind else lines[-1])[:LONGEST_SUMMARY]


@dataclass(frozen=True)
class DataInfo:
    """What a model and a task must know of the data.

    `input_shape` is one sample's, without the batch: (channels, height, width) for images, (features,) for rows.
    `num_outputs` is the width of the model's output. `sizes` counts the samples of each split (`train`, `val`,
    `test`); `class_counts` those of each class in the training split, none where the targets are no class indices.
    `target_range` are the lowest and the highest value of all targets.
    `digest` is a hash of the content. `input_scale` says in words how a sample was scaled from what its file holds;
    it is empty for a user's own data, which comes as it is.
    """

    name: str
    input_shape: tuple[int, ...]
    num_outputs: int
    sizes: dict[str, int]
    input_dtype: str = "float32"
    target_dtype: str = "int64"
    target_shape: tuple[int, ...] = ()
    class_names: tuple[str, ...] = ()
    class_counts: tuple[int, ...] = ()
    target_range: tuple[float, float] | None = None
    digest: str = ""
    input_scale: str = ""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> DataInfo:
        tuples = {"input_shape", "target_shape", "class_names", "class_counts", "target_range"}
        arguments: dict[str, Any] = {
            key: tuple(value) if key in tuples and value is not None else value for key, value in values.items()
        }
        return cls(**arguments)
