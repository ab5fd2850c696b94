"""Ask the pruner, so that a kill at any instant leaves either no trace of the question or its answer too."""

from __future__ import annotations

import copy
from typing import Any, cast

import optuna
from optuna.storages import BaseStorage

from sweeper.ownership import Claims

PRUNED_AT = "sweeper:pruned_at"


class _Held:
    """A storage that holds back what the pruner notes with the trial; all else goes through."""

    def __init__(self, storage: BaseStorage) -> None:
        self._storage = storage
        self.notes: dict[str, Any] = {}

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        self.notes[key] = value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)


def should_prune(claims: Claims, trial: optuna.trial.Trial, validation: int) -> bool:
    """The pruner's word on the trial's last report. A "yes" stays with the trial, as the attribute `PRUNED_AT`.

    The rung pruners note that a rung is done and, asked again for the same step, let the trial go on: a kill between
    that note and ours would turn "prune" into "go on". So both are written in one transaction.
    """
    held = _Held(trial.study._storage)
    study = copy.copy(trial.study)
    study._storage = cast(BaseStorage, held)
    pruned = trial.study.pruner.prune(study, trial.study._storage.get_trial(trial._trial_id))
    if pruned or held.notes:
        claims.set_attrs(trial._trial_id, user={PRUNED_AT: validation} if pruned else {}, system=held.notes)
    return pruned
