"""How trials end: stopping, pruning, divergence, limits, failures; and what is stored, logged and kept of each."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from builders import make_spec
from harness import listed_spec, run_spec
from sweeper.errors import SweeperError, TooManyFailuresError
from sweeper.records import TrialOutcome

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("direction", "values", "patience", "epochs_run", "reason", "value", "best_epoch"),
    [
        pytest.param("minimize", [1.0, 0.9, 0.95, 0.96, 0.5], 2, 4, "early_stopped", 0.9, 1, id="two-bad-validations"),
        pytest.param("minimize", [1.0, 0.9, 0.95, 0.96, 0.5], 1, 3, "early_stopped", 0.9, 1, id="one-bad-validation"),
        pytest.param("minimize", [1.0, 0.9, 0.95, 0.96, 0.5], 3, 5, "max_epochs", 0.5, 4, id="patient-enough"),
        pytest.param("maximize", [NAN, 0.5, 0.6, 0.4], 9, 4, "max_epochs", 0.6, 2, id="nan-first"),
        pytest.param("minimize", [0.5, NAN, 0.4], 9, 3, "max_epochs", 0.4, 2, id="nan-between"),
        pytest.param("minimize", [NAN, INF, 0.5], 9, 3, "max_epochs", 0.5, 2, id="infinite-never-best"),
        pytest.param("minimize", [0.5, NAN, NAN, 0.1], 2, 3, "early_stopped", 0.5, 0, id="nan-counts-as-bad"),
        pytest.param("maximize", [-INF, INF, 0.5], 9, 3, "max_epochs", 0.5, 2, id="plus-infinity-never-best"),
    ],
)
def test_a_trial_is_complete_with_its_best_value(
    tmp_path: Path,
    direction: str,
    values: list[float],
    patience: int,
    epochs_run: int,
    reason: str,
    value: float,
    best_epoch: int,
) -> None:
    ran = run_spec(listed_spec([values], direction, early_stopping={"patience": patience}), tmp_path)
    (trial,) = ran.trials
    assert (trial.state, trial.value) == (TrialState.COMPLETE, value)
    assert (trial.user_attrs["stop_reason"], trial.user_attrs["best_epoch"]) == (reason, best_epoch)
    assert ran.study.best_trial.number == 0
    logged = [record.metrics["val_loss"] for record in ran.tracker.records[0]]
    assert repr(logged) == repr(values[:epochs_run])  # repr: NaN equals itself
    assert ran.tracker.finished[0][0] == "FINISHED"


def test_optuna_gets_the_best_so_far_and_a_stopped_plateau_is_carried_forward(tmp_path: Path) -> None:
    values = [1.0, 0.9, 0.95, NAN, 0.5, 0.4]
    ran = run_spec(listed_spec([values], early_stopping={"patience": 2}), tmp_path)
    assert ran.trials[0].intermediate_values == {0: 1.0, 1: 0.9, 2: 0.9, 3: 0.9, 4: 0.9, 5: 0.9}
    assert len(ran.tracker.records[0]) == 4


def test_a_first_nan_is_not_reported(tmp_path: Path) -> None:
    ran = run_spec(listed_spec([[NAN, 0.5]]), tmp_path)
    assert ran.trials[0].intermediate_values == {1: 0.5}


@pytest.mark.parametrize(("n_min_trials", "state", "value"), [(1, "PRUNED", 3.0), (2, "COMPLETE", 1.0)])
def test_one_long_trial_decides_alone_only_if_allowed(
    tmp_path: Path, n_min_trials: int, state: str, value: float
) -> None:
    spec = listed_spec(
        [[4.0, 2.0], [3.0], [4.0, 3.0, 1.0]],
        search_space={"max_epochs": {"choices": [2, 1, 3]}},
        enqueue=[{"model.params.row": row, "max_epochs": epochs} for row, epochs in enumerate((2, 1, 3))],
        pruner={
            "name": "median",
            "params": {"n_startup_trials": 2, "n_warmup_steps": 1, "n_min_trials": n_min_trials},
        },
    )
    ran = run_spec(spec, tmp_path)
    assert ran.states() == ["COMPLETE", "COMPLETE", state]
    assert ran.trials[2].value == value
    if state == "PRUNED":
        assert ran.reasons()[2] == "pruned"
        assert ran.trials[2].intermediate_values == {0: 4.0, 1: 3.0}
        assert ran.tracker.finished[2][0] == "FINISHED"
        assert ran.tracker.finished[2][1]["stop_reason"] == "pruned"


@pytest.mark.parametrize(
    ("when", "states"),
    [pytest.param("always", "PRUNED", id="always"), pytest.param("stalled", "COMPLETE", id="only-while-stalled")],
)
def test_the_pruner_is_asked_when_the_file_says(tmp_path: Path, when: str, states: str) -> None:
    spec = listed_spec(
        [[1.0, 0.5, 0.4], [9.0, 8.0, 7.0]],
        pruner={"name": "median", "when": when, "params": {"n_startup_trials": 1}},
    )
    assert run_spec(spec, tmp_path).states() == ["COMPLETE", states]


def test_nothing_stops_or_prunes_before_min_epochs(tmp_path: Path) -> None:
    spec = listed_spec(
        [[1.0, 1.0, 1.0, 1.0], [9.0, 9.0, 9.0, 9.0]],
        early_stopping={"patience": 1, "min_epochs": 3},
        pruner={"name": "median", "params": {"n_startup_trials": 1}},
    )
    ran = run_spec(spec, tmp_path)
    assert [len(records) for records in ran.tracker.records.values()] == [3, 3]
    assert ran.reasons() == ["early_stopped", "early_stopped"]


def test_an_all_nan_trial_fails_nobody_else(tmp_path: Path) -> None:
    """Two trials with no finite value at all, then a good one, under the median pruner."""
    spec = listed_spec(
        [[NAN] * 3, [NAN] * 3, [3.0, 2.0, 1.0]],
        pruner={"name": "median", "params": {"n_startup_trials": 1}},
        budget={"trials": 1},
    )
    ran = run_spec(spec, tmp_path)
    assert ran.states() == ["FAIL", "FAIL", "COMPLETE"]
    assert ran.trials[2].value == 1.0
    assert "There is no finite val_loss: 3 validations were made." in ran.trials[0].user_attrs["error"]


@pytest.mark.parametrize(
    ("keep_last", "kept"),
    [pytest.param(1, ["best.pt", "last-0004.pt"], id="one"), pytest.param(0, ["best.pt"], id="best-only")],
)
def test_keeping_few_checkpoints_never_removes_the_best(tmp_path: Path, keep_last: int, kept: list[str]) -> None:
    from sweeper.training.checkpoint import open_checkpoint

    spec = listed_spec([[0.5, 0.3, 0.4, 0.45, NAN]], checkpoints={"keep_last": keep_last})
    ran = run_spec(spec, tmp_path)
    assert ran.on_disk(0) == kept
    best = open_checkpoint(tmp_path / "checkpoints/trial-0000/best.pt")
    assert (best["epoch"], best["value"]) == (1, 0.3)


def test_an_early_stopped_trial_can_be_the_best(tmp_path: Path) -> None:
    ran = run_spec(listed_spec([[0.5, 0.4, 0.3], [0.1, 0.9, 0.9]], early_stopping={"patience": 1}), tmp_path)
    assert ran.reasons() == ["max_epochs", "early_stopped"]
    assert (ran.study.best_trial.number, ran.study.best_value) == (1, 0.1)


# --- divergence, limits, failures


def digits_spec(**sections: Any) -> Any:
    return make_spec(
        train={"max_epochs": 2, "batch_size": 256, **sections.pop("train", {})},
        search_space={"lr": {"low": 1e-4, "high": 1e-2, "log": True}, **sections.pop("search_space", {})},
        **sections,
    )


def test_divergence_is_pruned_and_infeasible(tmp_path: Path) -> None:
    spec = make_spec(
        model={"name": "toys:poisoned_model"},
        train={"max_epochs": 2, "batch_size": 256},
        search_space={"lr": {"low": 1e-4, "high": 1e-2}},
        budget={"trials": 1},
    )
    ran = run_spec(spec, tmp_path)
    assert (ran.states(), ran.reasons()) == (["PRUNED"], ["diverged"])
    assert ran.trials[0].constraints == {"diverged": 1.0}
    assert ran.trials[0].value is None
    assert ran.tracker.finished[0] == ("FINISHED", ran.tracker.finished[0][1])
    assert ran.tracker.finished[0][1]["stop_reason"] == "diverged"
    assert ran.on_disk(0) == []


def test_draws_outside_the_limits_are_not_trained_and_not_counted(tmp_path: Path) -> None:
    spec = digits_spec(
        search_space={"batch_size": {"choices": [128, 256]}, "accumulation_steps": {"choices": [1, 2, 4]}},
        limits={"effective_batch_size": {"max": 256}},
        sampler={"name": "random"},
        budget={"trials": 3},
    )
    ran = run_spec(spec, tmp_path)
    outside = [t for t in ran.trials if t.user_attrs["stop_reason"] == "outside_limits"]
    trained = [t for t in ran.trials if t.user_attrs["stop_reason"] == "max_epochs"]
    assert len(trained) == 3
    assert outside
    assert all(t.state == TrialState.PRUNED and t.value is None and t.constraints for t in outside)
    assert all(t.params["batch_size"] * t.params["accumulation_steps"] <= 256 for t in trained)
    assert sorted(ran.tracker.started) == [t.number for t in trained]


def test_a_hundred_draws_outside_in_a_row_stop_the_study(tmp_path: Path) -> None:
    spec = digits_spec(limits={"effective_batch_size": {"max": 8}}, sampler={"name": "random"})
    with pytest.raises(SweeperError, match="100 draws in a row were outside `limits`") as caught:
        run_spec(spec, tmp_path)
    assert caught.value.exit_code == 1


def test_failing_trials_are_replaced_until_there_are_too_many(tmp_path: Path) -> None:
    spec = make_spec(
        model={"name": "toys:failing_model"},
        train={"max_epochs": 1, "batch_size": 256},
        search_space={"model.params.row": {"choices": [0, 1]}},
        enqueue=[{"model.params.row": row} for row in (1, 0, 0)],
        budget={"trials": 2, "max_failures": 1},
    )
    ran = run_spec(spec, tmp_path)
    assert ran.states() == ["FAIL", "COMPLETE", "COMPLETE"]
    failed = next(t for t in ran.trials if t.state == TrialState.FAIL)
    assert "ZeroDivisionError" in failed.user_attrs["error"]
    assert ran.tracker.finished[failed.number][0] == "FAILED"
    log = (tmp_path / f"checkpoints/trial-{failed.number:04d}/trial.log").read_text()
    assert "this model cannot be trained" in log
    assert "Traceback" in log


@pytest.mark.parametrize(
    ("rows", "max_failures", "states", "words"),
    [
        pytest.param([1, 1], 1, ["FAIL"] * 2, "2 trials failed, more than budget.max_failures", id="too-many"),
        pytest.param([1, 1, 1], 9, ["FAIL"] * 3, "the first 3 trials all failed with the same error", id="from-start"),
        pytest.param([0, 1, 1, 1], 2, ["COMPLETE", *["FAIL"] * 3], "3 trials failed, more", id="after-a-good-one"),
    ],
)
def test_trials_that_keep_failing_are_exit_3(
    tmp_path: Path, rows: list[int], max_failures: int, states: list[str], words: str
) -> None:
    spec = make_spec(
        model={"name": "toys:failing_model"},
        train={"max_epochs": 1, "batch_size": 256},
        search_space={"model.params.row": {"choices": [0, 1]}, "lr": {"low": 1e-4, "high": 1e-2}},
        enqueue=[{"model.params.row": row, "lr": 1e-3 + number / 1e4} for number, row in enumerate(rows)],
        budget={"trials": 9, "max_failures": max_failures},
    )
    with pytest.raises(TooManyFailuresError, match=words) as caught:
        run_spec(spec, tmp_path)
    assert caught.value.exit_code == 3
    ended = optuna.load_study(study_name=spec.study, storage=f"sqlite:///{tmp_path}/optuna.db").trials
    assert [trial.state.name for trial in ended if trial.state.is_finished()] == states


def test_a_time_limit_before_any_validation_is_a_failure(tmp_path: Path) -> None:
    spec = digits_spec(train={"timeout_s": 1e-9}, budget={"trials": 1, "max_failures": 0})
    with pytest.raises(TooManyFailuresError, match="There is no finite val_accuracy: timeout_s was over"):
        run_spec(spec, tmp_path)


def test_a_time_limit_after_a_validation_is_complete(tmp_path: Path) -> None:
    spec = make_spec(
        model={"name": "toys:slow_model"},
        train={"max_epochs": 100, "batch_size": 2048, "timeout_s": 0.5},
        search_space={"lr": {"low": 1e-4, "high": 1e-2}},
        early_stopping={"patience": 100},
        budget={"trials": 1},
    )
    ran = run_spec(spec, tmp_path)
    assert (ran.states(), ran.reasons()) == (["COMPLETE"], ["time_limit"])
    assert ran.trials[0].value == max(r.metrics["val_accuracy"] for r in ran.tracker.records[0])


@pytest.mark.parametrize("error", ["exit", "interrupt", "base", "surrogate", "unspeakable"])
def test_whatever_the_users_code_raises_ends_its_trial_alone(tmp_path: Path, error: str) -> None:
    spec = make_spec(
        model={"name": "toys:raising_model", "params": {"error": error}},
        train={"max_epochs": 1},
        search_space={"lr": {"low": 1e-4, "high": 1e-2}},
        budget={"trials": 1, "max_failures": 1},
    )
    with pytest.raises(TooManyFailuresError):
        run_spec(spec, tmp_path)
    trials = optuna.load_study(study_name="toy", storage=f"sqlite:///{tmp_path}/optuna.db").trials
    assert [t.state for t in trials] == [TrialState.FAIL] * 2
    assert "raise self.error" in trials[0].user_attrs["error"]
    assert "Traceback" in (tmp_path / "checkpoints/trial-0000/trial.log").read_text()


def test_a_closed_output_hides_nothing(tmp_path: Path) -> None:
    spec = make_spec(model={"name": "toys:closing_model"}, budget={"trials": 1, "max_failures": 0})
    with pytest.raises(TooManyFailuresError, match="ValueError: after the close"):
        run_spec(spec, tmp_path)
    log = (tmp_path / "checkpoints/trial-0000/trial.log").read_text().splitlines()
    assert "still heard" in log
    assert log[-2:] == ["ValueError: after the close", ""]


@pytest.mark.parametrize("way", ["exit", "raise", "go on"])
def test_a_child_that_the_users_code_forks_is_no_second_worker(tmp_path: Path, way: str) -> None:
    few = {"source": "toys:few_digits"}
    model = {"name": "toys:forking_model", "params": {"way": way}}
    train = {"max_epochs": 1, "batch_size": 100}
    ran = run_spec(make_spec(data=few, model=model, train=train, budget={"trials": 2}), tmp_path)
    assert ran.states() == ["COMPLETE", "COMPLETE"]
    assert [len(ran.tracker.records[number]) for number in (0, 1)] == [1, 1]
    records = (tmp_path / "checkpoints/trial-0000/records.jsonl").read_text().splitlines()
    assert len(records) == 1


def test_a_weight_that_is_no_number_is_divergence(tmp_path: Path) -> None:
    task = {"name": "toys:NanWeight"}
    objective = {"monitor": "val_loss", "direction": "minimize"}
    ran = run_spec(make_spec(task=task, objective=objective, budget={"trials": 1}), tmp_path)
    assert (ran.states(), ran.reasons()) == (["PRUNED"], ["diverged"])


@pytest.mark.parametrize(
    ("error", "summary"),
    [
        pytest.param(
            'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n    ^^^\nValueError: no',
            "ValueError: no",
            id="traceback",
        ),
        pytest.param(
            'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\nValueError: first\nand second',
            "ValueError: first",
            id="message-of-two-lines",
        ),
        pytest.param("The disk is full.\n  Free some space.", "The disk is full.", id="sentence"),
        pytest.param(None, "", id="none"),
    ],
)
def test_an_error_in_one_line(error: str | None, summary: str) -> None:
    assert TrialOutcome("failed", error=error).summary == summary
