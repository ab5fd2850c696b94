"""Study specs, configs and sessions for tests, from a few words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sweeper.data import load_data
from sweeper.imports import add_import_folder
from sweeper.space import trial_config
from sweeper.spec import StudySpec, TrialConfig
from sweeper.training.session import Session, build_session

PLAIN_SGD = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "max_grad_norm": None}


def make_spec(**sections: Any) -> StudySpec:
    """A sound spec on digits; whole sections are replaced by those given."""
    values: dict[str, Any] = {
        "study": "toy",
        "objective": {"monitor": "val_accuracy", "direction": "maximize"},
        "data": {"source": "digits"},
        "model": {"name": "mlp", "params": {"width": 16}},
        "train": {"max_epochs": 2},
        "search_space": {},
        "budget": {"trials": 2},
        **sections,
    }
    return StudySpec.model_validate(values)


def make_config(**sections: Any) -> TrialConfig:
    return trial_config(make_spec(**sections), 0, {})


def toy_session(data: str, model: str, params: dict[str, Any] | None = None, **train: Any) -> Session:
    """A session on a toy of `toys.py`: regression, monitored by its validation loss."""
    add_import_folder(Path(__file__).parent)
    task, speed = train.pop("task", {"name": "regression"}), train.pop("speed", {})
    config = make_config(
        objective={"monitor": "val_loss", "direction": train.pop("direction", "minimize")},
        data={"source": f"toys:{data}", "params": params or {}},
        model={"name": f"toys:{model}"},
        task=task,
        train={**PLAIN_SGD, "max_epochs": 1, **train},
        speed=speed,
    )
    return build_session(config, load_data(config.data))
