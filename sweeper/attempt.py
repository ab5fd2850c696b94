"""One attempt at one trial, from nothing or from its last checkpoint: train, record, judge, report, log."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import optuna

from sweeper.data.samples import first_batch
from sweeper.errors import CheckpointError, DatabaseError, StorageError
from sweeper.models import has_batch_norm
from sweeper.ownership import Renewal
from sweeper.pruning import PRUNED_AT, should_prune
from sweeper.quota import keep_within_quota
from sweeper.records import ENDINGS, EpochRecord, StopReason, TrialOutcome
from sweeper.room import LeftEarly, TrialRoom
from sweeper.spec import TrialConfig
from sweeper.storage import optuna_answering
from sweeper.training.checkpoint import best_payload
from sweeper.training.fitting import halved
from sweeper.training.loop import train
from sweeper.training.memory import taken_by_others
from sweeper.training.session import Session, build_session
from sweeper.training.speed import speed_config
from sweeper.training.stall import StallWatch
from sweeper.training.stopping import Judgement, Verdict, carry_forward
from sweeper.training.trial_folder import TrialFolder
from sweeper.trial_params import config_params, dataset_input, resolved_params


class Attempt:
    """One attempt at one trial: from nothing, or from its last checkpoint.

    `note` says what could not be kept. `largest_part` limits the micro-batches, where `too_large` did not fit. After
    running out of memory, `smaller` is the same attempt with half the micro-batch, from the last checkpoint; None when
    there is none that trains as well.
    """

    def __init__(
        self,
        room: TrialRoom,
        trial: optuna.trial.Trial,
        config: TrialConfig,
        folder: TrialFolder,
        renewal: Renewal,
        attempt: int,
    ) -> None:
        self.room, self.trial, self.config, self.folder = room, trial, config, folder
        self.renewal, self.attempt = renewal, attempt
        self.note: str | None = None
        self.largest_part: int | None = None
        self.too_large: int | None = None
        self.smaller: Attempt | None = None
        self.watch = StallWatch(config.train.stall_timeout_s)
        stopping = config.early_stopping
        patience = stopping.resolved_patience(config.num_validations)
        self.judgement = Judgement(config.objective.direction, patience, stopping.min_delta, stopping.min_epochs)
        self.recorded: dict[int, EpochRecord] = {}
        self.reported = set(trial.study._storage.get_trial(trial._trial_id).intermediate_values)
        self.last_asked = max(self.reported, default=-1)
        self.next_validation = 0
        self.checkpoint_lost = False
        self.session: Session | None = None

    def close(self) -> None:
        if self.session is not None:
            self.session.close()
            self.session = None

    def outcome(self, reason: StopReason, error: str | None = None) -> TrialOutcome:
        """The end of the trial with its best value. A trial that would be complete without ever having had a finite
        value has failed: it has nothing to compare."""
        best = self.judgement
        if best.best_value is None and ENDINGS[reason].state == "COMPLETE":
            why = "timeout_s was over" if reason == "time_limit" else f"{self.next_validation} validations were made"
            error = f"There is no finite {self.config.objective.monitor}: {why}."
            return TrialOutcome("failed", error=error, note=self.note)
        return TrialOutcome(reason, best.best_value, best.best_epoch, error, self.note)

    def ran_out_of_memory(self) -> str | None:
        """Before anything is released: look what smaller micro-batch might fit, for `smaller`, and say who else holds
        memory. None fits when the model could not even be built."""
        if self.session is None:
            return None
        size = self.session.windows.micro_batch_size
        half = halved(size, has_batch_norm(self.session.model))
        crowd = taken_by_others(self.session.device)
        if half is not None:
            self.smaller = Attempt(self.room, self.trial, self.config, self.folder, self.renewal, self.attempt)
            self.smaller.note, self.smaller.largest_part = self.note, half
            # What others' memory makes too large may fit tomorrow: that is not remembered.
            self.smaller.too_large = None if crowd else size
        return crowd

    def plateau(self, outcome: TrialOutcome) -> dict[int, float]:
        """What a trial that stopped early is worth at the steps it did not run, so that it stays comparable there."""
        if outcome.stop_reason != "early_stopped" or outcome.value is None:
            return {}
        return carry_forward(outcome.value, self.next_validation, self.config.num_validations)

    def run(self) -> TrialOutcome:
        with self.watch:
            return self._run()

    def _run(self) -> TrialOutcome:
        self.folder.sweep_temporaries()
        self.recorded = {record.validation: record for record in self.folder.records()}
        if PRUNED_AT in self.trial.user_attrs:
            return self._pruned_before()
        state = self._saved_state()
        try:
            saved = state["session"] if state else None
            self.session = build_session(self.config, self.room.load(), saved, self.largest_part)
        except BaseException:  # memory, say: then it is known what the values were
            self._log_start(None)
            raise
        self.session.moved = self.watch.moved
        self._log_start(self.session)
        reason = self._go_on_from(state, self.session) if state else None
        if reason is not None:
            return self.outcome(reason)
        with closing(train(self.session)) as records:
            for record in records:
                self.watch.pause()
                reason = self._take_in(record, self.session)
                if reason is not None:
                    return self.outcome(reason)
                self.watch.moved()
        return self.outcome("time_limit" if self.session.timed_out else "max_epochs")

    def _pruned_before(self) -> TrialOutcome:
        """An earlier attempt was pruned and killed before it could tell. The pruner is not asked twice: some pruners
        note what they were asked, and say something else the second time."""
        for record in self.recorded.values():
            value = record.metrics[self.config.objective.monitor]
            self.judgement.update(value, epoch=record.epoch, validation=record.validation, epochs_complete=0)
        return self.outcome("pruned")

    def _saved_state(self) -> dict[str, Any] | None:
        """The last checkpoint. Raises `CheckpointError` when there must be one and it is gone."""
        state = self.folder.load_last()
        if state is None and self.reported and not self.recorded:
            raise CheckpointError(f"{self.folder.path}: values were reported, but the trial's files are gone")
        if state is None and self.folder.has_saved():
            raise CheckpointError(f"{self.folder.path}: checkpoints were saved, and none is left")
        return state

    def _go_on_from(self, state: dict[str, Any], session: Session) -> StopReason | None:
        """Restore, and send again what a kill may have kept from Optuna and MLflow. What the last record before the
        checkpoint decided is decided again, as it may not have been told."""
        session.load_state_dict(state["session"])
        self.judgement.load_state_dict(state["judgement"])
        past = [record for record in self.recorded.values() if record.epoch < session.epoch]
        for record in past:
            self.room.tracker.trial_record(self.trial.number, record)
        print(f"Attempt {self.attempt} goes on after epoch {session.epoch - 1}.")
        self.next_validation = session.epoch * self.config.train.validations_per_epoch
        verdict = Verdict(**state["verdict"])
        self._report(self.next_validation - 1)
        return self._decide(verdict, self.next_validation - 1)

    def _take_in(self, measured: EpochRecord, session: Session) -> StopReason | None:
        """Record first, then weights, then report, then log; at last decide."""
        record = self._first_measured(measured)
        value = record.metrics[self.config.objective.monitor]
        verdict = self.judgement.update(
            value, epoch=record.epoch, validation=record.validation, epochs_complete=session.epoch
        )
        self.renewal.check()
        if record is measured:
            record = self._with_best(measured)
            self._keep(self.folder.append_record, record)
        if verdict.is_best:
            self._save_best(session, record)
        leaving = record.epoch_complete and self.room.leave_after_epoch()
        if record.epoch_complete and (leaving or session.epoch % self.room.spec.checkpoints.every_epochs == 0):
            self._save(session, verdict)
        self._remember_what_fits(session)
        self._note(keep_within_quota(self.room, self.trial.study))
        self.next_validation = record.validation + 1
        self.renewal.check()  # writing checkpoints may have taken long
        self._report(record.validation)
        self._log(record)
        self.room.progress.on_record(self.config, record, self.judgement)
        reason = self._decide(verdict, record.validation)
        if reason is None and leaving and session.epoch < self.config.train.max_epochs:
            raise LeftEarly
        return reason

    def _first_measured(self, measured: EpochRecord) -> EpochRecord:
        """The record of this validation by an earlier attempt if there is one, so that nothing that was reported or
        logged changes afterwards; a redone value that differs is warned about."""
        earlier = self.recorded.get(measured.validation)
        if earlier is None:
            return measured
        name = self.config.objective.monitor
        before, now = earlier.metrics[name], measured.metrics[name]
        if before != now and not (math.isnan(before) and math.isnan(now)):
            warnings.warn(
                f"epoch {measured.epoch} was redone and {name} is {now!r}; the first time it was {before!r}, "
                "which stays recorded",
                stacklevel=2,
            )
        return earlier

    def _with_best(self, record: EpochRecord) -> EpochRecord:
        best = self.judgement.best_value
        if best is None:
            return record
        return replace(record, metrics={**record.metrics, f"best/{self.config.objective.monitor}": best})

    def _keep(self, save: Callable[..., object], *arguments: Any) -> None:
        """A disk that is full or gone stops no training: the trial goes on without what would not fit, and says so."""
        try:
            save(*arguments)
        except DatabaseError:
            raise
        except StorageError as error:
            self._note(f"went on without checkpoints: {str(error).splitlines()[0]}")

    def _note(self, what: str | None) -> None:
        """Say it with the trial, in its log and at its end; the first of several is enough."""
        if what is not None and self.note is None:
            self.note = what
            warnings.warn(what, stacklevel=2)

    def _remember_what_fits(self, session: Session) -> None:
        if self.too_large is not None:
            session.fitting.remember(session.windows.micro_batch_size, self.too_large)
            self.too_large = None

    def _save_best(self, session: Session, record: EpochRecord) -> None:
        data = session.data.splits.val
        payload = best_payload(
            session.model,
            self.config,
            session.task.info,
            record,
            self.room.spec.study,
            self.room.import_folder,
            first_batch(data, 1)[0],
        )
        self._keep(self.folder.save_best, payload)

    def _save(self, session: Session, verdict: Verdict) -> None:
        state = {
            "session": session.state_dict(),
            "judgement": self.judgement.state_dict(),
            "verdict": asdict(verdict),
        }
        self._keep(self.folder.save_last, state, session.epoch - 1)

    def _report(self, validation: int) -> None:
        """The best value so far, once a validation: then one noisy epoch prunes nobody, and a pruned trial's stored
        value is its best."""
        best = self.judgement.best_value
        if best is not None and validation not in self.reported:
            with optuna_answering(self.room.spec.storage):
                self.trial.report(best, validation)
            self.reported.add(validation)

    def _log(self, record: EpochRecord) -> None:
        self.room.tracker.trial_record(self.trial.number, record)
        self.room.store_run_ids()

    def _decide(self, verdict: Verdict, validation: int) -> StopReason | None:
        """Has this trial finished improving? Else: is it hopeless beside the others? The last validation asks
        neither."""
        if validation + 1 >= self.config.num_validations:
            return None
        if verdict.stop:
            return "early_stopped"
        may_ask = verdict.may_stop and (self.room.spec.pruner.when == "always" or verdict.stalled)
        # Below the last step that an earlier attempt reported the pruner has said "go on", and it looks at that step.
        if not may_ask or validation < self.last_asked:
            return None
        with optuna_answering(self.room.spec.storage):
            return "pruned" if should_prune(self.room.claims, self.trial, validation) else None

    def _log_start(self, session: Session | None) -> None:
        """Everything that determines the trial; without a session, what the file and the draw say."""
        number, tags = self.trial.number, {"attempt": str(self.attempt)}
        params, info = config_params(self.config), self.room.load().info
        files = {"config.json": self.config.model_dump(mode="json")}
        if session is not None:
            speed = speed_config(session.speed, session.device, session.windows)
            if session.windows.parts_per_batch > 1:
                tags["micro_batch_size"] = str(session.windows.micro_batch_size)
            params, info = params | resolved_params(session.device, session.speed.precision, speed), session.task.info
            files["speed_config.json" if self.attempt == 1 else f"speed_config.{self.attempt}.json"] = speed
        for file_name, values in files.items():
            self._keep(_write_json, self.folder.path / file_name, values)
        self.room.tracker.trial_started(
            number,
            self.trial.user_attrs.get("mlflow_run_id"),
            params=params,
            tags=tags,
            dataset=dataset_input(self.config, info),
            artifacts=[(path, path.name) for path in map(self.folder.path.joinpath, files) if path.exists()],
        )


def _write_json(path: Path, values: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}.\n  Check `checkpoints.dir`.") from error
