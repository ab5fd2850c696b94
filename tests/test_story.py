"""The order of things inside one trial, and what a worker does that loses it: spies on real parts, real databases."""

from __future__ import annotations

import gc
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.study._constrained_optimization import _get_constraints_from_system_attrs
from optuna.trial import TrialState

import toys
from builders import make_spec
from harness import Remembered, listed_spec, run_spec
from sweeper.errors import TooManyFailuresError
from sweeper.ownership import Owner
from sweeper.spec import StudySpec
from sweeper.study.opening import open_study
from sweeper.training.trial_folder import TrialFolder

SERIES = [[1.0, 0.9, 0.8]]


def test_every_validation_is_recorded_then_saved_then_reported_then_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def spy(owner: Any, name: str, word: str) -> None:
        original = getattr(owner, name)

        def noted(*arguments: Any, **keywords: Any) -> Any:
            result = original(*arguments, **keywords)
            order.append(word)
            return result

        monkeypatch.setattr(owner, name, noted)

    spy(TrialFolder, "append_record", "record")
    spy(TrialFolder, "save_last", "weights")
    spy(optuna.trial.Trial, "report", "report")
    spy(Remembered, "trial_record", "log")
    run_spec(listed_spec(SERIES), tmp_path)
    assert order == ["record", "weights", "report", "log"] * 3


