"""A session saved and restored goes on as if nothing had happened, under every schedule and kind of optimizer."""

from __future__ import annotations

import io
from contextlib import closing
from typing import Any

import pytest
import torch

from builders import make_config
from sweeper.data import load_data
from sweeper.errors import SpecError
from sweeper.records import EpochRecord
from sweeper.spec import SCHEDULER_KEYS
from sweeper.training.loop import train
from sweeper.training.precision import make_scaler, resolve_device, resolve_precision
from sweeper.training.session import Session, build_session
from sweeper.training.trial_folder import TrialFolder
from sweeper.training.windows import Windows, epoch_order, micro_batches, validation_steps


def few_digits_session(**train_keys: Any) -> Session:
    config = make_config(
        data={"source": "toys:few_digits"},
        model={"name": "mlp", "params": {"width": 8, "dropout": 0.3}},
        train={"max_epochs": 6, "batch_size": 48, "lr": 0.1, **train_keys},
    )
    return build_session(config, load_data(config.data))


def run(session: Session, epochs: int = 100) -> list[EpochRecord]:
    records = []
    with closing(session), closing(train(session)) as steps:
        for record in steps:
            records.append(record)
            if session.epoch == epochs:
                break
    return records


@pytest.mark.parametrize("optimizer", [pytest.param("adamw", id="masking"), pytest.param("rmsprop", id="reading")])
@pytest.mark.parametrize("scheduler", SCHEDULER_KEYS)
@pytest.mark.parametrize("cut", [1, 3, 5])
def test_every_schedule_goes_on_where_it_was(scheduler: str, optimizer: str, cut: int, tmp_path: Any) -> None:
    keys = {
        "optimizer": optimizer,
        "scheduler": {
            "name": scheduler,
            "warmup_steps": 3,
            **{
                key: value
                for key, value in {"T_0": 2, "step_size": 2, "patience": 0}.items()
                if key in SCHEDULER_KEYS[scheduler]
            },
        },
    }
    whole = few_digits_session(**keys)
    whole_records = run(whole)
    first = few_digits_session(**keys)
    folder = TrialFolder(tmp_path, 1)
    records = run(first, epochs=cut)
    folder.save_last(first.state_dict(), cut - 1)
    second = few_digits_session(**keys)
    state = folder.load_last()
    assert state is not None
    second.load_state_dict(state)
    records += run(second)
    names = ("optim/lr", "train_loss", "val_loss", "optim/grad_norm")
    facts = [[(r.step, *(r.metrics[name] for name in names)) for r in series] for series in (whole_records, records)]
    assert facts[0] == facts[1]
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_warmup_then_cosine_goes_on_with_the_right_rates() -> None:
    """Base 0.1, 4 steps of warm-up, a cosine of 6 steps; killed after 6 scheduler steps."""
    config = make_config(
        data={"source": "toys:few_digits"},
        train={"lr": 0.1, "batch_size": 100, "max_epochs": 5, "scheduler": {"name": "cosine", "warmup_steps": 4}},
    )
    session = build_session(config, load_data(config.data))
    assert session.windows.steps_per_epoch == 2
    run(session, epochs=3)
    stream = io.BytesIO()
    torch.save(session.state_dict(), stream)
    stream.seek(0)
    resumed = build_session(config, load_data(config.data))
    resumed.load_state_dict(torch.load(stream, weights_only=True))
    step = int(resumed.stepper.happened)
    assert step == 6
    rates = [resumed.stepper.lrs_at(s)[0] for s in range(step, 10)]
    assert rates == pytest.approx([0.075, 0.05, 0.025, 0.0067], abs=1e-5)


def test_an_fp16_checkpoint_opens_without_a_scaler_and_the_other_way_round() -> None:
    """fp16 -> fp32 loads no scale; fp32 -> fp16 starts with a fresh one instead of failing on an empty state."""
    for before, after in (("fp16", "fp32"), ("fp32", "fp16"), ("fp16", "bf16")):
        first, second = few_digits_session(precision=before), few_digits_session(precision=after)
        run(first, epochs=2)
        second.load_state_dict(first.state_dict())
        assert (second.scaler is None) == (after != "fp16")
        assert len(run(second)) == 4


