"""One worker's day: take over a stale trial or take a new slot, run it, tell; until the budget is used up."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import optuna
from optuna.exceptions import StorageInternalError
from optuna.trial import Trial, TrialState

from sweeper.errors import LostTrialError, SweeperError, TooManyFailuresError
from sweeper.ownership import StaleTrial
from sweeper.records import ENDINGS, TrialOutcome
from sweeper.room import LeftEarly, TrialRoom
from sweeper.storage import optuna_answering
from sweeper.study.opening import OpenStudy
from sweeper.study.samplers import grid_is_run, make_sampler
from sweeper.trial import run_trial

MOST_OUTSIDE_LIMITS_IN_A_ROW = 100
SAME_ERRORS_AT_THE_START = 3


@dataclass
class Worker:
    """Works on one study until nothing is left to do; then `why_over` says which end of the budget it was, `num_run`
    how many trials it had in hand. `failures_before` counts the FAILs of earlier runs."""

    opened: OpenStudy
    room: TrialRoom
    leaving: Callable[[], bool]
    failures_before: int = 0
    outside_in_a_row: int = 0
    first_errors: list[str | None] = field(default_factory=list)
    num_run: int = 0
    why_over: str | None = None
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.failures_before = self.room.claims.num_failed()

    def work(self) -> None:
        """Raises `TooManyFailuresError` (exit 3), `SweeperError` when every draw is outside the limits, and
        `InterruptedNow`; the trial in hand is then released."""
        try:
            with optuna_answering(self.room.spec.storage):
                while not self.leaving() and self._next_trial():
                    pass
        except LeftEarly:
            pass
        finally:
            with contextlib.suppress(StorageInternalError):  # what is raised already says it
                self._book_time()

    def _next_trial(self) -> bool:
        """Run one trial; False when there is none to run."""
        for stale in self.room.claims.stale(self.room.spec.workers.grace_period_s):
            if self.room.claims.take_over(stale):
                with contextlib.suppress(LostTrialError):  # taken from us in turn, while we were away
                    self._resume(stale)
                return True
        self.why_over = self._budget_is_over()
        if self.why_over is not None:
            return False
        trial_id = self.room.claims.claim_new(self.room.spec.storage, self.room.spec.budget.trials)
        if trial_id is None:
            self.why_over = "the trials of the budget are done"
            return False
        self._run(self._attach(trial_id), attempt=1)
        return True

    def _attach(self, trial_id: int) -> Trial:
        """Optuna's view of a trial that this worker owns, with the sampler seeded for its number."""
        study = self.opened.study
        # As `study.ask` does: what was cached belongs to the trial before.
        study._thread_local.cached_all_trials = None
        number = study._storage.get_trial_number_from_id(trial_id)
        study.sampler = make_sampler(self.room.spec, number)
        return Trial(study, trial_id)

    def _run(self, trial: Trial, attempt: int) -> None:
        self.num_run += 1
        outcome = run_trial(self.room, trial, attempt)
        self.room.store_run_ids()
        self._book_time()
        if outcome is not None:
            self._stop_if_hopeless(trial.number, outcome)

    def _resume(self, stale: StaleTrial) -> None:
        """Go on with a trial whose worker died or left. One that keeps killing its workers without getting any
        further ends FAIL."""
        trial = self._attach(stale.trial_id)
        claims, attributes = self.room.claims, trial.user_attrs
        attempt = attributes.get("attempt", 1) + 1
        reached = self.room.folder(trial.number).last_epoch()
        no_further = attributes.get("resumed_from") == reached
        deaths = attributes.get("deaths", 0) + (stale.reason != "released") if no_further else 0
        claims.set_attrs(stale.trial_id, {"attempt": attempt, "resumed_from": reached, "deaths": deaths})
        if deaths >= self.room.spec.workers.max_attempts:
            error = f"Its workers died {deaths} times without a new checkpoint."
            attrs = {"stop_reason": "failed", "error": error}
            if not claims.finish(stale.trial_id, TrialState.FAIL, None, user_attrs=attrs):
                return
            self.room.folder(trial.number).sweep_temporaries()
            self.room.tracker.trial_finished(trial.number, "FAILED", {"stop_reason": "failed", "error": error})
            self.room.progress.on_end(trial.number, TrialOutcome("failed", error=error))
            self._stop_if_hopeless(trial.number, TrialOutcome("failed", error=error))
            return
        self._run(trial, attempt)

    def _stop_if_hopeless(self, number: int, outcome: TrialOutcome) -> None:
        self.outside_in_a_row = self.outside_in_a_row + 1 if outcome.stop_reason == "outside_limits" else 0
        if self.outside_in_a_row >= MOST_OUTSIDE_LIMITS_IN_A_ROW:
            raise SweeperError(
                f"{self.outside_in_a_row} draws in a row were outside `limits`; the last: {outcome.error}\n"
                "  Widen the limits or narrow the search space, so that they overlap."
            )
        todo = f"  `sweep logs STUDY.yaml {number}` shows the whole error; mend it and run again."
        failures = self.room.claims.num_failed() - self.failures_before
        if failures > self.room.spec.budget.max_failures:
            raise TooManyFailuresError(
                f"Stopped: {failures} trial{'s' * (failures > 1)} failed, more than budget.max_failures "
                f"({self.room.spec.budget.max_failures}). "
                f"The last one: {outcome.summary or 'no message'}\n{todo}"
            )
        if self._fails_from_the_start(outcome):
            raise TooManyFailuresError(
                f"Stopped: the first {SAME_ERRORS_AT_THE_START} trials all failed with the same error: "
                f"{outcome.summary}\n{todo}"
            )

    def _fails_from_the_start(self, outcome: TrialOutcome) -> bool:
        """Whether this was the last of the first few trials and all failed alike: no other draw would do better."""
        if len(self.first_errors) == SAME_ERRORS_AT_THE_START:
            return False
        self.first_errors.append(_kind_of_error(outcome))
        alike = len(set(self.first_errors)) == 1 and None not in self.first_errors
        return alike and len(self.first_errors) == SAME_ERRORS_AT_THE_START

    def _budget_is_over(self) -> str | None:
        """What ends the study now, other than the number of its trials."""
        budget = self.room.spec.budget
        if grid_is_run(self.room.spec, self.opened.study):
            return "every point of the grid has been run"
        if budget.hours is not None and self._worked_s() >= budget.hours * 3600:
            return f"budget.hours ({budget.hours:g}) are used up"
        if budget.target is None and budget.patience_trials is None:
            return None
        done = [t for t in self.opened.study.get_trials(deepcopy=False) if counts(t)]
        best = best_number(self.opened.study)
        if best is None:
            return None
        best_value = self.opened.study.best_value
        if budget.target is not None and best_value is not None:
            minimize = self.room.spec.objective.direction == "minimize"
            if best_value <= budget.target if minimize else best_value >= budget.target:
                return f"budget.target ({budget.target:g}) is reached"
        if budget.patience_trials is not None and sum(t.number > best for t in done) >= budget.patience_trials:
            return f"{budget.patience_trials} trials brought nothing better (budget.patience_trials)"
        return None

    def _book_time(self) -> None:
        """Keep this worker's wall time in the study; each worker has its own entry, so none overwrites another's."""
        if self.room.spec.budget.hours is not None:
            key = f"sweeper:worked_s:{self.room.claims.owner.token}"
            self.opened.study.set_user_attr(key, time.monotonic() - self.started)

    def _worked_s(self) -> float:
        """Wall time of all workers, over all restarts. The database is asked: others' entries count too."""
        self._book_time()
        attributes = self.opened.study.user_attrs
        return sum(value for key, value in attributes.items() if key.startswith("sweeper:worked_s:"))


def _kind_of_error(outcome: TrialOutcome) -> str | None:
    """A failed trial's error without its numbers (shapes, values drawn); None for any other end."""
    return re.sub(r"[\d.]+", "#", outcome.summary) if outcome.stop_reason == "failed" else None


def counts(trial: optuna.trial.FrozenTrial) -> bool:
    """Whether a trial has ended in a way that uses up the budget."""
    ending = ENDINGS.get(trial.user_attrs.get("stop_reason", ""))
    return trial.state in (TrialState.COMPLETE, TrialState.PRUNED) and (ending is None or ending.counts)


def best_number(study: optuna.Study) -> int | None:
    """The number of the best complete and feasible trial; None before there is one."""
    try:
        return study.best_trial.number
    except ValueError:
        return None
