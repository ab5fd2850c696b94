"""Kill a study again and again, then compare it row by row with one that was left alone.

Each life is a process of its own, forked from this one so that nothing is imported anew, in which the command line runs
`sweep run study.yaml`. It dies by SIGKILL: at a moment drawn from the seed, or right before or after the n-th call of a
named function; alone, or together with the process that writes to MLflow.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import sqlite3
import time
import traceback
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import psutil
import torch

import sweeper.study.opening
import sweeper.training.trial_folder
from sweeper.cli import main
from sweeper.ownership import Claims
from sweeper.tracking import Tracker
from sweeper.training.trial_folder import TrialFolder, open_checkpoint

STUDY = """\
study: chaos
objective: {{monitor: val_accuracy, direction: maximize}}
data: {{source: digits, val_fraction: 0.2, augment: [{{random_crop: {{padding: 1}}}}]}}
model: {{name: cnn, params: {{width: 4, dropout: 0.1}}}}
train: {{max_epochs: {epochs}, batch_size: 128, scheduler: {{name: cosine}}}}
search_space:
  lr: {{low: 1e-3, high: 1e-1, log: true}}
  optimizer: {{choices: [sgd, adamw]}}
  momentum: {{low: 0.0, high: 0.95, when: {{optimizer: sgd}}}}
sampler: {{name: tpe, params: {{n_startup_trials: 3}}}}
budget: {{trials: {trials}}}
workers: {{threads: 1, max_attempts: 1000}}
"""
PATIENCE_S = 8.0
# What is measured anew each time, or says how often a trial was begun.
TIMINGS = ("speed/", "memory/", "system/")

STARTING: list[tuple[Any, str, str, int]] = [
    (optuna, "create_study", "after", 1),
    (sweeper.study.opening, "_write_facts", "before", 1),
    (optuna.Study, "set_user_attr", "after", 2),
    (optuna.Study, "set_user_attr", "after", 3),
]
"""Of the first lives: while the study is created. A point is an owner, a name, when, and up to which call it may be."""

POINTS: list[tuple[Any, str, str, int]] = [
    (Tracker, "start", "after", 1),
    (Tracker, "study_started", "after", 1),
    (Claims, "create", "before", 2),
    (Claims, "create", "after", 2),
    (Claims, "take_over", "after", 1),
    (Claims, "set_attrs", "after", 1),
    (optuna.Trial, "suggest_float", "after", 2),
    (Tracker, "trial_started", "after", 2),
    (TrialFolder, "append_record", "after", 3),
    (TrialFolder, "save_best", "after", 3),
    (sweeper.training.trial_folder, "_torch_save", "after", 4),
    (os, "replace", "before", 6),
    (os, "replace", "after", 6),
    (TrialFolder, "save_last", "after", 3),
    (optuna.Trial, "report", "before", 3),
    (optuna.Trial, "report", "after", 3),
    (Tracker, "trial_finished", "before", 1),
    (Tracker, "trial_finished", "after", 1),
    (Claims, "finish", "after", 1),
]


@dataclass(frozen=True)
class Death:
    """When and how a life ends: at the `count`-th call of `point`, and after `delay_s` from the start if that does not
    come. `tree`: the writer to MLflow dies too."""

    point: tuple[Any, str, str, int] | None
    count: int
    delay_s: float
    tree: bool

    def __str__(self) -> str:
        who = "the whole tree" if self.tree else "the worker"
        if self.point is None:
            return f"{who} after {self.delay_s:.2f} s"
        owner, name, when, _ = self.point
        return f"{who} {when} call {self.count} of {getattr(owner, '__name__', owner)}.{name}"


def deaths(seed: int, num_kills: int, num_at_points: int) -> list[Death]:
    """The same for the same seed. The named points come in turn, those of a study's creation first."""
    rng = random.Random(seed)
    points = itertools.chain(STARTING, itertools.cycle(rng.sample(POINTS, len(POINTS))))
    num_starting = min(len(STARTING), num_at_points)
    kinds = [True] * (num_at_points - num_starting) + [False] * (num_kills - num_at_points)
    rng.shuffle(kinds)
    found = []
    for at_point in [True] * num_starting + kinds:
        point = next(points) if at_point else None
        count = rng.randint(1, point[3]) if point and point not in STARTING else point[3] if point else 0
        delay_s = PATIENCE_S if at_point else rng.uniform(0.05, 3.0)
        found.append(Death(point, count, delay_s, rng.random() < 0.5))
    return found


@dataclass
class Life:
    """How one `sweep run` went. `killed`: it was, `at_point` or otherwise; else it ended by itself with `code`."""

    killed: bool
    at_point: bool
    code: int
    seconds: float


def live(folder: Path, death: Death | None) -> Life:
    """One `sweep run` in `folder`, killed as `death` says."""
    began = time.monotonic()
    pid = os.fork()
    if not pid:
        _run(folder, death)
    in_time = death is None or _ends_within(pid, death.delay_s)
    if death is not None and not in_time:
        _kill(pid, death.tree)
    _, status = os.waitpid(pid, 0)
    killed = os.WIFSIGNALED(status)
    if killed and death is not None and death.tree:
        _kill_writer(pid)  # after a death at a point, which the worker died alone
    code = -1 if killed else os.WEXITSTATUS(status)
    return Life(killed, killed and in_time, code, time.monotonic() - began)


