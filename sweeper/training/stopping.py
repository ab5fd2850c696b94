"""The one judgement over a trial's series of validation values: the best one, and whether to go on.

Early stopping asks whether *this* trial has finished improving; the pruner asks whether it is hopeless beside the
others. Both look at the same series, and neither before `min_epochs` epochs are complete.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Verdict:
    """What one validation means. `is_best`: save the best checkpoint. `stalled`: the patience counter is running.

    `stop`: early stopping ends the trial. `may_stop`: `min_epochs` epochs are complete, the pruner may be asked.
    """

    is_best: bool
    stalled: bool
    stop: bool
    may_stop: bool


class Judgement:
    """One per trial. `patience` counts validations, `min_epochs` epochs; the patience counter runs from the start.

    Two questions are kept apart. The *best* value follows any strict improvement. The *counter* goes back to 0 only
    for a value better than the last reference by strictly more than `min_delta`, which then is the new reference:
    a trial that creeps forward by less does not run for ever, and keeps its best all the same.
    A value that is not finite counts towards patience and is never best.
    """

    def __init__(
        self, direction: Literal["minimize", "maximize"], patience: int, min_delta: float, min_epochs: int
    ) -> None:
        self.direction = direction
        self.patience = patience
        self.min_delta = min_delta
        self.min_epochs = min_epochs
        self.best_value: float | None = None
        self.best_epoch: int | None = None
        self.best_validation: int | None = None
        self.reference: float | None = None
        self.counter = 0

    def update(self, value: float, *, epoch: int, validation: int, epochs_complete: int) -> Verdict:
        """Take in the monitor's value of validation `validation` (from 0), which fell into epoch `epoch` (from 0)."""
        is_best = self._is_better(value, self.best_value, by_more_than=0.0)
        if is_best:
            self.best_value, self.best_epoch, self.best_validation = value, epoch, validation
        if self._is_better(value, self.reference, by_more_than=self.min_delta):
            self.reference, self.counter = value, 0
        else:
            self.counter += 1
        may_stop = epochs_complete >= self.min_epochs
        return Verdict(
            is_best=is_best,
            stalled=self.counter >= 1,
            stop=may_stop and self.counter >= self.patience,
            may_stop=may_stop,
        )

    def _is_better(self, value: float, than: float | None, by_more_than: float) -> bool:
        if not math.isfinite(value):
            return False
        if than is None:
            return True
        gain = than - value if self.direction == "minimize" else value - than
        return gain > by_more_than

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in _STATE:
            setattr(self, name, state[name])


_STATE = ("best_value", "best_epoch", "best_validation", "reference", "counter")


def carry_forward(best: float, next_validation: int, num_validations: int) -> dict[int, float]:
    """The plateau of a trial that stopped: `best` at each validation it did not run, to be reported to Optuna only.

    So that the trial stays comparable at the later steps with those that ran on.
    """
    return dict.fromkeys(range(next_validation, num_validations), best)
