"""The story of one trial: suggest -> config -> train -> record -> judge -> report -> stop or prune -> tell.

Everything a trial touches is in its `TrialRoom`. What it decides is decided here, in plain sight.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from typing import Any, Literal

import optuna
from pydantic import ValidationError

from sweeper.attempt import Attempt
from sweeper.errors import (
    CheckpointError,
    DatabaseError,
    DivergedError,
    InterruptedNow,
    LostTrialError,
    SweeperError,
)
from sweeper.owner import this_process_only
from sweeper.ownership import Renewal, storage_lock
from sweeper.records import ENDINGS, StopReason, TrialOutcome
from sweeper.room import LeftEarly, TrialRoom
from sweeper.space import beyond_limits, suggest, trial_config
from sweeper.spec import TrialConfig
from sweeper.training.memory import is_out_of_memory, release_memory
from sweeper.training.trial_folder import TrialFolder
from sweeper.triallog import captured

# A signal to all processes may end a loader worker a moment before it interrupts this one.
SIGNAL_ARRIVES_S = 1.0


def run_trial(room: TrialRoom, trial: optuna.trial.Trial, attempt: int) -> TrialOutcome | None:
    """Run a trial that this worker owns to its end and tell the study; None when another worker has taken it over.

    Whatever else is raised, a signal or a database that does not answer, the trial is released first and continues
    as itself.
    """
    try:
        config, outcome = _drawn(room, trial)
        if config is None:
            assert outcome is not None
            return _tell(room, trial, outcome, attempt)
        return _trained(room, trial, config, attempt)
    except LostTrialError:
        return None
    except BaseException:
        _release(room, trial)
        raise


def _release(room: TrialRoom, trial: optuna.trial.Trial) -> None:
    with contextlib.suppress(DatabaseError):  # then the owner's death frees it
        if room.claims.release(trial._trial_id):
            room.tracker.trial_finished(trial.number, "KILLED", {"stop_reason": "interrupted"})


def _drawn(room: TrialRoom, trial: optuna.trial.Trial) -> tuple[TrialConfig | None, TrialOutcome | None]:
    """The trial's values, or why there are none to train with."""
    try:
        config = trial_config(room.spec, trial.number, suggest(trial, room.spec))
    except ValidationError as error:
        return None, TrialOutcome("failed", error=f"These values exclude each other:\n{error}")
    except optuna.exceptions.StorageInternalError as error:
        raise DatabaseError(f"{room.spec.storage}: the database does not answer: {error}") from error
    except Exception:  # the sampler's, at some point that the rehearsal did not reach
        return None, TrialOutcome("failed", error=traceback.format_exc())
    beyond = beyond_limits(room.spec, config)
    return (config, None) if beyond is None else (None, TrialOutcome("outside_limits", error=beyond))


def _trained(room: TrialRoom, trial: optuna.trial.Trial, config: TrialConfig, attempt: int) -> TrialOutcome | None:
    folder, interval_s = room.folder(trial.number), room.spec.workers.grace_period_s / 4
    with Renewal(room.claims, trial._trial_id, interval_s) as renewal:
        run = Attempt(room, trial, config, folder, renewal, attempt)
        with captured(folder.path / "trial.log"):
            outcome = _guarded(run)
            while outcome.stop_reason == "out_of_memory" and run.smaller is not None:
                run = run.smaller
                outcome = _guarded(run)
            if outcome.error is not None:
                print(outcome.error)
        renewal.check()
    _hand_over(room, trial.number, outcome, folder)
    told = _tell(room, trial, outcome, attempt, run.plateau(outcome))
    if told is not None:
        folder.finish()
        if run.checkpoint_lost:
            with storage_lock(room.spec.storage):
                trial.study.enqueue_trial(trial.params)
    return told


