"""One small batch through model, loss and metrics before any trial: what does not fit together is said in words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sweeper.errors import SpecError, SweeperError
from sweeper.tasks.base import Task

NUM_SAMPLES = 2
"""Enough for batch norm, which takes no single sample in training."""


def rehearse_batch(model: nn.Module, task: Task, batch: Any, device: torch.device | None) -> None:
    """Forward and loss of a batch on `device`; without one, on `meta`, only shapes and types are looked at, and no
    metrics, which read values.

    Raises `SpecError` naming the part that does not fit. What a user's own code raises passes through, but for torch's
    complaints about shapes and types.
    """
    place = device or torch.device("meta")
    model, task, batch = model.to(place), task.to(place), _moved(batch, place)
    if device is None and isinstance(batch[0], Tensor) and batch[0].dtype != torch.float32:
        raise _unfit(batch[0], TypeError("its weights are float32"))  # `meta` would let it pass
    model.train(len(batch[1]) > 1)  # batch norm takes no single sample
    with torch.no_grad():
        try:
            output = task.forward(model, batch)
        except (RuntimeError, ValueError, TypeError) as error:
            raise _unfit(batch[0], error) from error
        task.loss(output, batch)
        for name, metric in task.metrics().items() if device is not None else []:
            metric = metric.to(place)
            metric.update(output, batch[1])
            _check_value(name, metric.compute())


def _unfit(inputs: Any, error: Exception) -> SpecError:
    form, todo = type(inputs).__name__, "`build(params, data)` is told the shape of one sample as `data.input_shape`."
    if isinstance(inputs, Tensor):
        dtype = str(inputs.dtype).removeprefix("torch.")
        form = f"{dtype} of the shape {tuple(inputs.shape)}"
        if dtype != "float32":
            todo = f"Most layers take float32: convert in your dataset, as in `x.to(torch.float32)`. {todo}"
    words = str(error) if isinstance(error, SweeperError) else " ".join(str(error).split())[:300]
    return SpecError(("model", "name"), f"the model cannot take a batch of {form}: {words}", todo)


def _check_value(name: str, value: Any) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = f"the shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise SpecError(
            ("task", "name"),
            f"the metric {name!r} computes {found}, not one number as a tensor",
            "Average over classes, as in torchmetrics' `average='macro'`.",
        )


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {key: _moved(value, device) for key, value in batch.items()}
    return type(batch)(_moved(value, device) for value in batch) if isinstance(batch, list | tuple) else batch
