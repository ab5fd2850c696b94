"""`sweep run`: everything around the worker, from the opened databases to the closed parent run."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweeper.data import LoadedData
from sweeper.errors import DatabaseError, InterruptedNow, SweeperError
from sweeper.ownership import Claims, Owner
from sweeper.room import Progress, TrialRoom
from sweeper.spec import StudySpec
from sweeper.storage import optuna_answering, storage_lock
from sweeper.study.opening import OpenStudy, folder_name, make_folder, note_data, open_study
from sweeper.study.signals import StopSwitch
from sweeper.study.worker import Worker, best_number
from sweeper.studyfile import StudyFile
from sweeper.tracking import Tracker, TrackingSettings
from sweeper.tracking.spool import Status
from sweeper.training.speed import set_threads

PARENT_RUN = "mlflow_run_id"
EXPERIMENT = "mlflow_experiment_id"
# Who stops a process (a batch system, a container) kills it after 30 s or so; what is left then, the next run delivers.
CLOSE_S, CLOSE_HURRIED_S = 60.0, 20.0


@dataclass(frozen=True)
class RunResult:
    """How a `sweep run` ended. `why_over` says which end of the budget it was, `num_run` how many trials were in hand,
    `error` why it stopped early. `problems` are MLflow's; `undelivered` says where the spool lies when MLflow could not
    be reached."""

    why_over: str | None
    num_run: int
    interrupted: bool
    error: SweeperError | None
    problems: list[str]
    undelivered: Path | None


def run_study(file: StudyFile, data: LoadedData, progress: Progress) -> RunResult:
    """Work on the study until its budget is used up or somebody stops it. The file and data have been checked.

    Raises `StudyChangedError` and other `SweeperError`s before anything runs.
    """
    spec = file.spec
    with StopSwitch(progress.on_leaving) as switch:
        spool = Path(spec.tracking.artifacts).absolute().parent / "spool"
        make_folder(Path(spec.checkpoints.dir), "checkpoints: {dir: FOLDER}")
        make_folder(spool, "tracking: {artifacts: FOLDER/artifacts}")
        opened = open_study(spec)
        note_data(opened.study, spec, data.info)
        set_threads(opened.threads)
        tracker = Tracker(spool / folder_name(spec.study, opened.token), _tracking_settings(spec, opened))
        room = TrialRoom(
            spec=spec,
            import_folder=file.folder,
            claims=Claims(opened.study._storage, opened.study._study_id, Owner.current()),
            tracker=tracker,
            load=lambda: data,
            checkpoints=Path(spec.checkpoints.dir) / folder_name(spec.study, opened.token),
            leave_after_epoch=lambda: switch.leaving,
            progress=progress,
        )
        tracker.start()
        tracker.study_started(_study_tags(file), [(file.folder / file.path.name, "study.yaml")])
        return _work(opened, room, switch)


def _work(opened: OpenStudy, room: TrialRoom, switch: StopSwitch) -> RunResult:
    status: Status = "FAILED"
    error: SweeperError | None = None
    interrupted = False
    worker = Worker(opened, room, leaving=lambda: switch.leaving)
    try:
        worker.work()
        interrupted = switch.leaving
        status = "KILLED" if interrupted else "FINISHED"
    except InterruptedNow:
        status, interrupted = "KILLED", True
    except SweeperError as reason:
        error = reason
    finally:
        switch.close()
        delivered = _close(opened, room, status, lambda: CLOSE_HURRIED_S if switch.leaving else CLOSE_S)
    undelivered = None if delivered else room.tracker.spool_dir
    return RunResult(
        worker.why_over, worker.num_run, interrupted or switch.leaving, error, room.tracker.problems(), undelivered
    )


def _close(opened: OpenStudy, room: TrialRoom, status: Status, patience_s: Callable[[], float]) -> bool:
    """Close the parent run, unless another worker goes on, and wait for what MLflow has not got yet."""
    url = room.spec.storage
    # Of two that leave at once, one is the last. Without an answer from the database MLflow is closed all the same.
    with contextlib.suppress(DatabaseError), optuna_answering(url), storage_lock(url):
        others = room.claims.counts()["RUNNING"] - len(room.claims.stale(room.spec.workers.grace_period_s))
        if room.tracker.leaves_last() and others <= 0:
            room.tracker.study_finished(status, **_result(opened, room))
    delivered = room.tracker.close(patience_s)
    with contextlib.suppress(DatabaseError), optuna_answering(url):
        room.store_run_ids()
        for key, value in zip((EXPERIMENT, PARENT_RUN), room.tracker.parent_ids(), strict=True):
            if value is not None and opened.study.user_attrs.get(key) != value:
                opened.study.set_user_attr(key, value)
    return delivered


def _result(opened: OpenStudy, room: TrialRoom) -> dict[str, Any]:
    """What the parent run says of the best trial."""
    best = best_number(opened.study)
    if best is None:
        return {"tags": {}, "metrics": {}}
    trial = opened.study.trials[best]
    assert trial.value is not None
    assert trial.datetime_complete is not None
    return {
        "tags": {
            "best_trial": str(best),
            "best_epoch": str(trial.user_attrs.get("best_epoch")),
            "best_params": json.dumps(trial.params),
        },
        "metrics": {f"best/{room.spec.objective.monitor}": trial.value},
        "measured_ms": int(trial.datetime_complete.timestamp() * 1000),
        "step": best,
    }


def _tracking_settings(spec: StudySpec, opened: OpenStudy) -> TrackingSettings:
    return TrackingSettings(
        uri=spec.tracking.uri,
        artifacts=Path(spec.tracking.artifacts).absolute(),
        study=spec.study,
        study_token=opened.token,
        monitor=spec.objective.monitor,
        direction=spec.objective.direction,
        parent_run_id=opened.study.user_attrs.get(PARENT_RUN),
    )


def _study_tags(file: StudyFile) -> dict[str, str]:
    return {"sweeper.study_file": os.fspath(file.path), **git_tags(file.folder)}


def git_tags(folder: Path) -> dict[str, str]:
    """The commit and whether anything differs from it; nothing where there is no git or no repository."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        dirty = _git(folder, "status", "--porcelain", "--untracked-files=no") != ""
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"mlflow.source.git.commit": commit, "git.dirty": "true" if dirty else "false"}


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", os.fspath(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
