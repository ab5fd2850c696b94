"""A study's place in MLflow: its experiment and its parent run, found or created once by however many ask."""

from __future__ import annotations

import contextlib
import getpass
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from filelock import FileLock
from mlflow import MlflowClient
from mlflow.entities import Experiment, LifecycleStage, Run
from mlflow.exceptions import MlflowException
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

from sweeper.tracking.settings import SQLITE, TrackingSettings, database_file

REFUSALS = {
    "INVALID_PARAMETER_VALUE",
    "BAD_REQUEST",
    "RESOURCE_DOES_NOT_EXIST",
    "RESOURCE_ALREADY_EXISTS",
    "NOT_FOUND",
    "INVALID_STATE",
}


class Unreachable(Exception):
    """MLflow may take an event later; the text is a sentence."""


@contextlib.contextmanager
def creation_lock(uri: str, lock_dir: Path) -> Iterator[None]:
    """Held while something is looked for and created: beside a SQLite file, else in `lock_dir`."""
    database = database_file(uri)
    lock_file = lock_dir / "mlflow.lock" if database is None else Path(f"{database}.lock")
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock_file):
        yield


def open_study(settings: TrackingSettings, lock_dir: Path) -> tuple[MlflowClient, Run]:
    """A client and the parent run. Raises `Unreachable` when the experiment was deleted, or whatever MLflow raises."""
    database = database_file(settings.uri)
    with creation_lock(settings.uri, lock_dir):
        if database is not None and not database.exists():
            _create_database(database, settings.artifact_location)
        client = MlflowClient(tracking_uri=settings.uri, registry_uri=settings.uri)
        parent = living_run(client, settings.parent_run_id)
        if parent is None:
            parent = _find_or_create_parent(client, _find_or_create_experiment(client, settings), settings)
    return client, parent


def _create_database(database: Path, artifact_location: str | None) -> None:
    """Whole or not at all: a kill while MLflow makes its tables leaves a file that no MLflow can open again."""
    beside = f"{database.name}.new-"
    for left_by_a_kill in [path for path in database.parent.iterdir() if path.name.startswith(beside)]:
        left_by_a_kill.unlink()
    new = database.with_name(f"{beside}{uuid.uuid4().hex}")  # never one name twice: MLflow keeps connections by name
    store = SqlAlchemyStore(f"{SQLITE}{new}", artifact_location)
    store.engine.dispose()
    if not database.exists():
        os.replace(new, database)


def _find_or_create_experiment(client: MlflowClient, settings: TrackingSettings) -> str:
    found = client.get_experiment_by_name(settings.study)
    if found is None:
        try:
            return client.create_experiment(settings.study, artifact_location=settings.artifact_location)
        except MlflowException:
            found = client.get_experiment_by_name(settings.study)  # another machine was faster
            if found is None:
                raise
    check_active(found)
    return found.experiment_id


def _find_or_create_parent(client: MlflowClient, experiment_id: str, settings: TrackingSettings) -> Run:
    identity = {"sweeper.study": settings.study, "sweeper.study_token": settings.study_token}
    found = find_run(client, experiment_id, identity)
    if found is not None:
        return found
    asked = {"sweeper.monitor": settings.monitor, "sweeper.direction": settings.direction}
    return client.create_run(experiment_id, tags={**identity, **asked, "mlflow.user": user()}, run_name=settings.study)


def find_run(client: MlflowClient, experiment_id: str, tags: Mapping[str, str]) -> Run | None:
    """The oldest, so that everybody finds the same. No quotes in the values: study names and tokens have none."""
    query = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
    found = client.search_runs([experiment_id], query, max_results=1, order_by=["attributes.start_time ASC"])
    return found[0] if found else None


def living_run(client: MlflowClient, run_id: str | None) -> Run | None:
    """None for a run that was deleted, or that this MLflow never had."""
    if run_id is None:
        return None
    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code in REFUSALS:
            return None
        raise
    return run if run.info.lifecycle_stage == LifecycleStage.ACTIVE else None


def check_active(experiment: Experiment) -> None:
    """Raises `Unreachable` for a deleted experiment."""
    if experiment.lifecycle_stage != LifecycleStage.ACTIVE:
        raise Unreachable(
            f"The experiment {experiment.name!r} was deleted in MLflow. Restore it with"
            f" `mlflow experiments restore -x {experiment.experiment_id}`, or give the study another name."
        )


def user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "unknown"
