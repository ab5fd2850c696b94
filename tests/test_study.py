"""Opening a study, its budget, its sampler and pruner."""

from __future__ import annotations

import math
import re
import subprocess
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch

from builders import make_spec
from harness import listed_spec, run_spec
from sweeper.errors import SpecError, SpecErrors, StorageError, StudyChangedError
from sweeper.spec import StudySpec
from sweeper.study.opening import differences, open_study
from sweeper.study.running import git_tags
from sweeper.study.samplers import grid_size, make_pruner, make_sampler, rehearse
from sweeper.views.preflight import preflight

SERIES = [[5.0], [4.0], [3.0], [3.5], [3.6], [1.0]]


@pytest.mark.parametrize(
    ("budget", "run"),
    [
        pytest.param({}, 6, id="trials"),
        pytest.param({"target": 3.2}, 3, id="target"),
        pytest.param({"patience_trials": 2}, 5, id="patience-of-trials"),
        pytest.param({"hours": 1e-9}, 0, id="hours-over"),
        pytest.param({"hours": 1.0}, 6, id="hours-left"),
    ],
)
def test_the_budget_ends_the_study(tmp_path: Path, budget: dict[str, Any], run: int) -> None:
    assert len([t for t in run_spec(listed_spec(SERIES, budget=budget), tmp_path).trials if t.value is not None]) == run


def test_hours_count_over_restarts(tmp_path: Path) -> None:
    spec = listed_spec([[1.0], [2.0]], budget={"hours": 1.0})
    ran = run_spec(spec, tmp_path)
    booked = [value for key, value in ran.study.user_attrs.items() if key.startswith("sweeper:worked_s:")]
    assert len(booked) == 1
    assert 0 < booked[0] < 3600
    ran.study.set_user_attr("sweeper:worked_s:another", 3600.0)
    more = spec.model_copy(update={"budget": spec.budget.model_copy(update={"trials": 5})})
    assert len(run_spec(more, tmp_path).trials) == 2


def test_enqueued_points_come_first_and_once(tmp_path: Path) -> None:
    spec = make_spec(
        train={"max_epochs": 1, "batch_size": 512},
        search_space={"lr": {"low": 1e-4, "high": 1.0}, "batch_size": {"choices": [256, 512]}},
        enqueue=[{"lr": 1, "batch_size": 512.0}, {"lr": 0.5}],
        budget={"trials": 3},
    )
    ran = run_spec(spec, tmp_path)
    assert ran.trials[0].params == {"lr": 1.0, "batch_size": 512}
    assert ran.trials[1].params["lr"] == 0.5
    assert type(ran.trials[0].params["batch_size"]) is int
    assert len(run_spec(spec, tmp_path).trials) == 3


def test_a_grid_smaller_than_the_budget_ends_with_its_points(tmp_path: Path) -> None:
    spec = listed_spec([[3.0], [2.0], [1.0]], sampler={"name": "grid"}, enqueue=[], budget={"trials": 100})
    ran = run_spec(spec, tmp_path)
    assert grid_size(spec) == 3
    assert sorted(t.params["model.params.row"] for t in ran.trials) == [0, 1, 2]
    assert len(run_spec(spec, tmp_path).trials) == 3


@pytest.mark.parametrize(
    ("pruner", "states"),
    [
        pytest.param({"name": "none"}, ["COMPLETE"] * 4, id="none"),
        pytest.param(
            {"name": "median", "params": {"n_startup_trials": 2}}, ["COMPLETE"] * 2 + ["PRUNED"] * 2, id="median"
        ),
        pytest.param(
            {"name": "percentile", "params": {"percentile": 90.0, "n_startup_trials": 2}},
            ["COMPLETE"] * 2 + ["PRUNED"] * 2,
            id="percentile",
        ),
        pytest.param(
            {"name": "successive_halving", "params": {"reduction_factor": 2}},
            ["COMPLETE"] * 2 + ["PRUNED"] * 2,
            id="successive-halving",
        ),
        pytest.param(
            {"name": "threshold", "params": {"upper": 6.0}}, ["COMPLETE"] * 2 + ["PRUNED"] * 2, id="threshold"
        ),
    ],
)
def test_pruners_prune_the_hopeless(tmp_path: Path, pruner: dict[str, Any], states: list[str]) -> None:
    series = [[5.0, 4.0, 3.0, 2.0], [4.0, 3.0, 2.0, 1.0], [9.0, 8.0, 7.0, 6.0], [8.0, 7.5, 7.4, 7.3]]
    assert run_spec(listed_spec(series, pruner=pruner), tmp_path).states() == states