def _guarded(run: Attempt) -> TrialOutcome:
    """`Attempt.run`, with every way in which training can fail turned into an outcome.

    Memory is released outside the `except`, because the exception keeps the frames, and they the tensors, alive.
    """
    try:
        with this_process_only():
            return run.run()
    except DivergedError as error:
        return run.outcome("diverged", str(error))
    except CheckpointError as error:
        run.checkpoint_lost = True
        return run.outcome("failed", f"{error}\nIts parameters are enqueued again.")
    except (LostTrialError, LeftEarly, DatabaseError, optuna.exceptions.StorageInternalError, InterruptedNow):
        raise
    except BaseException as error:  # `sys.exit()` in the user's code ends its trial, not the study
        if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker"):
            time.sleep(SIGNAL_ARRIVES_S)
        reason: StopReason = "out_of_memory" if is_out_of_memory(error) else "failed"
        text = str(error) if isinstance(error, SweeperError) else traceback.format_exc()
        hint = run.ran_out_of_memory() if reason == "out_of_memory" else _hint(text)
        text = text if hint is None else f"{text.rstrip()}\n{hint}"
        return run.outcome(reason, text.encode("utf-8", "backslashreplace").decode())
    finally:
        run.close()
        release_memory()


def _hint(text: str) -> str | None:
    """What an error that users meet often means, for those who cannot know."""
    if "Bus error" in text or "shared memory" in text:
        return (
            "Loader workers hand their batches over in shared memory (/dev/shm), and it is full: write"
            " `speed: {num_workers: 0}` or fewer, or give the container more (docker run --shm-size=8g)."
        )
    return None


def _hand_over(room: TrialRoom, number: int, outcome: TrialOutcome, folder: TrialFolder) -> None:
    """Give tracking the last things, before the result is told: a kill in between costs nothing, the trial just ends
    once more."""
    if (folder.path / "trial.log").exists():
        room.tracker.trial_artifact(number, folder.path / "trial.log", "trial.log")
    if folder.best_path.exists():
        room.tracker.trial_artifact(number, folder.best_path, "best/best.pt")
        example = folder.path / "load_best.py"
        with contextlib.suppress(OSError):  # a full disk: the checkpoint matters, not its example
            example.write_text(LOAD_EXAMPLE.format(study=room.spec.study, number=number), encoding="utf-8")
            room.tracker.trial_artifact(number, example, "best/load_best.py")
    tags = {"stop_reason": outcome.stop_reason, "best_epoch": str(outcome.best_epoch)}
    if outcome.summary:
        tags["error"] = outcome.summary
    if outcome.note is not None:
        tags["note"] = outcome.note
    status: Literal["FAILED", "FINISHED"] = "FAILED" if ENDINGS[outcome.stop_reason].state == "FAIL" else "FINISHED"
    room.tracker.trial_finished(number, status, tags)


def _tell(
    room: TrialRoom,
    trial: optuna.trial.Trial,
    outcome: TrialOutcome,
    attempt: int,
    plateau: dict[int, float] | None = None,
) -> TrialOutcome | None:
    """The fenced tell. `plateau` are reports of steps that the trial did not run. None when the trial was lost."""
    attributes: dict[str, Any] = {"stop_reason": outcome.stop_reason, "attempt": attempt}
    if outcome.note is not None:
        attributes["note"] = outcome.note
    if outcome.best_epoch is not None:
        attributes["best_epoch"] = outcome.best_epoch
    if outcome.error is not None:
        attributes["error"] = _shortened(outcome.error.strip())
    ending = ENDINGS[outcome.stop_reason]
    told = room.claims.finish(
        trial._trial_id,
        optuna.trial.TrialState[ending.state],
        None if ending.state == "FAIL" else outcome.value,
        intermediate=plateau or {},
        user_attrs=attributes,
        constraints={} if ending.feasible else {outcome.stop_reason: 1.0},
    )
    if not told:
        return None
    room.progress.on_end(trial.number, outcome)
    return outcome


def _shortened(error: str) -> str:
    """Its last lines, as many as a database is glad to keep; the trial's log has it whole."""
    if len(error) <= LONGEST_ERROR:
        return error
    return f"...\n{error[-LONGEST_ERROR:].partition(chr(10))[2]}"


LONGEST_ERROR = 2000
LOAD_EXAMPLE = '''"""Load the best checkpoint of trial {number} of {study}: run this file beside best.pt."""
from pathlib import Path

import torch
from sweeper import load_model

best = torch.load(Path(__file__).parent / "best.pt", weights_only=True)
model = load_model(Path(__file__).parent / "best.pt")  # on the CPU, in evaluation mode
print("inputs:", best["data_info"]["input_scale"] or "as the data function gives them")
with torch.inference_mode():
    print(best["data_info"]["class_names"], model(best["example_input"]))  # the first validation sample
'''
