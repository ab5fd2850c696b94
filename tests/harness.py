"""Run a study in this process, on a real database, with tracking that only remembers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna

from builders import PLAIN_SGD, make_spec
from sweeper.data import load_data
from sweeper.errors import InterruptedNow
from sweeper.imports import add_import_folder
from sweeper.ownership import Claims, Owner
from sweeper.records import EpochRecord
from sweeper.room import Progress, TrialRoom
from sweeper.spec import StudySpec
from sweeper.study.opening import open_study
from sweeper.study.worker import Worker


@dataclass
class Remembered:
    """Stands where the tracker does, and keeps what it was given. MLflow itself is tested in `test_tracking.py` and
    `test_commands.py`."""

    records: dict[int, list[EpochRecord]] = field(default_factory=dict)
    finished: dict[int, tuple[str, dict[str, str]]] = field(default_factory=dict)
    started: dict[int, dict[str, Any]] = field(default_factory=dict)

    def trial_started(self, number: int, run_id: str | None, **details: Any) -> None:
        self.started[number] = details

    def trial_record(self, number: int, record: EpochRecord) -> None:
        self.records.setdefault(number, []).append(record)

    def trial_artifact(self, number: int, path: Path, name: str) -> None:
        assert path.exists(), path

    def trial_finished(self, number: int, status: str, tags: dict[str, str]) -> None:
        self.finished[number] = (status, tags)

    def new_run_ids(self) -> dict[int, str]:
        return {}


@dataclass
class Ran:
    """What a run left: the study as plain Optuna reads it, and what tracking was given."""

    study: optuna.Study
    tracker: Remembered
    folder: Path
    why_over: str | None

    @property
    def trials(self) -> list[optuna.trial.FrozenTrial]:
        return self.study.get_trials()

    def states(self) -> list[str]:
        return [trial.state.name for trial in self.trials]

    def reasons(self) -> list[str | None]:
        return [trial.user_attrs.get("stop_reason") for trial in self.trials]

    def on_disk(self, number: int) -> list[str]:
        """The checkpoints of a trial."""
        return sorted(path.name for path in (self.folder / f"trial-{number:04d}").glob("*.pt"))


def run_spec(
    spec: StudySpec,
    folder: Path,
    leave: Callable[[], bool] = lambda: False,
    tracker: Remembered | None = None,
    after_record: Callable[[], bool] = lambda: False,
) -> Ran:
    """Work on `spec` until its budget is used up, in `folder`; or until `after_record`, asked after each validation,
    is true: then the worker leaves at once, as after SIGTERM."""
    add_import_folder(Path(__file__).parent)
    spec = spec.model_copy(update={"storage": f"sqlite:///{folder}/optuna.db"})
    opened = open_study(spec)
    tracker = tracker or Remembered()

    def on_record(*_: Any) -> None:
        if after_record():
            raise InterruptedNow("SIGTERM")

    data = load_data(spec.data)
    room = TrialRoom(
        spec=spec,
        import_folder=Path(__file__).parent,
        claims=Claims(opened.study._storage, opened.study._study_id, Owner.current()),
        tracker=tracker,  # type: ignore[arg-type]
        load=lambda: data,
        checkpoints=folder / "checkpoints",
        leave_after_epoch=leave,
        progress=Progress(on_record),
    )
    worker = Worker(opened, room, leaving=leave)
    with contextlib.suppress(InterruptedNow):
        worker.work()
    study = optuna.load_study(study_name=spec.study, storage=spec.storage)
    return Ran(study, tracker, folder / "checkpoints", worker.why_over)


def listed_spec(series: Sequence[Sequence[float]], direction: str = "minimize", **sections: Any) -> StudySpec:
    """A study of one trial per series, whose validation losses are the series; nothing is really trained."""
    rows = list(range(len(series)))
    train = {**PLAIN_SGD, "lr": 1e-9, "max_epochs": max(map(len, series)), **sections.pop("train", {})}
    return make_spec(
        objective={"monitor": "val_loss", "direction": direction},
        data={"source": "toys:listed_data"},
        model={"name": "toys:listed_model", "params": {"series": [list(values) for values in series]}},
        task={"name": "toys:ListedTask"},
        train=train,
        search_space={"model.params.row": {"choices": rows}, **sections.pop("search_space", {})},
        enqueue=sections.pop("enqueue", [{"model.params.row": row} for row in rows]),
        budget={"trials": len(rows), **sections.pop("budget", {})},
        early_stopping={"patience": 100, **sections.pop("early_stopping", {})},
        pruner={"name": "none", **sections.pop("pruner", {})},
        **sections,
    )
