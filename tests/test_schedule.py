"""The table of learning rates against torch's own schedulers, in float64, and the values of known faults."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from sweeper.spec import SchedulerSpec
from sweeper.training.schedule import Plateau, lr_table, schedule_notes, warmup_steps

STEPS_PER_EPOCH = 7
Build = Callable[[torch.optim.Optimizer, int], lr_scheduler.LRScheduler]


def optimizer_with(base_lrs: list[float]) -> torch.optim.Optimizer:
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in base_lrs]
    return torch.optim.SGD(groups, lr=0.0)


def base_lrs_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]


def torch_table(build: Build, base_lrs: list[float], total_steps: int, warmup: int) -> np.ndarray:
    """Step a real scheduler, after a real warm-up if there is one, and write down the lrs each step would use."""
    optimizer = optimizer_with(base_lrs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of SequentialLR, about its own use of `step(0)`
        if warmup:
            rise = lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / warmup)
            main = build(optimizer, max(1, total_steps - warmup))
            scheduler: Any = lr_scheduler.SequentialLR(optimizer, [rise, main], milestones=[warmup])
        else:
            scheduler = build(optimizer, total_steps)
        rows = []
        for _ in range(total_steps):
            rows.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
            if len(rows) < total_steps:
                scheduler.step()
    return np.array(rows, dtype=np.float64)


SCHEDULES = [
    pytest.param({"name": "constant"}, lambda o, n: lr_scheduler.ConstantLR(o, factor=1.0), id="constant"),
    pytest.param(
        {"name": "step", "step_size": 3, "gamma": 0.3},
        lambda o, n: lr_scheduler.StepLR(o, step_size=21, gamma=0.3),
        id="step",
    ),
    pytest.param(
        {"name": "step", "step_size": 0.5, "gamma": 0.9},
        lambda o, n: lr_scheduler.StepLR(o, step_size=4, gamma=0.9),
        id="step-of-half-an-epoch-is-rounded",
    ),
    pytest.param({"name": "cosine"}, lambda o, n: lr_scheduler.CosineAnnealingLR(o, T_max=n), id="cosine"),
    pytest.param(
        {"name": "cosine", "eta_min": 1e-3},
        lambda o, n: lr_scheduler.CosineAnnealingLR(o, T_max=n, eta_min=1e-3),
        id="cosine-with-floor",
    ),
    pytest.param(
        {"name": "cosine_warm_restarts", "T_0": 2},
        lambda o, n: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=14),
        id="cosine-warm-restarts",
    ),
    pytest.param(
        {"name": "cosine_warm_restarts", "T_0": 1, "T_mult": 2, "eta_min": 1e-4},
        lambda o, n: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=7, T_mult=2, eta_min=1e-4),
        id="cosine-warm-restarts-doubling",
    ),
    pytest.param(
        {"name": "cosine_warm_restarts", "T_0": 0.01, "T_mult": 3},
        lambda o, n: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=1, T_mult=3),
        id="cosine-warm-restarts-from-one-step",
    ),
    pytest.param(
        {"name": "one_cycle"},
        lambda o, n: lr_scheduler.OneCycleLR(o, max_lr=base_lrs_of(o), total_steps=n, cycle_momentum=False),
        id="one-cycle",
    ),
    pytest.param(
        {"name": "one_cycle", "pct_start": 0.05, "div_factor": 10.0, "final_div_factor": 50.0},
        lambda o, n: lr_scheduler.OneCycleLR(
            o,
            max_lr=base_lrs_of(o),
            total_steps=n,
            pct_start=0.05,
            div_factor=10.0,
            final_div_factor=50.0,
            cycle_momentum=False,
        ),
        id="one-cycle-with-a-short-rise",
    ),
    pytest.param(
        {"name": "linear", "start_factor": 0.1, "end_factor": 1.0},
        lambda o, n: lr_scheduler.LinearLR(o, start_factor=0.1, end_factor=1.0, total_iters=n),
        id="linear-up",
    ),
    pytest.param(
        {"name": "linear"},
        lambda o, n: lr_scheduler.LinearLR(o, start_factor=1.0, end_factor=0.0, total_iters=n),
        id="linear-down",
    ),
    pytest.param({"name": "polynomial"}, lambda o, n: lr_scheduler.PolynomialLR(o, total_iters=n), id="polynomial"),
    pytest.param(
        {"name": "polynomial", "power": 2.5},
        lambda o, n: lr_scheduler.PolynomialLR(o, total_iters=n, power=2.5),
        id="polynomial-2.5",
    ),
    pytest.param({"name": "plateau"}, lambda o, n: lr_scheduler.ConstantLR(o, factor=1.0), id="plateau-is-constant"),
]


@pytest.mark.parametrize("warmup", [pytest.param(0, id="no-warm-up"), pytest.param(4, id="warm-up-4")])
@pytest.mark.parametrize("base_lrs", [pytest.param([0.1], id="1-group"), pytest.param([0.1, 0.02, 3.0], id="3-groups")])
@pytest.mark.parametrize("total_steps", [1, 2, 7, 50, 333])
@pytest.mark.parametrize(("spec", "build"), SCHEDULES)
def test_the_table_equals_torch(
    spec: dict[str, Any], build: Build, total_steps: int, base_lrs: list[float], warmup: int
) -> None:
    table = lr_table(SchedulerSpec(**spec, warmup_steps=warmup), base_lrs, total_steps, STEPS_PER_EPOCH)
    expected = torch_table(build, base_lrs, total_steps, warmup)
    assert table.dtype == np.float64
    assert table.shape == expected.shape == (total_steps, len(base_lrs))
    # Torch multiplies step by step, so near zero its rounding is relative to the base lr, not to the lr itself.
    assert np.max(np.abs(table - expected) / np.array(base_lrs)) <= 1e-12


def test_one_cycle_is_at_its_peak_where_torch_divides_by_zero() -> None:
    spec = SchedulerSpec(name="one_cycle", pct_start=0.25)
    table = lr_table(spec, [0.1], total_steps=4, steps_per_epoch=4)  # the rise ends at step 0.25 * 4 - 1 = 0
    low = 0.1 / 25 / 1e4
    falls = [low + (0.1 - low) * (1 + math.cos(math.pi * step / 3)) / 2 for step in (1, 2, 3)]
    assert table[:, 0] == pytest.approx([0.1, *falls], rel=1e-12)


def test_steps_count_windows_and_the_peak_ends_the_warm_up() -> None:
    """100 batches an epoch, 10 epochs, accumulation 4: 250 optimizer steps, a tenth of them warm-up."""
    table = lr_table(SchedulerSpec(name="linear", warmup_epochs=1), [5e-5], total_steps=250, steps_per_epoch=25)
    assert table.shape == (250, 1)
    assert table[0, 0] == pytest.approx(2e-6, rel=1e-12)
    assert np.argmax(table[:, 0]) == 24
    assert table[24, 0] == 5e-5


def test_linear_starts_at_its_start_factor() -> None:
    table = lr_table(SchedulerSpec(name="linear", start_factor=0.1, end_factor=1.0), [0.1], 9, 9)
    assert table[:2, 0] == pytest.approx([0.01, 0.02], rel=1e-12)


def test_warm_up_then_cosine_continues_at_the_step_of_a_resume() -> None:
    table = lr_table(SchedulerSpec(name="cosine", warmup_steps=4), [0.1], total_steps=10, steps_per_epoch=10)
    assert table[:4, 0] == pytest.approx([0.025, 0.05, 0.075, 0.1], rel=1e-12)
    last = 0.05 * (1 - math.sqrt(3) / 2)
    assert last == pytest.approx(0.0067, abs=5e-5)
    assert table[6:, 0] == pytest.approx([0.075, 0.05, 0.025, last], rel=1e-12)


def test_a_warm_up_longer_than_the_trial_is_said_with_both_numbers() -> None:
    spec = SchedulerSpec(name="cosine", warmup_steps=2000)
    assert lr_table(spec, [1e-3], total_steps=250, steps_per_epoch=25).max() == pytest.approx(1.25e-4, rel=1e-12)
    (note,) = schedule_notes(spec, total_steps=250, steps_per_epoch=25)
    assert "2000 steps" in note
    assert "250 steps" in note
    assert "0.125" in note
    assert schedule_notes(SchedulerSpec(warmup_steps=250), total_steps=250, steps_per_epoch=25) == []


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        pytest.param({}, 0, id="none"),
        pytest.param({"warmup_steps": 3}, 3, id="steps"),
        pytest.param({"warmup_epochs": 2}, 14, id="epochs"),
        pytest.param({"warmup_epochs": 0.5}, 4, id="half-an-epoch-is-rounded"),
        pytest.param({"warmup_epochs": 0.01}, 1, id="at-least-one-step"),
    ],
)
def test_the_length_of_the_warm_up(spec: dict[str, Any], expected: int) -> None:
    assert warmup_steps(SchedulerSpec(**spec), STEPS_PER_EPOCH) == expected


def plateau_lrs(plateau: Plateau, values: list[float], lr: float = 0.1) -> list[float]:
    lrs = []
    for value in values:
        plateau.observe(value)
        lrs.append(lr * plateau.scale)
    return lrs


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
@pytest.mark.parametrize("patience", [0, 1, 3])
@pytest.mark.parametrize("offset", [pytest.param(0.0, id="around-zero"), pytest.param(5.0, id="above-zero")])
@pytest.mark.parametrize("seed", range(4))
def test_plateau_equals_torch_on_random_series(direction: str, patience: int, offset: float, seed: int) -> None:
    values = (offset + np.random.default_rng(seed).normal(size=60)).tolist()
    base_lrs = [0.1, 2.0, 1e-3]
    optimizer = optimizer_with(base_lrs)
    reference = lr_scheduler.ReduceLROnPlateau(
        optimizer, "min" if direction == "minimize" else "max", factor=0.5, patience=patience, min_lr=2e-3, eps=0
    )
    plateau = Plateau(0.5, patience, direction, min_lr=2e-3)  # type: ignore[arg-type]
    for value in values:
        reference.step(value)
        plateau.observe(value)
        expected = [group["lr"] for group in optimizer.param_groups]
        floored = [max(lr * plateau.scale, min(lr, plateau.min_lr)) for lr in base_lrs]
        assert floored == pytest.approx(expected, rel=1e-12)
    assert plateau.scale < 1


@pytest.mark.parametrize(
    ("values", "direction", "patience", "expected"),
    [
        pytest.param([0.5, 0.6, 0.7, 0.8, 0.9], "maximize", 1, [0.1] * 5, id="rising-accuracy-is-good"),
        pytest.param([0.5, 0.6, 0.7, 0.8, 0.9], "minimize", 1, [0.1, 0.1, 0.01, 0.01, 0.001], id="rising-loss-is-bad"),
        pytest.param([math.nan] * 4, "maximize", 1, [0.1] * 4, id="nan-alone-leaves-the-lr"),
        pytest.param([0.5, math.nan, math.inf, -math.inf], "minimize", 0, [0.1] * 4, id="non-finite-is-passed-over"),
        pytest.param([0.5, 0.6, math.nan, 0.6], "minimize", 1, [0.1, 0.1, 0.1, 0.01], id="nan-does-not-forgive"),
        pytest.param([math.nan, 0.5, 0.4], "minimize", 0, [0.1] * 3, id="nan-first-blocks-nothing"),
    ],
)
def test_plateau_reduces_only_for_finite_values_without_gain(
    values: list[float], direction: str, patience: int, expected: list[float]
) -> None:
    plateau = Plateau(0.1, patience, direction)  # type: ignore[arg-type]
    assert plateau_lrs(plateau, values) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("cut", range(6))
def test_a_restored_plateau_goes_on_as_the_uninterrupted_one(cut: int) -> None:
    values = [0.5, 0.5, 0.5, 0.4, 0.5, 0.5]
    first, second = Plateau(0.1, 1, "minimize"), Plateau(0.1, 1, "minimize")
    lrs = plateau_lrs(first, values[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert lrs + plateau_lrs(second, values[cut:]) == plateau_lrs(Plateau(0.1, 1, "minimize"), values)
