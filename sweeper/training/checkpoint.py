"""The best checkpoint: what it holds, and the model it becomes again.

The other parts of checkpoints are handed on from here: `trial_folder` knows the files, `plain` what may be in them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from sweeper.errors import CheckpointError, SpecError
from sweeper.imports import add_import_folder, is_import_path
from sweeper.records import DataInfo, EpochRecord
from sweeper.spec import ModelSpec, TrialConfig
from sweeper.training.plain import restore_rng, rng_state, to_plain
from sweeper.training.trial_folder import BEST_NAME, TrialFolder, open_checkpoint

__all__ = ["TrialFolder", "best_payload", "load_model", "open_checkpoint", "restore_rng", "rng_state", "to_plain"]

FORMAT = 1


def best_payload(
    model: nn.Module,
    config: TrialConfig,
    info: DataInfo,
    record: EpochRecord,
    study: str,
    import_folder: Path | None,
    example_input: Any,
) -> dict[str, Any]:
    """Everything `best.pt` holds: the weights of `record`'s validation, copied to the CPU, and how to build the model.

    `import_folder` is the study file's folder, where a user's own model is imported from; `example_input` a batch of
    one sample, scaled as the model learned it.
    """
    weights = model.state_dict()
    for name, value in list(weights.items()):
        if isinstance(value, torch.Tensor):  # a module's extra state may be anything
            weights[name] = value.detach().to("cpu", copy=True)
    return {
        "format": FORMAT,
        "model": weights,
        "model_spec": config.model.model_dump(),
        "data_info": info.to_json(),
        "example_input": to_plain(example_input),
        "import_folder": None if import_folder is None else str(import_folder.resolve()),
        "config": config.model_dump(mode="json"),
        "epoch": record.epoch,
        "validation": record.validation,
        "value": record.metrics[config.objective.monitor],
        "monitor": config.objective.monitor,
        "study": study,
        "trial": config.number,
    }


def load_model(path: str | Path) -> nn.Module:
    """The best model of a trial, on the CPU and ready for inference. `path` is `best.pt` or the folder that holds it.

    Raises `CheckpointError` if there is no such file, it is damaged, or its weights do not fit the model's code of now.
    A user's own model is imported from where the study file was, or else from what is installed.
    """
    from sweeper.models import build_model  # here, because torchvision takes long to import

    file = Path(path)
    if file.is_dir():
        file = file / BEST_NAME
    if not file.exists():
        raise CheckpointError(f"{file.absolute()}: no such file. `sweep best` prints the path of the best one.")
    payload = open_checkpoint(file)
    if payload.get("format") != FORMAT:
        found = payload.get("format", "none")
        raise CheckpointError(f"{file}: not a best checkpoint that this version reads (format {found}, not {FORMAT}).")
    spec = ModelSpec(**payload["model_spec"])
    folder = payload["import_folder"]
    if is_import_path(spec.name) and folder is not None and Path(folder).is_dir():
        add_import_folder(Path(folder))
    try:
        model = build_model(spec, DataInfo.from_json(payload["data_info"]))
    except SpecError as error:
        raise CheckpointError(f"{file}: its model cannot be built here: {error}") from error
    try:
        model.load_state_dict(payload["model"])
    except RuntimeError as error:
        raise CheckpointError(
            f"{file}: its weights do not fit the model {spec.name!r} as it is built now: {error}\n"
            "  The model's code has changed since; load it with the code of that time."
        ) from error
    return model.eval()