def test_hyperband_runs_with_the_length_of_the_study(tmp_path: Path) -> None:
    spec = listed_spec([[5.0, 4.0, 3.0], [4.0, 3.0, 2.0], [9.0, 8.0, 7.0]], pruner={"name": "hyperband"})
    assert len(run_spec(spec, tmp_path).trials) == 3
    assert make_pruner(spec)._max_resource == 3


@pytest.mark.parametrize(
    ("section", "name", "params", "what"),
    [
        ("sampler", "tpe", {"n_startup_trial": 3}, "TPESampler takes no argument 'n_startup_trial'"),
        ("sampler", "tpe", {"seed": 3}, "TPESampler takes no argument 'seed'"),
        ("pruner", "median", {"n_min_trials": 0}, "MedianPruner refuses its arguments"),
        ("pruner", "threshold", {}, "ThresholdPruner refuses its arguments"),
        ("sampler", "tpe", {"gamma": 5}, "refuses its arguments"),
        ("pruner", "hyperband", {"reduction_factor": 1}, "refuses its arguments"),
    ],
)
def test_arguments_that_optuna_refuses_are_faults(section: str, name: str, params: dict[str, Any], what: str) -> None:
    space = {"lr": {"low": 0.1, "high": 1.0}, "momentum": {"low": 0.1, "high": 0.9}}
    spec = make_spec(search_space=space, **{section: {"name": name, "params": params}})
    with pytest.raises(SpecError, match=what):
        rehearse(spec)


@pytest.mark.parametrize("name", ["tpe", "random", "gp", "cmaes", "nsga"])
def test_samplers_draw_from_the_seed_and_the_number_alone(name: str) -> None:
    spec = make_spec(sampler={"name": name})

    def first_draw(number: int) -> float:
        study = optuna.create_study(sampler=make_sampler(spec, number))
        return study.ask().suggest_float("x", 0, 1)

    draws = [first_draw(number) for number in range(10)]
    assert draws == [first_draw(number) for number in range(10)]
    assert len(set(draws)) == 10


def test_a_study_of_another_program_is_refused(tmp_path: Path) -> None:
    spec = make_spec(storage=f"sqlite:///{tmp_path}/optuna.db")
    optuna.create_study(study_name="toy", storage=spec.storage).ask()
    with pytest.raises(StorageError, match="that another program made"):
        open_study(spec)


@pytest.mark.parametrize(
    ("before", "now", "changes"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 2}}, [("a.b", "1", "2")]),
        ({"a": 1}, {"a": True}, [("a", "1", "true")]),
        ({"a": 1}, {"b": 1}, [("a", "1", "absent"), ("b", "absent", "1")]),
        ({"a": [1, 2]}, {"a": [2, 1]}, [("a", "[1, 2]", "[2, 1]")]),
        ({"a": 0.1}, {"a": 1e-1}, []),
    ],
)
def test_differences_name_the_key_and_both_values(before: Any, now: Any, changes: list[Any]) -> None:
    assert differences(before, now) == changes


def test_the_threads_of_a_study_stay(tmp_path: Path) -> None:
    spec = make_spec(storage=f"sqlite:///{tmp_path}/optuna.db", workers={"threads": 3})
    assert open_study(spec).threads == 3
    auto = spec.model_copy(update={"workers": spec.workers.model_copy(update={"threads": "auto"})})
    assert open_study(auto).threads == 3


def test_git_is_asked_for_the_commit_and_changes(tmp_path: Path) -> None:
    assert git_tags(tmp_path) == {}
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("1")
    for arguments in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "x"]):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    clean = git_tags(tmp_path)
    assert len(clean["mlflow.source.git.commit"]) == 40
    assert clean["git.dirty"] == "false"
    (tmp_path / "file").write_text("2")
    assert git_tags(tmp_path)["git.dirty"] == "true"


def test_infinite_values_reach_neither_best_nor_optuna(tmp_path: Path) -> None:
    ran = run_spec(listed_spec([[math.inf, 0.5], [-math.inf, 0.7]]), tmp_path)
    assert [t.value for t in ran.trials] == [0.5, 0.7]
    assert ran.trials[1].intermediate_values == {1: 0.7}


