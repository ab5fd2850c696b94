"""Training steps on a CUDA device: none waits for it, and losses, clipping and skipped steps have the CPU's values."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from builders import make_config, toy_session
from sweeper import DataInfo
from sweeper.data import load_data
from sweeper.errors import DivergedError
from sweeper.spec import TaskSpec
from sweeper.tasks import build_task
from sweeper.training.loop import Clock, to_device, train_window
from sweeper.training.session import Session, build_session
from test_loop import run_in_file_order, run_in_file_order_raw, steered
from test_session import run

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


# --- no step waits for the card


@contextmanager
def waits_are(reaction: str) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*prototype feature")
        torch.cuda.set_sync_debug_mode(reaction)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def warm_session(optimizer: str, precision: str, fused: Any, clip: dict[str, Any]) -> tuple[Session, list[Any], Any]:
    """A session after two of its six windows, with the windows that are left and their batches in pinned memory."""
    config = make_config(
        model={"name": "cnn", "params": {"width": 8, "batch_norm": True, "dropout": 0.1}},
        task={"class_weights": "balanced"},
        train={
            "device": DEVICE,
            "optimizer": optimizer,
            "precision": precision,
            "batch_size": 32,
            "accumulation_steps": 2,
            "init_scale": 1024.0,  # so that no first step overflows
            **clip,
        },
        speed={"fused": fused},
    )
    session = build_session(config, load_data(config.data))
    plan = session.windows.plan(range(64 * 6))
    windows = session.windows.group(plan)
    with closing(session.train_loader.epoch(0, plan)) as epoch:
        loaded = list(epoch)
    assert session.speed.non_blocking
    assert all(tensor.is_pinned() for batch in loaded for tensor in batch)
    batches = iter(loaded)
    for window in windows[:2]:
        train_window(session, window, batches, Clock(session))
    return session, windows[2:], batches


CLIPS = [
    pytest.param({"max_grad_norm": 1.0}, id="by-norm"),
    pytest.param({"max_grad_norm": None}, id="measured"),
    pytest.param({"max_grad_value": 0.1}, id="by-value"),
]


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [
        *[(optimizer, precision) for optimizer in ("adamw", "sgd") for precision in ("fp32", "bf16", "fp16")],
        ("adam", "fp32"),
        ("adagrad", "fp32"),
    ],
)
def test_a_step_never_waits_for_the_card(optimizer: str, precision: str, clip: dict[str, Any]) -> None:
    session, windows, batches = warm_session(optimizer, precision, "auto", clip)
    assert session.speed.fused
    with closing(session), waits_are("error"):
        for window in windows:
            train_window(session, window, batches, Clock(session))
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):  # so a wait would have been seen
            session.meters.read()
    reading = session.meters.read()
    assert (reading.good_steps, reading.skipped) == (6, 0)


@pytest.mark.parametrize(("optimizer", "precision", "fused"), [("rmsprop", "fp32", "auto"), ("adamw", "fp16", False)])
def test_an_optimizer_that_cannot_mask_waits_once_a_step(optimizer: str, precision: str, fused: Any) -> None:
    session, windows, batches = warm_session(optimizer, precision, fused, {})
    assert not session.speed.fused
    with closing(session), warnings.catch_warnings(record=True) as seen, waits_are("warn"):
        warnings.simplefilter("always")
        for window in windows:
            train_window(session, window, batches, Clock(session))
    waits = [warning for warning in seen if "synchronizing CUDA operation" in str(warning.message)]
    assert len(waits) == len(windows), [f"{warning.filename}:{warning.lineno}" for warning in waits]


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_leave_from_pinned_memory_and_arrive_with_channels_last(
    channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy from other memory is staged, and the host waits for that, which no debug mode shows."""
    session, _, _ = warm_session("adamw", "bf16", "auto", {})
    assert session.speed.channels_last
    batch = torch.rand(4, channels, 8, 8).pin_memory(), torch.arange(4).pin_memory()
    left: list[bool] = []
    original = Tensor.to

    def noted(self: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        left.append(self.is_pinned())
        return original(self, *arguments, **keywords)

    with closing(session):
        monkeypatch.setattr(Tensor, "to", noted)
        arrived = to_device(batch, session)
    assert left == [True, True]
    assert all(tensor.device.type == DEVICE for tensor in arrived)
    assert arrived[0].is_contiguous(memory_format=torch.channels_last)
    assert all(torch.equal(there.cpu(), here) for there, here in zip(arrived, batch, strict=True))


# --- losses, steps and clipping have the values of the CPU

LABELS = DataInfo("toy", (4,), 3, {"train": 64}, target_dtype="uint8", target_shape=(3,))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("enabled", [pytest.param(True, id="autocast"), pytest.param(False, id="off")])
def test_the_multilabel_loss_under_autocast_is_that_of_the_cpu(precision: str, enabled: bool) -> None:
    """Eighths up to 8 are exact in both half types: only the loss's own arithmetic could differ."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(64, 3, generator=generator) * 16).round().clamp(-64, 64) / 8
    targets = (torch.rand(64, 3, generator=generator) > 0.5).to(torch.uint8)
    expected = F.binary_cross_entropy_with_logits(logits, targets.float())
    task = build_task(TaskSpec(name="multilabel"), LABELS).to(torch.device(DEVICE))
    output = logits.to(DEVICE, dtype).requires_grad_()
    with torch.autocast(DEVICE, dtype=dtype, enabled=enabled):
        total, weight = task.loss(output, (output, targets.to(DEVICE)))
    assert (total.dtype, total.device.type) == (torch.float32, DEVICE)
    assert (total / weight).item() == pytest.approx(expected.item(), abs=1e-6)
    total.backward()
    assert output.grad is not None
    gradient = (logits.sigmoid() - targets) / 3
    torch.testing.assert_close(output.grad.cpu().float(), gradient, rtol=1e-2, atol=1e-6)  # bf16 holds 8 bits


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_a_multilabel_model_trains_on_the_card(precision: str) -> None:
    session = toy_session(
        "digits_in_binary",
        "flat_model",
        task={"name": "multilabel"},
        max_epochs=3,
        optimizer="adamw",
        lr=0.01,
        device=DEVICE,
        precision=precision,
    )
    losses = [record.metrics["val_loss"] for record in run(session)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] < math.log(2) * 1.1  # an untrained model's is near log 2


def test_a_ragged_window_on_the_card_is_the_mean_over_its_samples() -> None:
    keys: dict[str, Any] = {"lr": 0.001, "batch_size": 4, "accumulation_steps": 2, "device": DEVICE}
    session = toy_session("line_data", "line_model", speed={"tf32": False}, precision="fp32", **keys)
    assert run_in_file_order(session) == pytest.approx([0.102, 0.445538], rel=1e-5)


@pytest.mark.parametrize(
    ("keys", "norm", "used", "clipped"),
    [
        pytest.param({"max_grad_norm": 1.0}, 5.0, (0.6, 0.8), 1.0, id="norm-2"),
        pytest.param({"max_grad_norm": 1.0, "norm_type": "inf"}, 4.0, (0.75, 1.0), 1.0, id="norm-inf"),
        pytest.param({"max_grad_norm": None}, 5.0, (3.0, 4.0), 0.0, id="measured-only"),
        pytest.param({"max_grad_norm": None, "max_grad_value": 3.5}, 5.0, (3.0, 3.5), 1.0, id="by-value"),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_gradients_on_the_card_are_clipped_after_unscaling(
    keys: dict[str, Any], norm: float, used: tuple[float, float], clipped: float, precision: str
) -> None:
    where: dict[str, Any] = {"device": DEVICE, "precision": precision}
    session = steered([(3.0, 4.0)] * 4, lr=1.0, batch_size=2, accumulation_steps=2, **where, **keys)
    (record,) = run(session)
    assert (-next(session.model.parameters()).detach()).tolist() == pytest.approx(used, rel=1e-6)
    assert record.metrics["optim/grad_norm"] == pytest.approx(norm)
    assert record.metrics["optim/clipped_fraction"] == clipped


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "adagrad", "rmsprop"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_bad_gradient_on_the_card_never_reaches_weights_or_state(optimizer: str, precision: str) -> None:
    """The bad window comes first: all is then as with a fresh optimizer. The schedule does not move either."""
    keys: dict[str, Any] = {
        "lr": 0.1,
        "batch_size": 1,
        "momentum": 0.9,
        "optimizer": optimizer,
        "precision": precision,
        "device": DEVICE,
        "max_epochs": 9,
        "scheduler": {"name": "linear", "start_factor": 0.1, "end_factor": 1.0},
    }
    session, clean = steered([(math.inf, 1.0), (1.0, 2.0)], **keys), steered([(1.0, 2.0)], **keys)
    run_in_file_order_raw(session)
    run_in_file_order_raw(clean)
    assert torch.equal(next(session.model.parameters()), next(clean.model.parameters()))
    state, clean_state = (s.stepper.optimizer.state_dict()["state"][0] for s in (session, clean))
    assert state.keys() == clean_state.keys()
    for key, value in clean_state.items():
        assert torch.equal(torch.as_tensor(state[key]), torch.as_tensor(value)), key
    reading = session.meters.read()
    assert (reading.skipped, reading.good_steps, int(session.stepper.happened)) == (1, 1, 1)
    assert reading.grad_norm == pytest.approx(math.sqrt(5))


def test_fp16_overflow_on_the_card_ends_the_trial_as_diverged() -> None:
    keys: dict[str, Any] = {"precision": "fp16", "batch_size": 2, "device": DEVICE}
    session = toy_session("constant_data", "line_model", {"count": 8, "value": 70000.0}, **keys)
    with torch.no_grad():
        next(session.model.parameters()).fill_(1.0)
    with pytest.raises(DivergedError, match="loss is not finite"):
        run(session)