def test_what_auto_meant_is_kept_on_the_same_kind_of_device() -> None:
    config = make_config(train={"max_epochs": 1})
    data = load_data(config.data)
    saved = build_session(config, data).state_dict()
    assert saved["speed"]["fused"]
    saved["speed"] |= {"fused": False, "num_workers": 1}
    resumed = build_session(config, data, saved)
    assert (resumed.speed.fused, resumed.speed.num_workers) == (False, 1)
    resumed.close()
    elsewhere = build_session(config, data, {**saved, "device": "cuda"})
    assert (elsewhere.speed.fused, elsewhere.speed.num_workers) == (True, 0)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adagrad"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param({"fused": False}, {"fused": True}, id="then-fused"),
        pytest.param({"fused": True}, {"fused": False}, id="then-not-fused"),
        pytest.param({"channels_last": False}, {"channels_last": True}, id="then-channels-last"),
        pytest.param({"channels_last": True}, {"channels_last": False}, id="then-contiguous"),
    ],
)
def test_changed_speed_settings_apply_on_resume_and_keep_the_mathematics(
    optimizer: str, before: dict[str, bool], after: dict[str, bool]
) -> None:
    def session(speed: dict[str, bool]) -> Session:
        config = make_config(
            data={"source": "toys:few_digits"},
            model={"name": "cnn", "params": {"width": 4}},
            train={"max_epochs": 4, "batch_size": 50, "optimizer": optimizer, "lr": 0.01},
            speed=speed,
        )
        return build_session(config, load_data(config.data))

    whole = run(session(before))
    first, second = session(before), session(after)
    records = run(first, epochs=2)
    second.load_state_dict(first.state_dict())
    assert bool(second.stepper.optimizer.param_groups[0]["fused"]) == second.speed.fused
    records += run(second)
    names = ("train_loss", "val_loss", "optim/grad_norm")
    losses = [[r.metrics[name] for r in series for name in names] for series in (whole, records)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_groups_train_with_their_factor() -> None:
    """The last layer (module 4) at a tenth of the rate; both rates are logged under their own names."""
    keys: dict[str, Any] = {"scheduler": {"name": "constant"}, "max_epochs": 1, "optimizer": "sgd", "momentum": 0.0}
    session = few_digits_session(groups=[{"prefix": "4", "lr_factor": 0.1}], **keys)
    (record,) = run(session)
    assert (record.metrics["optim/lr"], record.metrics["optim/lr_4"]) == pytest.approx((0.1, 0.01))
    frozen = few_digits_session(groups=[{"prefix": "4", "lr_factor": 0.0}], weight_decay=0.0, **keys)
    before = {name: p.detach().clone() for name, p in frozen.model.named_parameters()}
    run(frozen)
    unchanged = {name for name, p in frozen.model.named_parameters() if torch.equal(p, before[name])}
    assert unchanged == {"4.weight", "4.bias"}


def test_a_group_without_parameters_is_refused() -> None:
    with pytest.raises(SpecError, match="no trainable parameter's name starts with 'head'"):
        few_digits_session(groups=[{"prefix": "head", "lr_factor": 0.1}])


def test_no_decay_on_biases_and_norms_unless_asked() -> None:
    model = {"name": "mlp", "params": {"width": 4, "batch_norm": True}}
    for asked, decayed in ((False, {2}), (True, {1, 2})):
        config = make_config(model=model, train={"weight_decay": 0.1, "decay_biases_and_norms": asked})
        session = build_session(config, load_data(config.data))
        dims = {
            p.ndim
            for group in session.stepper.optimizer.param_groups
            for p in group["params"]
            if group["weight_decay"] == 0.1
        }
        assert dims == decayed


# --- device and precision


@pytest.mark.parametrize(
    ("precision", "device", "resolved"),
    [
        ("auto", "cpu", "fp32"),
        ("auto", "mps", "fp32"),
        ("fp16", "cpu", "fp16"),
        ("bf16", "cpu", "bf16"),
        ("fp32", "mps", "fp32"),
    ],
)
def test_precision_is_resolved_to_what_runs(precision: str, device: str, resolved: str) -> None:
    assert resolve_precision(precision, torch.device(device)) == resolved


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_on_mps_is_refused(precision: str) -> None:
    with pytest.raises(SpecError, match="does not train reliably on MPS"):
        resolve_precision(precision, torch.device("mps"))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_only_fp16_has_a_scaler(precision: Any) -> None:
    assert make_scaler(precision, torch.device("cpu"), 1024.0) is None


def test_the_range_of_half_precision_is_what_the_scaler_is_for() -> None:
    big = torch.tensor([70000.0, 1e-8])
    assert big.half().tolist() == [float("inf"), 0.0]
    assert big.bfloat16()[0].item() == 70144.0


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_missing_device_is_refused_in_words(device: str) -> None:
    """`conftest.py` hides every card, so that there is none on any machine."""
    with pytest.raises(SpecError, match=f"'{device}' is asked for, but torch .* sees no CUDA device"):
        resolve_device(device)


# --- order and windows


def test_every_index_comes_once_an_epoch_in_another_order() -> None:
    orders = [epoch_order(64, 3, epoch) for epoch in range(4)]
    assert all(sorted(order) == list(range(64)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert epoch_order(64, 3, 2) == orders[2]
    assert epoch_order(64, 4, 2) != orders[2]


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "sizes"),
    [
        pytest.param(10, 4, [4, 4, 2], id="ragged"),
        pytest.param(9, 4, [4, 5], id="a-lone-sample-joins"),
        pytest.param(8, 4, [4, 4], id="even"),
        pytest.param(3, 1, [1, 1, 1], id="batches-of-one"),
        pytest.param(1, 4, [1], id="one-sample"),
        pytest.param(13, 4, [4, 4, 5], id="a-lone-sample-joins-the-one-before-it"),
    ],
)
def test_micro_batches(num_samples: int, batch_size: int, sizes: list[int]) -> None:
    plan = micro_batches(range(num_samples), batch_size)
    assert [len(batch) for batch in plan] == sizes
    assert [index for batch in plan for index in batch] == list(range(num_samples))


def test_windows_of_an_epoch() -> None:
    windows = Windows(num_samples=10, batch_size=4, accumulation_steps=2)
    assert windows.steps_per_epoch == 2
    assert [[len(b) for b in window] for window in windows.group(windows.plan(range(10)))] == [[4, 4], [2]]


@pytest.mark.parametrize(("steps", "validations", "after"), [(6, 3, [2, 4, 6]), (7, 2, [4, 7]), (5, 1, [5])])
def test_validations_are_spread_over_the_epoch(steps: int, validations: int, after: list[int]) -> None:
    assert validation_steps(steps, validations) == after


def test_more_validations_than_steps_are_refused() -> None:
    with pytest.raises(ValueError, match=r"validations_per_epoch \(3\) exceeds the optimizer steps of an epoch \(2\)"):
        validation_steps(2, 3)
