"""The surroundings of a worker's trials, and how it says where they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sweeper.ownership import Claims
from sweeper.records import EpochRecord, TrialOutcome
from sweeper.spec import StudySpec, TrialConfig
from sweeper.tracking import Tracker
from sweeper.training.stopping import Judgement
from sweeper.training.trial_folder import TrialFolder

if TYPE_CHECKING:
    from sweeper.data import LoadedData


@dataclass(frozen=True)
class Progress:
    """What a running trial shows: called after each validation, once at its end, and, from a signal's handler, when
    somebody asked to leave."""

    on_record: Callable[[TrialConfig, EpochRecord, Judgement], None] = lambda *_: None
    on_end: Callable[[int, TrialOutcome], None] = lambda *_: None
    on_leaving: Callable[[str], None] = lambda _: None


@dataclass
class TrialRoom:
    """One worker's surroundings, the same for all its trials.

    `leave_after_epoch` is asked at the end of each epoch: True means checkpoint, release and leave.
    """

    spec: StudySpec
    import_folder: Path
    claims: Claims
    tracker: Tracker
    load: Callable[[], LoadedData]
    checkpoints: Path
    leave_after_epoch: Callable[[], bool] = lambda: False
    progress: Progress = field(default_factory=Progress)

    def folder(self, number: int) -> TrialFolder:
        return TrialFolder(self.checkpoints / f"trial-{number:04d}", self.spec.checkpoints.keep_last)

    def store_run_ids(self) -> None:
        """Keep the ids of runs that tracking has opened meanwhile with their trials, ended or not."""
        for number, run_id in self.tracker.new_run_ids().items():
            self.claims.set_user_attr(self.claims.trial_id(number), "mlflow_run_id", run_id)


class LeftEarly(Exception):
    """The trial was checkpointed and released at the end of an epoch, because its worker is to leave."""