def _ends_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return True
        time.sleep(0.002)
    return False


def _run(folder: Path, death: Death | None) -> None:
    code = 70
    try:
        os.setsid()
        os.chdir(folder)
        output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        torch.set_num_threads(1)
        if death is not None and death.point is not None:
            _die_at(*death.point[:3], death.count)
        main(["run", "study.yaml"], standalone_mode=False)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 71
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _die_at(owner: Any, name: str, when: str, count: int) -> None:
    original, calls = getattr(owner, name), itertools.count(1)

    def dying(*arguments: Any, **keywords: Any) -> Any:
        now = next(calls) == count
        if now and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **keywords)
        if now:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, dying)


def _kill(pid: int, tree: bool) -> None:
    writers = _writers(pid) if tree else []
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    for writer in writers:
        with contextlib.suppress(psutil.NoSuchProcess):
            writer.kill()


def _writers(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def _kill_writer(pid: int) -> None:
    """The writer has a session of its own: it is known by the spool in its command line, whose name holds the pid."""
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "sweeper.tracking.writer" in command and f"-{pid}-" in command[-1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


# ---- comparison


def differences(whole: Path, killed: Path) -> list[str]:
    """Everything that is not the same in the two studies, as sentences; none if the kills changed nothing."""
    found = []
    for what, look in (("Optuna", optuna_rows), ("MLflow", mlflow_rows), ("disk", disk_rows)):
        expected, actual = dict(look(whole)), dict(look(killed))
        for key in sorted(expected.keys() | actual.keys()):
            before, after = expected.get(key, "nothing"), actual.get(key, "nothing")
            if before != after:
                found.append(f"{what}: {key} is {after!r}, and {before!r} where nothing was killed")
    return found


def optuna_rows(folder: Path) -> Iterator[tuple[str, Any]]:
    study = optuna.load_study(study_name="chaos", storage=f"sqlite:///{folder}/mlruns/optuna.db")
    for trial in study.trials:
        facts = {
            "state": trial.state.name,
            "params": trial.params,
            "value": trial.value,
            "reports": trial.intermediate_values,
            "stop_reason": trial.user_attrs.get("stop_reason"),
            "best_epoch": trial.user_attrs.get("best_epoch"),
            "error": trial.user_attrs.get("error"),
        }
        for name, value in facts.items():
            yield f"trial {trial.number} {name}", value


def mlflow_rows(folder: Path) -> Iterator[tuple[str, Any]]:
    """Every run by its name (two of one name are a difference), its params and every value of every metric."""
    with closing(sqlite3.connect(f"file:{folder}/mlruns/mlflow.db?mode=ro", uri=True)) as database:
        runs = database.execute("SELECT run_uuid, name, status FROM runs ORDER BY name").fetchall()
        yield "runs", [name for _, name, _ in runs]
        for run, name, status in runs:
            yield f"{name} status", status
            for key, value in database.execute("SELECT key, value FROM params WHERE run_uuid = ?", (run,)):
                yield f"{name} param {key}", value
            metrics: dict[str, list[Any]] = {}
            query = "SELECT key, step, value, is_nan FROM metrics WHERE run_uuid = ? ORDER BY key, step, timestamp"
            for key, step, value, is_nan in database.execute(query, (run,)):
                metrics.setdefault(key, []).append((step, "nan" if is_nan else value))
            for key, values in metrics.items():
                timing = key.startswith(TIMINGS)
                yield f"{name} metric {key}", [step for step, _ in values] if timing else values


def disk_rows(folder: Path) -> Iterator[tuple[str, Any]]:
    (checkpoints,) = (folder / "mlruns/checkpoints").glob("chaos-*")
    yield "trials", sorted(path.name for path in checkpoints.iterdir())
    for trial in sorted(checkpoints.iterdir()):
        names = sorted(path.name for path in trial.iterdir())
        yield f"{trial.name} files", [name for name in names if not name.startswith("speed_config.")]
        for line in (trial / "records.jsonl").read_text().splitlines():
            record = json.loads(line)
            kept = {key: value for key, value in record["metrics"].items() if not key.startswith(TIMINGS)}
            yield f"{trial.name} validation {record['validation']}", repr(sorted(kept.items()))
        for file in trial.glob("*.pt"):
            yield f"{trial.name} {file.name}", _digest(open_checkpoint(file))
    yield "spool", sorted(path.name for path in (folder / "mlruns/spool").rglob("*") if path.suffix == ".jsonl")


def _digest(value: Any) -> Any:
    """Bits of tensors, values of everything else; without times and places."""
    if isinstance(value, dict):
        skipped = ("elapsed_s", "import_folder", "study")
        return {key: _digest(item) for key, item in value.items() if key not in skipped}
    if isinstance(value, list | tuple):
        return [_digest(item) for item in value]
    if isinstance(value, torch.Tensor):
        return (
            [str(value.dtype), list(value.shape), hash(value.contiguous().view(torch.uint8).numpy().tobytes())]
            if value.ndim
            else repr(value.item())
        )
    return repr(value)
