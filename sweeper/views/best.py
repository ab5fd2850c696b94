"""`sweep best`: the winning values, ready to paste into the study file."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial
from ruamel.yaml import YAML

from sweeper.errors import SweeperError
from sweeper.space import trial_config
from sweeper.spec import SCHEDULER_KEYS
from sweeper.views.reading import StoredStudy
from sweeper.views.status import best_json


def best_of(stored: StoredStudy) -> FrozenTrial:
    """Raises `SweeperError` when no trial is complete."""
    best = stored.best
    if best is None:
        counts = f"{len(stored.trials)} trials, none of them complete and feasible"
        raise SweeperError(f"The study {stored.spec.study!r} has no best trial yet: {counts}")
    return best


def best_as_json(stored: StoredStudy) -> dict[str, Any]:
    """The contract of `sweep best --json`. `checkpoint` is null when its file has been removed."""
    best = best_of(stored)
    checkpoint = best_checkpoint(stored, best)
    return {
        **best_json(best),
        "mlflow_run_id": best.user_attrs.get("mlflow_run_id"),
        "checkpoint": str(checkpoint) if checkpoint.exists() else None,
    }


def best_checkpoint(stored: StoredStudy, trial: FrozenTrial) -> Path:
    """Where the trial's best weights were written."""
    return (stored.folder(trial.number) / "best.pt").absolute()


def where_to_load(stored: StoredStudy, trial: FrozenTrial) -> list[str]:
    """Two lines on the trial's best weights: where they are, or were, and how to load them."""
    path = best_checkpoint(stored, trial)
    if path.exists():
        return [f"checkpoint: {path}", f"load it:    sweeper.load_model({str(path)!r})"]
    run_id = trial.user_attrs.get("mlflow_run_id")
    return [f"checkpoint: {path} has been removed", f"MLflow keeps a copy: run {run_id}, artifact best/best.pt"]


def sections_to_paste(stored: StoredStudy, trial: FrozenTrial) -> str:
    """Complete `train:` and `model:` sections (and `task:` where it was searched) with the trial's values."""
    config = trial_config(stored.spec, trial.number, trial.params)
    train = config.train.model_dump(mode="json")
    scheduler = train["scheduler"]
    used = ("name", "warmup_epochs", "warmup_steps", *SCHEDULER_KEYS[scheduler["name"]])
    train["scheduler"] = {key: scheduler[key] for key in used}
    sections: dict[str, Any] = {"train": train, "model": config.model.model_dump(mode="json")}
    if any(name.startswith("task.") for name in trial.params):
        sections["task"] = config.task.model_dump(mode="json")
    text = io.StringIO()
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.representer.add_representer(float, _plain_float)
    yaml.representer.add_representer(type(None), _plain_null)
    yaml.dump(sections, text)
    return text.getvalue()


def _plain_null(representer: Any, _: None) -> Any:
    return representer.represent_scalar("tag:yaml.org,2002:null", "null")


def _plain_float(representer: Any, value: float) -> Any:
    # repr is the shortest text that reads back as the same number; YAML 1.2 takes its exponents as they are.
    return representer.represent_scalar("tag:yaml.org,2002:float", repr(value))
