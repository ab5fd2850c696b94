"""One small batch through model, loss and metrics before any trial: what does not fit together is said in words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sweeper.errors import SpecError
from sweeper.tasks.base import Task

NUM_SAMPLES = 2
"""Enough for batch norm, which takes no single sample in training."""


def rehearse_batch(model: nn.Module, task: Task, batch: Any, device: torch.device | None, our_model: bool) -> None:
    """Forward and loss of a batch on `device`; without one, on `meta`, only shapes and types are looked at, and no
    metrics, which read values.

    Raises `SpecError` naming the part that does not fit. What a user's own code raises passes through, with a note.
    """
    place = device or torch.device("meta")
    model, task, batch = model.to(place), task.to(place), _moved(batch, place)
    if our_model and isinstance(batch[0], Tensor) and batch[0].dtype != torch.float32:
        raise _unfit(batch[0], "its weights are float32")  # `meta` would let it pass
    model.train(len(batch[1]) > 1)  # batch norm takes no single sample
    with torch.no_grad():
        try:
            output = task.forward(model, batch)
        except (RuntimeError, ValueError, TypeError) as error:
            if our_model:
                raise _unfit(batch[0], str(error)) from error
            error.add_note(f"The batch was {_form(batch[0])}.")
            raise
        task.loss(output, batch)
        for name, metric in task.metrics().items() if device is not None else []:
            metric = metric.to(place)
            metric.update(output, batch[1])
            _check_value(name, metric.compute())


def _form(inputs: Any) -> str:
    if not isinstance(inputs, Tensor):
        return f"a {type(inputs).__name__}"
    return f"{str(inputs.dtype).removeprefix('torch.')} of the shape {tuple(inputs.shape)}"


def _unfit(inputs: Any, words: str) -> SpecError:
    todo = "Choose another model, or write your own, whose `build(params, data)` is told the shape of a sample."
    if isinstance(inputs, Tensor) and inputs.dtype != torch.float32:
        todo = "Convert in your dataset, as in `x.to(torch.float32)`."
    what = f"the model cannot take a batch of {_form(inputs)}: {' '.join(words.split())[:300]}"
    return SpecError(("model", "name"), what, todo)


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