def test_a_worker_that_lost_its_trial_writes_nothing_more_and_takes_new_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken over by a worker elsewhere after the first validation."""
    thief = Owner("elsewhere", "boot", "pid:[1]", 1, "1", "token").to_text()
    logged = Remembered.trial_record

    def log_and_lose(self: Remembered, number: int, record: Any) -> None:
        logged(self, number, record)
        if number == 0:
            with closing(sqlite3.connect(tmp_path / "optuna.db")) as database, database:
                change = (
                    "UPDATE trial_system_attributes SET value_json = ? WHERE key = 'sweeper:owner' AND trial_id = 1"
                )
                assert database.execute(change, (thief,)).rowcount == 1

    monkeypatch.setattr(Remembered, "trial_record", log_and_lose)
    ran = run_spec(listed_spec([SERIES[0], SERIES[0]]), tmp_path)
    assert ran.states() == ["RUNNING", "COMPLETE"]
    assert ran.trials[0].intermediate_values == {0: 1.0}
    assert len(ran.tracker.records[0]) == 1
    assert set(ran.tracker.finished) == {1}
    assert len((ran.folder / "trial-0000/records.jsonl").read_text().splitlines()) == 1
    assert ran.on_disk(0) == ["best.pt", "last-0000.pt"]


@pytest.mark.parametrize("error", ["memory", "accelerator memory", "host memory"])
def test_out_of_memory_is_pruned_and_infeasible_and_no_failure(tmp_path: Path, error: str) -> None:
    spec = make_spec(
        model={"name": "toys:raising_model", "params": {"error": error}},
        search_space={"lr": {"low": 1e-4, "high": 1e-2}},
        budget={"trials": 2, "max_failures": 0},
    )
    ran = run_spec(spec, tmp_path)
    assert (ran.states(), ran.reasons()) == (["PRUNED"] * 2, ["out_of_memory"] * 2)
    assert ran.tracker.finished[0][0] == "FINISHED"
    for trial in ran.trials:
        assert _get_constraints_from_system_attrs(trial.system_attrs) == {"out_of_memory": 1.0}


def test_no_trial_leaves_its_model_in_memory(tmp_path: Path) -> None:
    """Also not one that failed: its exception holds the frames, and they the model."""
    toys.LIVING.clear()
    spec = make_spec(
        model={"name": "toys:failing_model"},
        train={"max_epochs": 1, "batch_size": 256},
        search_space={"model.params.row": {"choices": [0, 1]}},
        enqueue=[{"model.params.row": 0}, {"model.params.row": 1}],
        budget={"trials": 1, "max_failures": 1},
    )
    gc.disable()
    try:
        run_spec(spec, tmp_path)
        run_spec(spec.model_copy(update={"budget": spec.budget.model_copy(update={"trials": 2})}), tmp_path)
    finally:
        gc.enable()
    assert len(toys.LIVING) == 0


def test_plateau_lowers_the_learning_rate_of_a_trial_that_does_not_improve(tmp_path: Path) -> None:
    """Patience 1: the second validation in a row that is no better halves it."""
    scheduler = {"name": "plateau", "factor": 0.5, "patience": 1}
    spec = listed_spec([[1.0, 1.1, 1.2, 1.3, 1.4, 1.5]], train={"lr": 0.1, "scheduler": scheduler})
    rates = [record.metrics["optim/lr"] for record in run_spec(spec, tmp_path).tracker.records[0]]
    assert rates == pytest.approx([0.1, 0.1, 0.1, 0.05, 0.05, 0.025])


def test_validation_runs_in_the_precision_of_training(tmp_path: Path) -> None:
    toys.AUTOCAST.clear()
    run_spec(make_spec(model={"name": "toys:watched_model"}, train={"max_epochs": 1, "precision": "bf16"}), tmp_path)
    assert {("train", torch.bfloat16), ("eval", torch.bfloat16)} == toys.AUTOCAST


def test_a_trial_that_cannot_be_built_is_logged_with_its_values(tmp_path: Path) -> None:
    spec = make_spec(
        model={"name": "toys:raising_model", "params": {"error": "base", "built": True}},
        search_space={"lr": {"low": 1e-4, "high": 1e-2}},
        budget={"trials": 1, "max_failures": 0},
    )
    tracker = Remembered()
    with pytest.raises(TooManyFailuresError):
        run_spec(spec, tmp_path, tracker=tracker)
    params = tracker.started[0]["params"]
    assert 1e-4 <= params["lr"] <= 1e-2
    assert (params["model.name"], tracker.finished[0][0]) == ("toys:raising_model", "FAILED")


def test_a_shorter_checkpoint_interval_on_resume_fails_nobody(tmp_path: Path) -> None:
    """Nothing was saved before the interruption, so the trial begins again; what was recorded stays."""
    epochs = iter(range(9))
    spec = listed_spec([[1.0, 0.9, 0.8, 0.7]], checkpoints={"every_epochs": 4}, budget={"max_failures": 0})
    first = run_spec(spec, tmp_path, after_record=lambda: next(epochs) == 2)
    assert first.states() == ["RUNNING"]
    changed = spec.model_copy(update={"checkpoints": spec.checkpoints.model_copy(update={"every_epochs": 1})})
    ran = run_spec(changed, tmp_path)
    assert (ran.states(), ran.trials[0].value) == (["COMPLETE"], 0.7)


def test_the_global_switches_of_one_trials_code_do_not_reach_the_next(tmp_path: Path) -> None:
    spec = make_spec(model={"name": "toys:meddling_model"}, train={"max_epochs": 1}, budget={"trials": 2})
    assert run_spec(spec, tmp_path).states() == ["COMPLETE", "COMPLETE"]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_grid_ends_with_its_points_whatever_became_of_them(tmp_path: Path, seed: int) -> None:
    """Points outside the limits and failed ones are not drawn a second time."""
    spec = make_spec(
        model={"name": "toys:failing_model"},
        train={"max_epochs": 1},
        search_space={"model.params.row": {"choices": [0, 1]}, "batch_size": {"choices": [256, 512, 1024]}},
        limits={"effective_batch_size": {"max": 512}},
        budget={"trials": 20, "max_failures": 5},
        sampler={"name": "grid", "seed": seed},
    )
    ran = run_spec(spec, tmp_path)
    assert ran.why_over == "every point of the grid has been run"
    assert sorted((t.params["batch_size"], t.params["model.params.row"], t.state.name) for t in ran.trials) == [
        (256, 0, "COMPLETE"),
        (256, 1, "FAIL"),
        (512, 0, "COMPLETE"),
        (512, 1, "FAIL"),
        (1024, 0, "PRUNED"),
        (1024, 1, "PRUNED"),
    ]


def test_no_password_reaches_the_database_of_the_study(tmp_path: Path) -> None:
    values = make_spec(storage=f"sqlite:///{tmp_path}/optuna.db").model_dump()
    tracking = {"uri": "http://me:hunter2@127.0.0.1:5000"}
    open_study(StudySpec.model_validate({**values, "tracking": tracking}, strict=False))
    assert b"hunter2" not in (tmp_path / "optuna.db").read_bytes()


def test_another_number_of_threads_is_said(tmp_path: Path) -> None:
    def spec(threads: int) -> StudySpec:
        return make_spec(storage=f"sqlite:///{tmp_path}/optuna.db", workers={"threads": threads})

    open_study(spec(1))
    with pytest.warns(UserWarning, match="threads is 2, and the study began with 1"):
        assert open_study(spec(2)).threads == 2


def test_each_epoch_is_one_step_to_optuna_for_every_batch_size(tmp_path: Path) -> None:
    spec = make_spec(
        data={"source": "toys:many_rows"},
        model={"name": "mlp", "params": {"width": 4}},
        train={"max_epochs": 3},
        search_space={"batch_size": {"choices": [10, 100]}},
        enqueue=[{"batch_size": 10}, {"batch_size": 100}],
    )
    ran = run_spec(spec, tmp_path)
    assert [t.params["batch_size"] for t in ran.trials] == [10, 100]
    assert [list(t.intermediate_values) for t in ran.trials] == [[0, 1, 2], [0, 1, 2]]
    for number in (0, 1):
        assert "reported" not in (ran.folder / f"trial-{number:04d}/trial.log").read_text()


def test_an_all_nan_trial_after_finite_ones_fails_with_its_reason(tmp_path: Path) -> None:
    nan = float("nan")
    pruner = {"name": "median", "params": {"n_startup_trials": 1}}
    series = [[1.0, 0.9], [0.9, 0.8], [nan, nan], [0.7, 0.6]]
    ran = run_spec(listed_spec(series, pruner=pruner, budget={"trials": 3}), tmp_path)
    assert ran.states() == ["COMPLETE", "COMPLETE", "FAIL", "COMPLETE"]
    assert ran.trials[2].value is None
    assert ran.trials[2].user_attrs["error"] == "There is no finite val_loss: 2 validations were made."
    assert ran.study.best_trial.number == 3


def test_booleans_survive_the_database(tmp_path: Path) -> None:
    space = {"model.params.batch_norm": {"choices": [True, False]}}
    points = [{"model.params.batch_norm": True}, {"model.params.batch_norm": False}]
    ran = run_spec(make_spec(search_space=space, enqueue=points, train={"max_epochs": 1}), tmp_path)
    assert [t.params["model.params.batch_norm"] for t in ran.trials] == [True, False]
    assert all(type(t.params["model.params.batch_norm"]) is bool for t in ran.trials)
    configs = [json.loads((ran.folder / f"trial-{n:04d}/config.json").read_text()) for n in (0, 1)]
    assert [config["model"]["params"]["batch_norm"] for config in configs] == [True, False]


def test_signs_that_mlflow_does_not_take_are_replaced_in_the_names_of_params(tmp_path: Path) -> None:
    spec = make_spec(model={"name": "toys:flat_model", "params": {"x#1": 2, "sub": {"a/b": 3}}}, budget={"trials": 1})
    started = run_spec(spec, tmp_path).tracker.started[0]["params"]
    assert (started["model.params.x_1"], started["model.params.sub.a_b"]) == (2, 3)


def test_drawn_and_applied_learning_rates_are_both_logged(tmp_path: Path) -> None:
    train = {"max_epochs": 1, "lr": 0.1, "lr_scaling": "linear", "batch_size": 64, "accumulation_steps": 2}
    started = run_spec(make_spec(train=train, budget={"trials": 1}), tmp_path).tracker.started[0]["params"]
    assert (started["lr"], started["applied_lr"], started["effective_batch_size"]) == (0.1, 0.05, 128)


def test_a_study_of_five_that_lost_a_worker_in_its_fourth_has_five_in_the_end(tmp_path: Path) -> None:
    trials = iter(range(100))
    spec = listed_spec([[1.0 - 0.1 * number, 0.5] for number in range(5)])
    stopped = run_spec(spec, tmp_path, after_record=lambda: next(trials) == 6)
    assert stopped.states() == ["COMPLETE"] * 3 + ["RUNNING", "WAITING"]
    again = run_spec(spec, tmp_path)
    assert again.states() == ["COMPLETE"] * 5
    assert set(again.tracker.started) == {3, 4}
    assert run_spec(spec, tmp_path).tracker.started == {}
    assert all(t.state == TrialState.COMPLETE for t in again.trials)