@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [
        pytest.param({"low": 8, "high": 64, "kind": "int"}, {"low": 8.0, "high": 64.0}, "kind", id="int-to-float"),
        pytest.param({"low": 8.0, "high": 64.0}, {"low": 8.0, "high": 64.0, "step": 8.0}, "step", id="a-step"),
        pytest.param({"choices": [1, 2]}, {"choices": [2, 1]}, "choices", id="another-order"),
    ],
)
def test_another_kind_of_parameter_is_refused(tmp_path: Path, before: Any, now: Any, changed: str) -> None:
    def spec(domain: Any) -> Any:
        return make_spec(search_space={"model.params.width": domain}, storage=f"sqlite:///{tmp_path}/optuna.db")

    open_study(spec(before))
    with pytest.raises(StudyChangedError, match=rf"search_space\.model\.params\.width\.{changed}: was"):
        open_study(spec(now))
    open_study(spec(before))


def test_a_preflight_builds_what_the_extremes_ask_for(tmp_path: Path) -> None:
    few = {"data": {"source": "toys:few_digits"}, "search_space": {"batch_size": {"choices": [10, 200]}}}
    preflight(make_spec(**few, train={"validations_per_epoch": 1}), Path(__file__).parent)
    with pytest.raises(SpecError, match=r"validations_per_epoch \(4\) exceeds the optimizer steps of an epoch \(1\)"):
        preflight(make_spec(**few, train={"validations_per_epoch": 4}), Path(__file__).parent)
    with pytest.raises(SpecError, match="fused: is a speed setting"):
        preflight(make_spec(train={"optimizer_params": {"fused": False}}), Path(__file__).parent)
    preflight(make_spec(train={"optimizer_params": {"foreach": True}}), Path(__file__).parent)
    with pytest.raises(
        SpecError, match=r"model: its weights and gradients alone need \d+\.\d GiB, and this machine has"
    ):
        preflight(make_spec(search_space={"model.params.width": {"choices": [8, 2**40]}}), Path(__file__).parent)
    stepped = {"model.params.dropout": {"low": 0.0, "high": 1.0, "step": 0.3}}
    preflight(make_spec(search_space=stepped), Path(__file__).parent)


def test_an_infinity_in_the_file_is_no_null(tmp_path: Path) -> None:
    def spec(cap: float | None) -> StudySpec:
        model = {"name": "toys:raising_model", "params": {"cap": cap}}
        return make_spec(model=model, storage=f"sqlite:///{tmp_path}/optuna.db")

    open_study(spec(math.inf))
    open_study(spec(math.inf))
    with pytest.raises(StudyChangedError, match=r"model\.params\.cap: was Infinity, now null"):
        open_study(spec(None))


