"""One event after the other to MLflow. Each may come again: what MLflow has already is left as it is."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunInfo, RunStatus, RunTag
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import SQLAlchemyError

from sweeper.tracking.experiment import (
    REFUSALS,
    Unreachable,
    check_active,
    creation_lock,
    find_run,
    living_run,
    open_study,
    user,
)
from sweeper.tracking.settings import TrackingSettings
from sweeper.tracking.texts import as_text, nonfinite_tags, plan_params, redact
from sweeper.tracking.uploads import as_named

MAX_DIGEST_LENGTH = 36  # of MLflow 3
STARTED = "sweeper.started_ms"
UPLOAD_TRIES = 3

Event = Mapping[str, Any]


class Refused(Exception):
    """MLflow will never take this event; the text is a sentence."""


class Delivery:
    """A study in MLflow: its parent run and one child run per trial.

    `runs` (trial number -> run id) may be filled with what is known. `on_run` and `on_parent` hear of every run that
    this delivery opened or found by itself. `lock_dir` is shared by all processes of this machine that deliver.
    """

    def __init__(
        self,
        settings: TrackingSettings,
        lock_dir: Path,
        on_run: Callable[[int, str], None],
        on_parent: Callable[[str, str], None],
    ) -> None:
        self.runs: dict[int, str] = {}
        self._settings, self._lock_dir = settings, lock_dir
        self._on_run, self._on_parent = on_run, on_parent
        self._opened: tuple[MlflowClient, Run] | None = None
        self._handlers: dict[str, Callable[[Event], None]] = {
            "study_started": self._study_started,
            "study_finished": self._study_finished,
            "trial_started": self._trial_started,
            "trial_record": self._trial_record,
            "trial_finished": self._trial_finished,
            "artifact": self._artifact,
        }

    def deliver(self, event: Event) -> None:
        """Raises `Unreachable` or `Refused`."""
        self._open()
        try:
            self._handlers[event["event"]](event)
        except (Refused, Unreachable):
            raise
        except MlflowException as error:
            if error.error_code not in REFUSALS:
                raise Unreachable(f"MLflow does not answer: {_words(error)}") from error
            self._check_experiment()
            raise Refused(f"MLflow refuses {_name(event)}: {_words(error)}") from error
        except (OSError, SQLAlchemyError) as error:
            raise Unreachable(f"MLflow does not answer: {_words(error)}") from error
        except Exception as error:  # one odd event must not stop all others
            raise Refused(f"MLflow does not get {_name(event)}: {_words(error)}") from error

    def _open(self) -> None:
        if self._opened is not None:
            return
        try:
            self._opened = open_study(self._settings, self._lock_dir)
        except Unreachable:
            raise
        except Exception as error:  # whatever it is, no event is at fault
            raise Unreachable(f"MLflow cannot be opened: {_words(error)}") from error
        self._on_parent(self._parent.experiment_id, self._parent.run_id)

    @property
    def _client(self) -> MlflowClient:
        assert self._opened is not None
        return self._opened[0]

    @property
    def _parent(self) -> RunInfo:
        assert self._opened is not None
        return self._opened[1].info

    def _check_experiment(self) -> None:
        """Raises `Unreachable` when the experiment was deleted while we wrote to it."""
        with contextlib.suppress(MlflowException):
            check_active(self._client.get_experiment(self._parent.experiment_id))

    def _study_started(self, event: Event) -> None:
        run = self._client.get_run(self._parent.run_id)
        if not _is_overtaken(run, event):
            self._reopen(run)
            self._log(self._parent.run_id, tags={**event["tags"], STARTED: str(event["at_ms"])})

    def _study_finished(self, event: Event) -> None:
        self._finish(self._parent.run_id, event)  # first, so that nothing keeps the run open
        when, step = event.get("measured_ms", 0), event.get("step", 0)
        metrics = [Metric(name, value, when, step) for name, value in event["metrics"].items()]
        self._log(self._parent.run_id, metrics=metrics)

    def _trial_started(self, event: Event) -> None:
        number = event["number"]
        run = living_run(self._client, self.runs.get(number) or event["run_id"])
        if run is None:  # not known, or gone with its database
            self.runs.pop(number, None)
            run = self._client.get_run(self._run_id(number, event["at_ms"]))
        self.runs[number] = run.info.run_id
        if _is_overtaken(run, event):
            return
        self._reopen(run)
        params, tags = plan_params(event["params"], run.data.params, run.data.tags)
        self._log(run.info.run_id, params=params, tags={**tags, **event["tags"], STARTED: str(event["at_ms"])})
        self._client.log_inputs(run.info.run_id, [_dataset_input(event["dataset"])])

    def _trial_record(self, event: Event) -> None:
        record = event["record"]
        step, timestamp_ms = record["validation"], record["timestamp_ms"]
        metrics = [Metric(name, value, timestamp_ms, step) for name, value in record["metrics"].items()]
        run_id = self._run_id(event["number"], event["at_ms"])
        self._log(run_id, metrics=metrics, tags=nonfinite_tags(record["metrics"], step))

    def _trial_finished(self, event: Event) -> None:
        number = event["number"]
        if event["status"] == "KILLED" and number not in self.runs and self._find_trial(number) is None:
            return  # left before it began: it has no run yet
        self._finish(self._run_id(number, event["at_ms"]), event)

    def _artifact(self, event: Event) -> None:
        """Number None is the study. A file that cannot be stored is given up while MLflow itself answers."""
        number, path, name = event["number"], Path(event["path"]), PurePosixPath(event["name"])
        run_id = self._parent.run_id if number is None else self._run_id(number, event["at_ms"])
        folder = None if name.parent == PurePosixPath(".") else str(name.parent)
        for attempt in range(1, UPLOAD_TRIES + 1):
            try:
                with as_named(path, name.name) as local:
                    self._client.log_artifact(run_id, os.fspath(local), folder)
                break
            except Exception as error:  # each kind of artifact store has its own
                self._client.get_run(run_id)  # raises when MLflow itself is away
                if attempt == UPLOAD_TRIES or not path.exists():
                    where = f"It stays at {path}." if path.exists() else f"There is no {path}."
                    lost = f"MLflow does not get {_name(event)}: {_words(error)} {where}"
                    raise Refused(lost) from error
                time.sleep(0.5 * attempt)

    def _run_id(self, number: int, at_ms: int) -> str:
        """A trial's run. One whose id is not known is looked for by its tags, then created."""
        if number not in self.runs:
            with creation_lock(self._settings.uri, self._lock_dir):
                run = self._find_trial(number) or self._create_trial(number, at_ms)
            self.runs[number] = run.info.run_id
            self._on_run(number, run.info.run_id)
        return self.runs[number]

    def _trial_tags_of(self, number: int) -> dict[str, str]:
        """The parent tells the study from an earlier one of the same name."""
        return {"sweeper.trial": f"{self._settings.study}/{number}", "mlflow.parentRunId": self._parent.run_id}

    def _find_trial(self, number: int) -> Run | None:
        return find_run(self._client, self._parent.experiment_id, self._trial_tags_of(number))

    def _create_trial(self, number: int, at_ms: int) -> Run:
        tags = {**self._trial_tags_of(number), "mlflow.user": user()}
        return self._client.create_run(self._parent.experiment_id, at_ms, tags, run_name=f"trial-{number:04d}")

    def _reopen(self, run: Run) -> None:
        if run.info.status != RunStatus.to_string(RunStatus.RUNNING):
            self._client.update_run(run.info.run_id, status="RUNNING")

    def _finish(self, run_id: str, event: Event) -> None:
        if not _is_overtaken(self._client.get_run(run_id), event):
            self._log(run_id, tags=event["tags"])
            self._client.set_terminated(run_id, event["status"], end_time=event["at_ms"])

    def _log(
        self,
        run_id: str,
        metrics: list[Metric] | None = None,
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        self._client.log_batch(
            run_id,
            metrics or [],
            [Param(name, value) for name, value in (params or {}).items()],
            [RunTag(name, value) for name, value in (tags or {}).items()],
        )


def _is_overtaken(run: Run, event: Event) -> bool:
    """Whether the run was started again since: what a dead worker left may come late."""
    return int(run.data.tags.get(STARTED, 0)) > event["at_ms"]


def _dataset_input(dataset: Mapping[str, Any]) -> DatasetInput:
    shown = {"name", "source", "source_type"}
    described = Dataset(
        name=dataset["name"],
        digest=dataset["digest"][:MAX_DIGEST_LENGTH],
        source_type=dataset["source_type"],
        source=as_text(dataset["source"]),
        profile=json.dumps({name: value for name, value in dataset.items() if name not in shown}),
    )
    return DatasetInput(described, [InputTag("mlflow.data.context", "training")])


def _name(event: Event) -> str:
    whose = "the study" if event.get("number") is None else f"trial {event['number']}"
    what = {"artifact": f"the file {event.get('name')}", "trial_record": "the metrics"}
    return f"{what.get(event['event'], event['event'])} of {whose}"


def _words(error: Exception) -> str:
    text = redact(" ".join(str(error).split()))[:500] or type(error).__name__
    return text if text.endswith(".") else f"{text}."
