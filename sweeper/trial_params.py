"""What determined a trial, as flat names and values for MLflow: drawn and fixed, under the names of the file."""

from __future__ import annotations

import re
from typing import Any

from sweeper.records import DataInfo
from sweeper.spec import SCHEDULER_KEYS, TrialConfig


def config_params(config: TrialConfig) -> dict[str, Any]:
    """What the file and the draw say; `precision` and `device`, which may be `auto`, are in `resolved_params`."""
    train = config.train.model_dump(mode="json", exclude={"precision", "device"})
    scheduler = train.pop("scheduler")
    used = {"name", "warmup_epochs", "warmup_steps", *SCHEDULER_KEYS[scheduler["name"]]}
    params = {**_flat("", train), **_flat("scheduler.", {key: scheduler[key] for key in used})}
    for section in ("model", "task", "data", "early_stopping", "objective"):
        params |= _flat(f"{section}.", getattr(config, section).model_dump(mode="json"))
    params |= {
        "early_stopping.patience": config.early_stopping.resolved_patience(config.num_validations),
        "trial_seed": config.seed,
        "effective_batch_size": config.train.effective_batch_size,
        "applied_lr": config.train.applied_lr,
    }
    return params


def resolved_params(device: object, precision: str, speed: dict[str, Any]) -> dict[str, Any]:
    """What runs, not what the file asked for."""
    return {"precision": precision, "device": str(device), **{f"speed.{name}": value for name, value in speed.items()}}


def _flat(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = re.sub(r"[^\w.\- ]", "_", f"{prefix}{key}")  # MLflow takes no other signs, and then none of the params
        flat |= _flat(f"{name}.", value) if isinstance(value, dict) else {name: value}
    return flat


def dataset_input(config: TrialConfig, info: DataInfo) -> dict[str, Any]:
    """Name, size, splits and content hash of the data."""
    return {
        "name": info.name,
        "digest": info.digest,
        "source": config.data.root or config.data.source,
        "source_type": config.data.source,
        "sizes": info.sizes,
        "val_fraction": config.data.val_fraction,
        "test_fraction": config.data.test_fraction,
        "split_seed": config.data.split_seed,
    }
