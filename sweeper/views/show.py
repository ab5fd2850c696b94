"""`sweep show TRIAL` and `sweep logs TRIAL`: one trial from its records and its log."""

from __future__ import annotations

import json
from typing import Any

from sweeper.errors import SweeperError
from sweeper.views.reading import StoredStudy


def records(stored: StoredStudy, number: int) -> list[dict[str, Any]]:
    """The metrics of each validation, as recorded; a torn last line of a running trial is left out."""
    path = stored.folder(number) / "records.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    try:
        return [json.loads(line) for line in lines]
    except ValueError:
        raise SweeperError(f"{path.absolute()} is damaged\n  Trial {number}'s validations cannot be shown.") from None


def show_json(stored: StoredStudy, number: int) -> dict[str, Any]:
    trial = stored.trial(number)
    return {
        "trial": number,
        "state": stored.state(trial),
        "stop_reason": trial.user_attrs.get("stop_reason"),
        "value": trial.value,
        "best_epoch": trial.user_attrs.get("best_epoch"),
        "params": dict(trial.params),
        "error": trial.user_attrs.get("error"),
        "note": trial.user_attrs.get("note"),
        "mlflow_run_id": trial.user_attrs.get("mlflow_run_id"),
        "validations": records(stored, number),
    }


def log_text(stored: StoredStudy, number: int) -> str:
    """Raises `SweeperError` when the trial has no log."""
    stored.trial(number)
    path = stored.folder(number) / "trial.log"
    if not path.exists():
        raise SweeperError(f"Trial {number} has no log\n  Looked for {path.absolute()}.")
    return path.read_text(encoding="utf-8", errors="replace")
