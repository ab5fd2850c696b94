"""Open a stored study to look at it: nothing is created, and neither torch nor MLflow is imported."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import optuna
from optuna.trial import FrozenTrial, TrialState

from sweeper.errors import DatabaseError, StorageError, SweeperError
from sweeper.ownership import Claims, Owner, open_to_read, sqlite_path
from sweeper.spec import StudySpec
from sweeper.storage import BUSY_TIMEOUT_S
from sweeper.study.opening import TOKEN, folder_name, stored_spec


@dataclass(frozen=True)
class StoredStudy:
    """`interrupted` are the numbers of RUNNING trials that no living worker owns."""

    spec: StudySpec
    study: optuna.Study
    trials: list[FrozenTrial]
    interrupted: set[int]

    @property
    def best(self) -> FrozenTrial | None:
        """The best complete and feasible trial."""
        try:
            return self.study.best_trial
        except ValueError:
            return None

    def trial(self, number: int) -> FrozenTrial:
        """Raises `SweeperError` naming the trials that there are."""
        for trial in self.trials:
            if trial.number == number:
                return trial
        known = f"0 to {self.trials[-1].number}" if self.trials else "none yet"
        raise SweeperError(f"There is no trial {number} in the study {self.spec.study!r}\n  Its trials: {known}.")

    def folder(self, number: int) -> Path:
        study = folder_name(self.spec.study, self.study.user_attrs[TOKEN])
        return Path(self.spec.checkpoints.dir) / study / f"trial-{number:04d}"

    def state(self, trial: FrozenTrial) -> str:
        """One of complete, pruned, failed, running, interrupted, waiting."""
        if trial.number in self.interrupted:
            return "interrupted"
        return "failed" if trial.state == TrialState.FAIL else trial.state.name.lower()

    def last_activity(self) -> str | None:
        """The time, in UTC and ISO 8601, of the latest start, heartbeat or end of a trial."""
        with closing(_open_to_read(sqlite_path(self.spec.storage))) as database:
            row = database.execute(_LAST_ACTIVITY, {"study": self.study._study_id}).fetchone()
        return f"{row[0].split('.')[0].replace(' ', 'T')}+00:00" if row and row[0] else None


_LAST_ACTIVITY = """
    SELECT max(moment) FROM (
        SELECT max(coalesce(datetime_complete, datetime_start)) AS moment FROM trials WHERE study_id = :study
        UNION ALL
        SELECT max(heartbeat) FROM trial_heartbeats JOIN trials USING (trial_id) WHERE study_id = :study
    )
"""


def read_study(spec: StudySpec) -> StoredStudy:
    """The study as it was begun: what the file says otherwise by now has not been run.

    Raises `StorageError`, naming the absolute path, when the database or the study in it does not exist.
    """
    path = sqlite_path(spec.storage).absolute()
    todo = "  `sweep run STUDY.yaml` creates it. Paths are relative to the working directory."
    if not path.exists():
        raise StorageError(f"There is no database {path}\n{todo}")
    if not _is_optuna(path):
        raise StorageError(f"{path} is not a database of studies\n  Check `storage` in the study file.")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study = optuna.load_study(study_name=spec.study, storage=open_to_read(spec.storage))
    except KeyError:
        raise StorageError(f"There is no study {spec.study!r} in {path}\n{todo}") from None
    spec = stored_spec(spec, study)
    claims = Claims(study._storage, study._study_id, Owner.current())
    trials = study.get_trials(deepcopy=False)
    interrupted = {stale.number for stale in claims.stale(spec.workers.grace_period_s)}
    return StoredStudy(spec, study, trials, interrupted)


def _open_to_read(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_TIMEOUT_S)


def _is_optuna(path: Path) -> bool:
    try:
        with closing(_open_to_read(path)) as database:
            rows = database.execute("SELECT name FROM sqlite_master WHERE name IN ('studies', 'trials')").fetchall()
    except sqlite3.OperationalError as error:
        raise DatabaseError(
            f"{path}: the database does not answer: {error}\n  Close the program that holds it."
        ) from None
    except sqlite3.DatabaseError:
        return False
    return len(rows) == 2
