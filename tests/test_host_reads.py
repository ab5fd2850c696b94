"""No training step waits for the device: nothing is read back to the host where it would stop a GPU."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from builders import make_config
from sweeper.data import load_data
from sweeper.training.loop import Clock, train_window
from sweeper.training.session import build_session

READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim")


class HostReads(TorchDispatchMode):
    """Lists where a tensor's value is read by the host, except the step counts of optimizers, which live there."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.places: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        by_mask = name in ("index", "index_put_") and any(
            isinstance(i, Tensor) and i.dtype == torch.bool for i in (args[1] or []) if len(args) > 1
        )
        if (name in READS or by_mask) and not self._is_step_count(args):
            self.note()
        return func(*args, **(kwargs or {}))

    def note(self) -> None:
        frames = [f for f in traceback.extract_stack() if "/sweeper/" in f.filename]
        self.places.append(f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "outside")

    def _is_step_count(self, args: Any) -> bool:
        steps = [state["step"] for state in self.optimizer.state.values() if "step" in state]
        return any(args and args[0] is step for step in steps)


@contextmanager
def counted(optimizer: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostReads]:
    """`tolist`, `numpy` and `cpu` do not pass through the dispatcher."""
    reads = HostReads(optimizer)
    for name in ("tolist", "numpy", "cpu"):
        original = getattr(Tensor, name)

        def noted(self: Tensor, *arguments: Any, original: Any = original, **keywords: Any) -> Any:
            reads.note()
            return original(self, *arguments, **keywords)

        monkeypatch.setattr(Tensor, name, noted)
    with reads:
        yield reads


@pytest.mark.parametrize(
    ("optimizer", "precision", "fused", "most"),
    [
        pytest.param("adamw", "fp32", "auto", 0, id="adamw-fp32"),
        pytest.param("adamw", "bf16", "auto", 0, id="adamw-bf16"),
        pytest.param("sgd", "fp32", "auto", 0, id="sgd-fp32"),
        pytest.param("sgd", "bf16", "auto", 0, id="sgd-bf16"),
        pytest.param("adagrad", "fp32", "auto", 0, id="adagrad-fp32"),
        pytest.param("adamw", "fp16", "auto", 0, id="adamw-fp16"),
        pytest.param("adamw", "fp16", False, 1, id="adamw-fp16-not-fused"),
        pytest.param("rmsprop", "fp32", "auto", 1, id="rmsprop-fp32"),
        pytest.param("rmsprop", "fp16", "auto", 1, id="rmsprop-fp16"),
    ],
)
@pytest.mark.parametrize("clip", [{"max_grad_norm": 1.0}, {"max_grad_norm": None}, {"max_grad_value": 0.1}])
def test_a_step_reads_nothing_back(
    optimizer: str, precision: str, fused: Any, most: int, clip: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(
        train={"optimizer": optimizer, "precision": precision, "batch_size": 32, "accumulation_steps": 2, **clip},
        speed={"fused": fused},
    )
    session = build_session(config, load_data(config.data))
    plan = session.windows.plan(range(64 * 6))
    steps = session.windows.group(plan)
    with closing(session), closing(session.train_loader.epoch(0, plan)) as batches:
        loaded = iter(list(batches))
        clock = Clock(session)
        train_window(session, steps[0], loaded, clock)
        with counted(session.stepper.optimizer, monkeypatch) as reads:
            for window in steps[1:]:
                train_window(session, window, loaded, clock)
    assert len(reads.places) == most * len(steps[1:]), reads.places
