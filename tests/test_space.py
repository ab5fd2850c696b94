"""From the file to a trial's values: conditions, kinds of draws, limits."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
from pydantic import ValidationError

from builders import make_spec
from sweeper.errors import SpecError
from sweeper.space import (
    beyond_limits,
    field_path,
    grid_values,
    highest,
    largest,
    suggest,
    suggestion_order,
    trial_config,
)
from sweeper.spec import ChoicesSpec, RangeSpec

SPACE = {
    "momentum": {"low": 0.5, "high": 0.9, "when": {"optimizer": ["sgd"]}},
    "optimizer": {"choices": ["sgd", "adamw"]},
    "scheduler.warmup_epochs": {"low": 0, "high": 3, "kind": "int"},
    "model.params.width": {"low": 8, "high": 64, "log": True, "kind": "int"},
}


@pytest.mark.parametrize(
    ("optimizer", "names"),
    [
        pytest.param("sgd", {"optimizer", "momentum", "scheduler.warmup_epochs", "model.params.width"}, id="met"),
        pytest.param("adamw", {"optimizer", "scheduler.warmup_epochs", "model.params.width"}, id="not-met"),
    ],
)
def test_a_condition_decides_what_is_drawn(optimizer: str, names: set[str]) -> None:
    spec = make_spec(search_space=SPACE)
    study = optuna.create_study()
    study.enqueue_trial({"optimizer": optimizer})
    drawn = suggest(study.ask(), spec)
    assert set(drawn) == names
    assert suggestion_order(spec.search_space)[:2] == ["optimizer", "momentum"]
    config = trial_config(spec, 7, drawn)
    assert config.train.optimizer == optimizer
    assert config.train.momentum == drawn.get("momentum", 0.9)
    assert config.train.scheduler.warmup_epochs == drawn["scheduler.warmup_epochs"]
    assert config.model.params["width"] == drawn["model.params.width"]
    assert isinstance(config.model.params["width"], int)


def test_a_condition_may_look_at_a_fixed_value() -> None:
    space = {"momentum": {"low": 0.5, "high": 0.9, "when": {"optimizer": ["sgd"]}}}
    assert suggest(optuna.create_study().ask(), make_spec(search_space=space)) == {}
    fixed = make_spec(search_space=space, train={"optimizer": "sgd"})
    assert set(suggest(optuna.create_study().ask(), fixed)) == {"momentum"}


def test_conditions_in_a_circle_are_refused() -> None:
    space = {
        "lr": {"low": 0.1, "high": 1.0, "when": {"momentum": [0.5]}},
        "momentum": {"low": 0.1, "high": 0.9, "when": {"lr": [0.1]}},
    }
    with pytest.raises(SpecError, match="the conditions of lr, momentum wait for each other"):
        suggestion_order(make_spec(search_space=space).search_space)


@pytest.mark.parametrize(
    ("domain", "values"),
    [
        pytest.param(RangeSpec(low=1, high=10, step=4, kind="int"), [1, 5, 9], id="int-step"),
        pytest.param(RangeSpec(low=1, high=3, kind="int"), [1, 2, 3], id="int"),
        pytest.param(RangeSpec(low=0.1, high=0.3, step=0.1), [0.1, 0.2, 0.3], id="float-step"),
        pytest.param(RangeSpec(low=0, high=0.9, step=0.3), [0.0, 0.3, 0.6, 0.9], id="thirds"),
        pytest.param(RangeSpec(low=0.1, high=1.0, step=0.3), [0.1, 0.4, 0.7, 1.0], id="from-a-tenth"),
        pytest.param(RangeSpec(low=0, high=1.0, step=0.3), [0.0, 0.3, 0.6, 0.9], id="not-whole"),
        pytest.param(ChoicesSpec(choices=[None, True]), [None, True], id="choices"),
        pytest.param(RangeSpec(low=0.1, high=0.3), None, id="continuous"),
        pytest.param(RangeSpec(low=1, high=8, log=True, kind="int"), None, id="log"),
    ],
)
def test_the_values_of_a_grid(domain: Any, values: Any) -> None:
    assert grid_values(domain) == values


@pytest.mark.parametrize(("low", "high", "step", "values"), [(0, 0.9, 0.3, 4), (0, 1.8, 0.3, 7), (0.1, 1.0, 0.3, 4)])
def test_every_step_is_drawn_the_last_one_too(low: float, high: float, step: float, values: int) -> None:
    spec = make_spec(search_space={"weight_decay": {"low": low, "high": high, "step": step}})
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    drawn = {suggest(study.ask(), spec)["weight_decay"] for _ in range(100)}
    assert len(drawn) == values
    assert max(drawn) == pytest.approx(high)  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("space", "value"),
    [
        ({}, 2),
        ({"max_epochs": {"choices": [9, 81]}}, 81),
        ({"max_epochs": {"low": 2, "high": 10, "step": 3, "kind": "int"}}, 8),
    ],
)
def test_the_largest_value_of_a_field(space: Any, value: int) -> None:
    assert largest(make_spec(search_space=space), "max_epochs") == value


def test_high_is_the_last_step() -> None:
    assert highest(RangeSpec(low=1, high=10, step=4, kind="int")) == 9


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("lr", ("train", "lr")),
        ("scheduler.gamma", ("train", "scheduler", "gamma")),
        ("optimizer_params.betas", ("train", "optimizer_params", "betas")),
        ("model.params.width", ("model", "params", "width")),
        ("task.label_smoothing", ("task", "label_smoothing")),
        ("seed", None),
        ("data.source", None),
        ("nonsense", None),
    ],
)
def test_names_of_parameters_are_places_in_the_file(name: str, path: tuple[str, ...] | None) -> None:
    assert field_path(name) == path


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        pytest.param({"effective_batch_size": {"max": 39}}, "effective_batch_size 40 is above the limit 39", id="max"),
        pytest.param({"effective_batch_size": {"min": 41}}, "effective_batch_size 40 is below the limit 41", id="min"),
        pytest.param({"effective_batch_size": {"min": 40, "max": 40}}, None, id="inside"),
        pytest.param({"applied_lr": {"max": 1e-4}}, "applied_lr 0.001 is above the limit 0.0001", id="applied-lr"),
    ],
)
def test_limits_on_derived_values(limits: dict[str, Any], why: str | None) -> None:
    spec = make_spec(train={"batch_size": 10, "accumulation_steps": 4}, limits=limits)
    assert beyond_limits(spec, trial_config(spec, 0, {})) == why


def test_a_drawn_value_that_its_field_refuses_raises() -> None:
    with pytest.raises(ValidationError):
        trial_config(make_spec(train={"max_grad_value": 1.0}), 0, {"max_grad_norm": 1.0})


def test_seeds_depend_on_numbers_alone_and_differ() -> None:
    seeds = {
        trial_config(make_spec(train={"seed": seed}), number, {}).seed for seed in range(20) for number in range(20)
    }
    assert len(seeds) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)
