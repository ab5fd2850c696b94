"""The training loop against arithmetic: windows, weights, clipping, skipped steps, precision, divergence."""

from __future__ import annotations

import itertools
import math
import warnings
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from builders import PLAIN_SGD, make_config, toy_session
from sweeper.data import load_data
from sweeper.errors import DivergedError
from sweeper.records import EpochRecord
from sweeper.training.loop import Clock, train, train_window
from sweeper.training.session import Session, build_session


def run(session: Session) -> list[EpochRecord]:
    with closing(session), closing(train(session)) as records:
        return list(records)


def run_in_file_order(session: Session, batch_size: int | None = None) -> list[float]:
    """One epoch without shuffling, by the loop's own parts; the weight after each optimizer step."""
    plan = session.windows.plan(range(session.windows.num_samples))
    weights = []
    with closing(session), closing(session.train_loader.epoch(0, plan)) as batches:
        for window in session.windows.group(plan):
            train_window(session, window, batches, Clock(session))
            weights.append(only_weight(session))
    return weights


def only_weight(session: Session) -> float:
    return float(next(session.model.parameters()).detach().flatten()[0])


@pytest.mark.parametrize(
    ("data", "batch_size", "accumulation_steps", "weights"),
    [
        pytest.param({}, 4, 2, [0.102, 0.445538], id="ragged-last-window"),
        pytest.param({"first": 5}, 4, 2, [0.2366667], id="ragged-micro-batch"),
        pytest.param({"last": 8}, 8, 1, [0.102], id="8x1"),
        pytest.param({"last": 8}, 4, 2, [0.102], id="4x2"),
        pytest.param({"last": 8}, 2, 4, [0.102], id="2x4"),
        pytest.param({"last": 8}, 1, 8, [0.102], id="1x8"),
    ],
)
@pytest.mark.parametrize("fused", [pytest.param(True, id="masking"), pytest.param(False, id="reading")])
def test_a_window_is_the_mean_over_its_samples(
    data: dict[str, int], batch_size: int, accumulation_steps: int, weights: list[float], fused: bool
) -> None:
    session = toy_session(
        "line_data",
        "line_model",
        data,
        lr=0.001,
        batch_size=batch_size,
        accumulation_steps=accumulation_steps,
        speed={"fused": fused},
    )
    assert session.speed.fused == fused
    assert run_in_file_order(session) == pytest.approx(weights, rel=1e-5)


def test_windows_never_cross_an_epoch() -> None:
    session = toy_session("line_data", "line_model", lr=0.001, batch_size=4, accumulation_steps=2, max_epochs=2)
    assert [record.step for record in run(session)] == [2, 4]


def test_the_train_loss_does_not_depend_on_accumulation() -> None:
    losses = [
        run(toy_session("line_data", "line_model", lr=1e-9, batch_size=b, accumulation_steps=a))[0].metrics[
            "train_loss"
        ]
        for b, a in [(8, 1), (4, 2), (2, 4), (1, 8), (10, 1)]
    ]
    assert losses == pytest.approx([4 * 38.5] * 5, rel=1e-6)


def test_class_weights_are_exact_over_a_ragged_window() -> None:
    """The accumulated step equals one big batch of plain torch in float64, with class weights."""
    weights = [1.0, 2.0, 0.5, 1.0, 3.0, 1.0, 1.0, 1.0, 0.1, 1.0]
    config = make_config(
        model={"name": "mlp", "params": {"width": 8}},
        task={"class_weights": weights},
        train={**PLAIN_SGD, "lr": 0.5, "batch_size": 5, "accumulation_steps": 3, "max_epochs": 1},
    )
    session = build_session(config, load_data(config.data))
    reference = build_session(config, load_data(config.data)).model.double()
    indices = list(range(13))
    plan = session.windows.plan(indices)
    with closing(session), closing(session.train_loader.epoch(0, plan)) as batches:
        train_window(session, session.windows.group(plan)[0], batches, Clock(session))
    dataset = session.data.splits.train
    inputs, targets = dataset.inputs[indices].double(), dataset.targets[indices]
    loss = nn.functional.cross_entropy(reference(inputs), targets, torch.tensor(weights, dtype=torch.float64))
    loss.backward()
    for after, before in zip(session.model.parameters(), reference.parameters(), strict=True):
        assert before.grad is not None
        torch.testing.assert_close(after.detach().double(), (before - 0.5 * before.grad).detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("scaling", "applied"),
    [
        pytest.param("none", 0.1, id="none"),
        pytest.param("linear", 0.05, id="linear"),
        pytest.param("sqrt", 0.070711, id="sqrt"),
    ],
)
def test_lr_scaling_refers_to_the_effective_batch(scaling: str, applied: float) -> None:
    train_spec = make_config(train={"lr": 0.1, "batch_size": 64, "accumulation_steps": 2, "lr_scaling": scaling}).train
    assert train_spec.effective_batch_size == 128
    assert train_spec.applied_lr == pytest.approx(applied, rel=1e-5)
    assert train_spec.lr == 0.1