VAL_LOSS = {"monitor": "val_loss", "direction": "minimize"}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        pytest.param(
            {"data": {"source": "toys:double_digits"}}, r"a batch of float64 of the shape \(2, 1, 8, 8\)", id="float64"
        ),
        pytest.param(
            {"model": {"name": "toys:narrow_model"}},
            r"answers with the shape \(2, 7\), where each sample needs a number for each of the 10 classes",
            id="too few outputs",
        ),
        pytest.param(
            {"model": {"name": "toys:wide_model"}},
            r"raised RuntimeError: mat1 and mat2 .* The batch was float32 of the shape \(2, 1, 8, 8\)\.",
            id="input width",
        ),
        pytest.param(
            {"task": {"name": "toys:VectorMetric"}}, r"'all' computes the shape \(10,\), not one number", id="metric"
        ),
        pytest.param({"task": {"name": "toys:MeanLoss"}}, "returned an object of type Tensor from `loss`", id="loss"),
        pytest.param(
            {"model": {"name": "toys:raising_model", "params": {"error": "exit"}}},
            r"'toys:raising_model' raised SystemExit",
            id="forward raises",
        ),
    ],
)
def test_parts_that_do_not_fit_together_are_found_before_anything_runs(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        preflight(make_spec(**{"objective": VAL_LOSS, **sections}), Path(__file__).parent)


def test_a_fault_in_the_users_model_is_said_with_their_line() -> None:
    with pytest.raises(SpecError) as caught:
        preflight(make_spec(model={"name": "toys:wide_model"}), Path(__file__).parent)
    assert re.fullmatch(r"It happened in .*toys\.py:\d+: return self\.linear\(.*\)", caught.value.fault.todo)


def test_everything_that_nobody_knows_is_told_at_once() -> None:
    spec = make_spec(
        data={"source": "digit"},
        model={"name": "mpl"},
        task={"name": "rank"},
        train={"optimizer": "adamm"},
        sampler={"name": "tpe", "params": {"gama": 1}},
    )
    with pytest.raises(SpecErrors) as caught:
        preflight(spec, Path(__file__).parent)
    assert [".".join(map(str, fault.path)) for fault in caught.value.faults] == [
        "data.source",
        "model.name",
        "task.name",
        "train.optimizer",
        "sampler.params.gama",
    ]


@pytest.mark.parametrize(
    ("space", "name"),
    [
        pytest.param({"optimizer": {"choices": ["adamw", "sgdd"]}}, "optimizer", id="optimizer"),
        pytest.param({"model.params.widht": {"choices": [1, 2]}}, "model.params.widht", id="parameter"),
        pytest.param({"model.name": {"choices": ["mlp", "mpl"]}}, "model.name", id="model"),
    ],
)
def test_a_draw_that_cannot_be_used_is_blamed_on_the_search_space(space: dict[str, Any], name: str) -> None:
    with pytest.raises(SpecError) as caught:
        preflight(make_spec(search_space=space), Path(__file__).parent)
    assert caught.value.fault.path == ("search_space", name)


@pytest.mark.parametrize(
    ("budget", "sections", "why"),
    [
        pytest.param({"trials": 2}, {}, "the trials of the budget are done", id="trials"),
        pytest.param({"trials": 9, "target": 0.0}, {}, "budget.target (0) is reached", id="target"),
        pytest.param({"trials": 9, "hours": 1e-9}, {}, "budget.hours (1e-09) are used up", id="hours"),
        pytest.param(
            {"trials": 9, "patience_trials": 1},
            {"train": {"max_epochs": 1, "lr": 1e-9}},
            "1 trials brought nothing better (budget.patience_trials)",
            id="patience",
        ),
        pytest.param(
            {"trials": 9},
            {"sampler": {"name": "grid"}, "search_space": {"batch_size": {"choices": [64, 128]}}},
            "every point of the grid has been run",
            id="grid",
        ),
    ],
)
def test_the_end_of_a_study_has_a_reason(
    tmp_path: Path, budget: dict[str, Any], sections: dict[str, Any], why: str
) -> None:
    few = {"data": {"source": "toys:few_digits"}, "train": {"max_epochs": 1}, **sections}
    assert run_spec(make_spec(budget=budget, **few), tmp_path).why_over == why


def test_a_rehearsal_leaves_no_trace_in_the_random_states() -> None:
    before = torch.get_rng_state()
    preflight(make_spec(model={"name": "toys:narrow_model", "params": {"outputs": 10}}), Path(__file__).parent)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_momentum_that_no_optimizer_would_take_is_a_fault() -> None:
    folder = Path(__file__).parent
    with pytest.raises(SpecError, match=r"train\.momentum: the optimizer adamw has none"):
        preflight(make_spec(train={"momentum": 0.9}), folder)
    with pytest.raises(SpecError, match=r"search_space\.momentum: the optimizer adamw has none"):
        preflight(make_spec(search_space={"momentum": {"low": 0.0, "high": 0.9}}), folder)
    both = {"optimizer": {"choices": ["adamw", "sgd"]}}
    preflight(make_spec(train={"momentum": 0.9}, search_space=both), folder)


def test_labels_that_are_no_classes_are_found_before_anything_runs() -> None:
    with pytest.raises(SpecError, match=r"data: The targets of .* are integers, but no class indices"):
        preflight(make_spec(data={"source": "toys:negative_labels"}), Path(__file__).parent)


@pytest.mark.parametrize(("error", "kind"), [("exit", "SystemExit"), ("surrogate", "ValueError")])
def test_the_users_errors_are_faults_of_the_file_before_anything_runs(error: str, kind: str) -> None:
    spec = make_spec(model={"name": "toys:raising_model", "params": {"error": error, "built": True}})
    with pytest.raises(SpecError, match=rf"model\.name: 'toys:raising_model' raised {kind}"):
        preflight(spec, Path(__file__).parent)
