"""The story of one trial: suggest -> config -> train -> record -> judge -> report -> stop or prune -> tell.

Everything a trial touches is in its `TrialRoom`. What it decides is decided here, in plain sight.
"""

from __future__ import annotations

import traceback
from typing import Any, Literal

import optuna
from pydantic import ValidationError

from sweeper.attempt import Attempt
from sweeper.errors import CheckpointError, DivergedError, InterruptedNow, LostTrialError, SweeperError
from sweeper.ownership import Renewal
from sweeper.records import StopReason, TrialOutcome
from sweeper.room import LeftEarly, TrialRoom
from sweeper.space import beyond_limits, suggest, trial_config
from sweeper.spec import TrialConfig
from sweeper.training.memory import is_out_of_memory, release_memory
from sweeper.training.stopping import carry_forward
from sweeper.training.trial_folder import TrialFolder
from sweeper.triallog import captured

STATES: dict[StopReason, optuna.trial.TrialState] = {
    "max_epochs": optuna.trial.TrialState.COMPLETE,
    "early_stopped": optuna.trial.TrialState.COMPLETE,
    "time_limit": optuna.trial.TrialState.COMPLETE,
    "pruned": optuna.trial.TrialState.PRUNED,
    "diverged": optuna.trial.TrialState.PRUNED,
    "out_of_memory": optuna.trial.TrialState.PRUNED,
    "outside_limits": optuna.trial.TrialState.PRUNED,
    "failed": optuna.trial.TrialState.FAIL,
}
INFEASIBLE: tuple[StopReason, ...] = ("diverged", "out_of_memory", "outside_limits")


def run_trial(room: TrialRoom, trial: optuna.trial.Trial, attempt: int) -> TrialOutcome | None:
    """Run a trial that this worker owns to its end and tell the study; None when another worker has taken it over.

    Raises `LeftEarly` or `InterruptedNow` after releasing the trial, which then continues as itself.
    """
    number, folder = trial.number, room.folder(trial.number)
    try:
        drawn = suggest(trial, room.spec)
        config = trial_config(room.spec, number, drawn)
    except ValidationError as error:
        return _tell(room, trial, TrialOutcome("failed", error=f"These values exclude each other:\n{error}"), None)
    except InterruptedNow:
        room.claims.release(trial._trial_id)
        raise
    beyond = beyond_limits(room.spec, config)
    if beyond is not None:
        return _tell(room, trial, TrialOutcome("outside_limits", error=beyond), None)
    interval_s = room.spec.workers.grace_period_s / 4
    try:
        with Renewal(room.claims, trial._trial_id, interval_s) as renewal, captured(folder.path / "trial.log"):
            outcome, step = _train_guarded(room, trial, config, folder, renewal, attempt)
            renewal.check()
        return _finish(room, trial, outcome, folder, step)
    except LostTrialError:
        return None
    except (LeftEarly, InterruptedNow):
        if room.claims.release(trial._trial_id):
            room.tracker.trial_finished(number, "KILLED", {"stop_reason": "interrupted"})
        raise


def _train_guarded(
    room: TrialRoom, trial: optuna.trial.Trial, config: TrialConfig, folder: TrialFolder, renewal: Renewal, attempt: int
) -> tuple[TrialOutcome, int]:
    """`Attempt.run`, with every way in which training can fail turned into an outcome.

    Memory is released outside the `except`, because the exception keeps the frames, and they the tensors, alive.
    """
    run = Attempt(room, trial, config, folder, renewal, attempt)
    try:
        outcome = run.run()
    except DivergedError as error:
        outcome = run.outcome("diverged", str(error))
    except CheckpointError as error:
        trial.study.enqueue_trial(trial.params)
        outcome = run.outcome("failed", f"{error}\nIts parameters are enqueued again.")
    except (LostTrialError, LeftEarly):
        raise
    except Exception as error:
        reason: StopReason = "out_of_memory" if is_out_of_memory(error) else "failed"
        text = str(error) if isinstance(error, SweeperError) else traceback.format_exc()
        outcome = run.outcome(reason, text)
    finally:
        run.close()
        release_memory()
    if outcome.error is not None:
        print(outcome.error)
    return outcome, run.next_validation


def _finish(
    room: TrialRoom, trial: optuna.trial.Trial, outcome: TrialOutcome, folder: TrialFolder, step: int
) -> TrialOutcome | None:
    """Hand the last things to tracking, then tell. A kill in between costs nothing: the trial ends once more.

    A trial that stopped early keeps its plateau in Optuna at the steps it did not run.
    """
    forward: dict[int, float] = {}
    if outcome.stop_reason == "early_stopped" and outcome.value is not None:
        total = room.spec.train.max_epochs * room.spec.train.validations_per_epoch
        if "max_epochs" in trial.params:
            total = trial.params["max_epochs"] * room.spec.train.validations_per_epoch
        forward = carry_forward(outcome.value, step, total)
    number = trial.number
    room.tracker.trial_artifact(number, folder.path / "trial.log", "trial.log")
    if folder.best_path.exists():
        room.tracker.trial_artifact(number, folder.best_path, "best/best.pt")
        example = folder.path / "load_best.py"
        example.write_text(LOAD_EXAMPLE.format(study=room.spec.study, number=number), encoding="utf-8")
        room.tracker.trial_artifact(number, example, "best/load_best.py")
    tags = {"stop_reason": outcome.stop_reason, "best_epoch": str(outcome.best_epoch)}
    if outcome.error:
        tags["error"] = outcome.error.strip().splitlines()[-1]
    status: Literal["FAILED", "FINISHED"] = "FAILED" if outcome.stop_reason == "failed" else "FINISHED"
    room.tracker.trial_finished(number, status, tags)
    told = _tell(room, trial, outcome, forward)
    if told is not None:
        folder.finish()
    return told


def _tell(
    room: TrialRoom, trial: optuna.trial.Trial, outcome: TrialOutcome, forward: dict[int, float] | None
) -> TrialOutcome | None:
    attributes: dict[str, Any] = {"stop_reason": outcome.stop_reason}
    if outcome.best_epoch is not None:
        attributes["best_epoch"] = outcome.best_epoch
    if outcome.error is not None:
        attributes["error"] = outcome.error.strip()[-2000:]
    told = room.claims.finish(
        trial._trial_id,
        STATES[outcome.stop_reason],
        None if outcome.stop_reason == "failed" else outcome.value,
        intermediate=forward or {},
        user_attrs=attributes,
        constraints={outcome.stop_reason: 1.0} if outcome.stop_reason in INFEASIBLE else {},
    )
    if not told:
        return None
    room.progress.on_end(trial.number, outcome)
    return outcome


LOAD_EXAMPLE = '''"""Load the best checkpoint of trial {number} of {study}: run this file beside best.pt."""
from pathlib import Path

import torch
from sweeper import load_model

model = load_model(Path(__file__).parent / "best.pt")  # on the CPU, in evaluation mode
info = torch.load(Path(__file__).parent / "best.pt", weights_only=True)["data_info"]
batch = torch.zeros(1, *info["input_shape"])
with torch.inference_mode():
    print(model(batch))
'''