def test_a_lone_last_sample_joins_the_micro_batch_before_it() -> None:
    """9 samples in batches of 4 leave one over, on which batch norm cannot train."""
    config = make_config(
        data={"source": "toys:nine_digits"},
        model={"name": "mlp", "params": {"width": 4, "batch_norm": True}},
        train={"batch_size": 4, "max_epochs": 1},
    )
    with pytest.warns(UserWarning, match="batch norm sees micro-batches of 4"):
        session = build_session(config, load_data(config.data))
    assert [len(batch) for batch in session.windows.plan(range(9))] == [4, 5]
    (record,) = run(session)
    assert math.isfinite(record.metrics["val_loss"])


# --- clipping


@pytest.mark.parametrize(
    ("train_keys", "norm", "used", "clipped"),
    [
        pytest.param({"max_grad_norm": 1.0}, 5.0, (0.6, 0.8), 1.0, id="norm-2"),
        pytest.param({"max_grad_norm": 1.0, "norm_type": "inf"}, 4.0, (0.75, 1.0), 1.0, id="norm-inf"),
        pytest.param({"max_grad_norm": None}, 5.0, (3.0, 4.0), 0.0, id="measured-only"),
        pytest.param({"max_grad_norm": 10.0}, 5.0, (3.0, 4.0), 0.0, id="below-the-limit"),
        pytest.param({"max_grad_norm": None, "max_grad_value": 3.5}, 5.0, (3.0, 3.5), 1.0, id="by-value"),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_gradients_are_clipped_after_unscaling(
    train_keys: dict[str, Any], norm: float, used: tuple[float, float], clipped: float, precision: str
) -> None:
    session = steered([(3.0, 4.0)] * 4, lr=1.0, batch_size=2, accumulation_steps=2, precision=precision, **train_keys)
    (record,) = run(session)
    weights = next(session.model.parameters()).detach()
    assert (-weights).tolist() == pytest.approx(used, rel=1e-6)
    assert record.metrics["optim/grad_norm"] == pytest.approx(norm)
    assert record.metrics["optim/clipped_fraction"] == clipped


def test_clipping_sees_gradients_without_the_scale() -> None:
    """Scale 65536, and targets so small that the scaled gradients (3, 4) fit into half precision."""
    scale = 65536.0
    session = steered([(3.0 / scale, 4.0 / scale)] * 2, lr=1.0, batch_size=2, precision="fp16", init_scale=scale,
                      max_grad_norm=1.0 / scale)  # fmt: skip
    (record,) = run(session)
    weights = next(session.model.parameters()).detach()
    assert (-weights * scale).tolist() == pytest.approx((0.6, 0.8), rel=1e-3)
    assert record.metrics["optim/grad_norm"] * scale == pytest.approx(5.0, rel=1e-3)


def steered(gradients: list[tuple[float, float]], **train_keys: Any) -> Session:
    train_keys.setdefault("init_scale", 1024.0)  # 65536 times these gradients overflows half precision by itself
    return toy_session(
        "steered_data", "steered_model", {"gradients": gradients}, task={"name": "toys:LinearTask"}, **train_keys
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "adagrad", "rmsprop", "nadam"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_bad_gradient_never_reaches_weights_or_state(optimizer: str, precision: str, bad: float) -> None:
    """The bad window comes first: then momentum, moments and step counts must be those of a fresh optimizer."""
    keys: dict[str, Any] = {"lr": 0.1, "batch_size": 1, "optimizer": optimizer, "momentum": 0.9, "precision": precision}
    session, clean = steered([(bad, 1.0), (1.0, 2.0)], **keys), steered([(1.0, 2.0)], **keys)
    run_in_file_order_raw(session)
    run_in_file_order_raw(clean)
    assert torch.equal(next(session.model.parameters()), next(clean.model.parameters()))
    state, clean_state = (s.stepper.optimizer.state_dict()["state"] for s in (session, clean))
    assert state.keys() == clean_state.keys()
    for key, value in clean_state[0].items():
        assert torch.equal(torch.as_tensor(state[0][key]), torch.as_tensor(value)), key
    reading = session.meters.read()
    assert (reading.skipped, reading.good_steps, int(session.stepper.happened)) == (1, 1, 1)
    assert reading.grad_norm == pytest.approx(math.sqrt(5))


def run_in_file_order_raw(session: Session) -> None:
    plan = session.windows.plan(range(session.windows.num_samples))
    with closing(session), closing(session.train_loader.epoch(0, plan)) as batches:
        for window in session.windows.group(plan):
            train_window(session, window, batches, Clock(session))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("optimizer", [pytest.param("sgd", id="masking"), pytest.param("rmsprop", id="reading")])
def test_a_skipped_step_does_not_move_the_schedule(optimizer: str, precision: str) -> None:
    session = steered(
        [(math.inf, 1.0)],
        lr=0.1,
        batch_size=1,
        optimizer=optimizer,
        precision=precision,
        max_epochs=9,
        scheduler={"name": "linear", "start_factor": 0.1, "end_factor": 1.0},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_in_file_order_raw(session)
    assert session.stepper.lrs_at(int(session.stepper.happened)) == pytest.approx([0.01])
    assert session.meters.read().skipped == 1
    assert next(session.model.parameters()).tolist() == [0.0, 0.0]


def test_a_window_without_a_good_step_logs_nan_never_0() -> None:
    session = steered([(math.inf, 1.0)], batch_size=1)
    run_in_file_order_raw(session)
    reading = session.meters.read()
    assert math.isnan(reading.grad_norm)
    assert math.isnan(reading.clipped_fraction)


def test_unscaling_and_updating_happen_once_a_window() -> None:
    keys: dict[str, Any] = {"batch_size": 4, "accumulation_steps": 2, "precision": "fp16", "init_scale": 2.0}
    session = toy_session("line_data", "line_model", lr=1e-4, **keys)
    assert session.scaler is not None
    session.scaler.set_growth_interval(1)
    (record,) = run(session)
    assert record.step == 2
    assert record.metrics["optim/loss_scale"] == 8.0  # doubled by each update that follows a good step


# --- the schedule in the loop


def test_lr_is_logged_as_the_last_step_used_it() -> None:
    keys: dict[str, Any] = {
        "lr": 5e-5,
        "batch_size": 1,
        "accumulation_steps": 4,
        "max_epochs": 10,
        "optimizer": "adamw",
    }
    session = toy_session(
        "line_data", "line_model", {"last": 100}, scheduler={"name": "linear", "warmup_steps": 25}, **keys
    )
    assert session.windows.steps_per_epoch * 10 == 250
    assert session.stepper.lrs_at(0) == pytest.approx([2e-6])
    assert session.stepper.lrs_at(24) == pytest.approx([5e-5])
    first = run(session)[0]
    assert (first.step, first.metrics["optim/lr"]) == (25, pytest.approx(5e-5))


def test_a_warmup_longer_than_the_run_is_said_with_both_numbers() -> None:
    with pytest.warns(UserWarning, match=r"2,?000.*250"):
        session = toy_session(
            "line_data",
            "line_model",
            {"last": 100},
            lr=1e-3,
            batch_size=4,
            max_epochs=10,
            scheduler={"name": "constant", "warmup_steps": 2000},
        )
    assert max(itertools.chain(*(session.stepper.lrs_at(step) for step in range(250)))) == pytest.approx(1.25e-4)


@pytest.mark.parametrize(
    ("direction", "values", "lrs"),
    [
        pytest.param("maximize", [0.5, 0.6, 0.7, 0.8, 0.9], [0.1] * 5, id="rising-accuracy"),
        pytest.param("minimize", [math.nan] * 4, [0.1] * 4, id="nan"),
        pytest.param("minimize", [1.0, 1.0, 1.0, 1.0, 1.0], [0.1, 0.1, 0.01, 0.01, 0.001], id="a-plateau"),
    ],
)
def test_the_plateau_follows_the_direction(direction: str, values: list[float], lrs: list[float]) -> None:
    scheduler = {"name": "plateau", "factor": 0.1, "patience": 1}
    session = toy_session("line_data", "line_model", lr=0.1, direction=direction, scheduler=scheduler)
    seen = []
    for value in values:
        session.observe(value)
        seen += session.stepper.lrs_at(0)
    assert seen == pytest.approx(lrs)


# --- precision


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_weights_and_optimizer_state_stay_fp32(precision: str) -> None:
    config = make_config(train={"precision": precision, "max_epochs": 1, "optimizer": "adamw"})
    session = build_session(config, load_data(config.data))
    (record,) = run(session)
    assert {p.dtype for p in session.model.parameters()} == {torch.float32}
    states = session.stepper.optimizer.state.values()
    assert {v.dtype for state in states for v in state.values() if isinstance(v, Tensor)} == {torch.float32}
    assert session.precision == precision
    assert ("optim/loss_scale" in record.metrics) == (precision == "fp16")
    assert (session.scaler is None) == (precision == "bf16")


def test_fp16_overflow_ends_the_trial_as_diverged() -> None:
    session = toy_session("constant_data", "line_model", {"count": 8, "value": 70000.0}, precision="fp16", batch_size=2)
    with torch.no_grad():
        next(session.model.parameters()).fill_(1.0)
    with pytest.raises(DivergedError, match="loss is not finite"):
        run(session)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_weight_has_a_gradient_after_a_validation(precision: str) -> None:
    config = make_config(train={"precision": precision, "max_epochs": 1, "validations_per_epoch": 3, "batch_size": 256})
    session = build_session(config, load_data(config.data))
    with closing(session), closing(train(session)) as records:
        next(records)
        plan = session.windows.plan(range(256))
        before = [p.detach().clone() for p in session.model.parameters()]
        with closing(session.val_loader.epoch(0, plan)) as batches:
            train_window(session, plan, batches, Clock(session))
        assert not any(torch.equal(a, b) for a, b in zip(before, session.model.parameters(), strict=True))


def test_validation_does_not_depend_on_the_batch_size() -> None:
    values = []
    for batch_size in (7, 64, 300):
        config = make_config(train={"batch_size": batch_size, "lr": 1e-12, "max_epochs": 1, "weight_decay": 0.0})
        (record,) = run(build_session(config, load_data(config.data)))
        values.append((record.metrics["val_loss"], record.metrics["val_accuracy"]))
    assert [accuracy for _, accuracy in values] == [values[0][1]] * 3
    assert [loss for loss, _ in values] == pytest.approx([values[0][0]] * 3, rel=1e-6)


# --- divergence


def test_twenty_skipped_steps_in_a_row_are_divergence() -> None:
    session = steered([(math.inf, 1.0)] * 19 + [(1.0, 1.0)] + [(math.nan, 1.0)] * 19, batch_size=1)
    run_in_file_order_raw(session)
    assert session.meters.read().streak == 19
    session = steered([(1e38, 1e38)] * 50, batch_size=1, lr=1e-30)
    with torch.no_grad():
        next(session.model.parameters()).zero_()
    with pytest.raises(DivergedError, match="50 optimizer steps in a row"):
        run(session)


def test_poisoned_buffers_are_divergence() -> None:
    config = make_config(model={"name": "mlp", "params": {"width": 4, "batch_norm": True}}, train={"max_epochs": 1})
    session = build_session(config, load_data(config.data))
    dict(session.model.named_buffers())[next(n for n, _ in session.model.named_buffers() if "var" in n)].fill_(math.nan)
    with pytest.raises(DivergedError, match=r"buffer .*running_var is not finite"):
        run(session)


# --- validations and time


def test_validations_are_equally_spaced_and_counted_on() -> None:
    config = make_config(train={"max_epochs": 2, "validations_per_epoch": 3, "batch_size": 256})
    records = run(build_session(config, load_data(config.data)))
    assert [(r.validation, r.epoch, r.step, r.epoch_complete) for r in records] == [
        (0, 0, 2, False),
        (1, 0, 4, False),
        (2, 0, 6, True),
        (3, 1, 8, False),
        (4, 1, 10, False),
        (5, 1, 12, True),
    ]


@pytest.mark.parametrize("batch_size", [10, 100])
def test_the_report_unit_is_the_validation_for_every_batch_size(batch_size: int) -> None:
    config = make_config(train={"max_epochs": 3, "batch_size": batch_size})
    assert [r.validation for r in run(build_session(config, load_data(config.data)))] == [0, 1, 2]


def test_timeout_ends_the_loop_between_two_steps() -> None:
    config = make_config(train={"max_epochs": 50, "timeout_s": 1e-9})
    session = build_session(config, load_data(config.data))
    assert run(session) == []
    assert session.timed_out


def test_deterministic_mode_is_set_for_its_trial_alone() -> None:
    for deterministic in (True, False):
        config = make_config(train={"deterministic": deterministic})
        build_session(config, load_data(config.data)).close()
        assert torch.are_deterministic_algorithms_enabled() == deterministic
