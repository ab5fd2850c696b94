"""Killed and resumed equals never killed: weights bit for bit, records, proposals. Real processes, real SIGKILL."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch

import sweeper.pruning
import sweeper.space
from builders import make_spec
from harness import Ran, listed_spec, run_spec
from sweeper.ownership import Claims
from sweeper.spec import StudySpec
from sweeper.training.trial_folder import TrialFolder, open_checkpoint

TIMINGS = ("speed/", "memory/")


def start(spec: StudySpec, folder: Path, place: str | None = None) -> int:
    """Run the study in a process of its own and return its id. It SIGKILLs itself right after the n-th call of
    something, `place` being "method:n" of the trial folder, or "Owner.method:n" of another of `PLACES`."""
    pid = os.fork()
    if pid:
        return pid
    try:
        if place is not None:
            _die_after(*place.split(":"))
        run_spec(spec, folder)
        os._exit(0)
    finally:
        traceback.print_exc()
        os._exit(1)


PLACES: dict[str, Any] = {
    "TrialFolder": TrialFolder,
    "Claims": Claims,
    "Study": optuna.Study,
    "space": sweeper.space,
    "PrunersNote": sweeper.pruning._Held,
}


def _die_after(place: str, count: str) -> None:
    owner_name, _, name = place.rpartition(".")
    owner, calls = PLACES[owner_name or "TrialFolder"], itertools.count(1)
    original = getattr(owner, name)

    def then_die(*arguments: Any, **keywords: Any) -> Any:
        result = original(*arguments, **keywords)
        if next(calls) == int(count):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, then_die)


def run_killed(spec: StudySpec, folder: Path, place: str) -> None:
    _, status = os.waitpid(start(spec, folder, place), 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def trial_spec(optimizer: str, precision: str, **sections: Any) -> StudySpec:
    return make_spec(
        data={
            "source": "toys:few_digits",
            "augment": [{"random_crop": {"padding": 1}}, {"random_rotation": {"degrees": 10}}],
        },
        model={"name": "cnn", "params": {"width": 4, "batch_norm": True, "dropout": 0.2}},
        train={
            "max_epochs": 4,
            "optimizer": optimizer,
            "precision": precision,
            "init_scale": 2.0**20,
            "scheduler": {"name": "one_cycle"},
            "batch_size": 48,
            "accumulation_steps": 2,
            **sections.pop("train", {}),
        },
        search_space={"lr": {"low": 1e-3, "high": 1e-2, "log": True}},
        budget={"trials": 1, **sections.pop("budget", {})},
        workers={"threads": 1, **sections.pop("workers", {})},
        **sections,
    )


def final_state(ran: Ran, number: int = 0) -> dict[str, Any]:
    folder = ran.folder / f"trial-{number:04d}"
    return open_checkpoint(sorted(folder.glob("last-*.pt"))[-1])["session"]


def measured(ran: Ran, number: int = 0) -> list[dict[str, float]]:
    """What was recorded of each validation, timings and memory apart."""
    lines = (ran.folder / f"trial-{number:04d}/records.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line)["metrics"].items() if not name.startswith(TIMINGS)}
        for line in lines
    ]


def assert_same_bits(a: Any, b: Any, path: str = "") -> None:
    assert type(a) is type(b), path
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            if key not in ("elapsed_s",):
                assert_same_bits(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same_bits(x, y, f"{path}[{index}]")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), path
    else:
        assert repr(a) == repr(b), path


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_killed_trial_ends_bit_equal(tmp_path: Path, optimizer: str, precision: str, num_workers: int) -> None:
    spec = trial_spec(optimizer, precision, speed={"num_workers": num_workers})
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = run_spec(spec, tmp_path / "whole")
    run_killed(spec, tmp_path / "killed", "save_last:2")
    resumed = run_spec(spec, tmp_path / "killed")
    assert resumed.trials[0].user_attrs["attempt"] == 2
    assert_same_bits(final_state(whole), final_state(resumed))
    assert measured(whole) == measured(resumed)
    assert whole.trials[0].value == resumed.trials[0].value
    assert whole.trials[0].intermediate_values == resumed.trials[0].intermediate_values


@pytest.mark.parametrize("place", ["append_record:1", "append_record:3", "save_best:1", "save_last:3", "save_last:4"])
@pytest.mark.parametrize("every_epochs", [1, 3])
def test_a_kill_at_any_place_changes_nothing(tmp_path: Path, place: str, every_epochs: int) -> None:
    """Between record, best, weights and report; also after the last epoch, before the result was told."""
    if every_epochs == 3 and place in ("save_last:3", "save_last:4"):
        place = "save_last:1"
    spec = trial_spec("adamw", "fp32", checkpoints={"every_epochs": every_epochs})
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = run_spec(spec, tmp_path / "whole")
    run_killed(spec, tmp_path / "killed", place)
    resumed = run_spec(spec, tmp_path / "killed")
    assert measured(whole) == measured(resumed)
    assert (resumed.states(), resumed.reasons()) == (["COMPLETE"], ["max_epochs"])
    assert whole.trials[0].value == resumed.trials[0].value
    assert whole.trials[0].intermediate_values == resumed.trials[0].intermediate_values
    logged = [record.validation for record in resumed.tracker.records[0]]
    assert logged == sorted(set(logged))
    bests = [open_checkpoint(r.folder / "trial-0000/best.pt") for r in (whole, resumed)]
    assert_same_bits(bests[0], bests[1])


@pytest.mark.parametrize("sampler", ["tpe", "random", "qmc", "cmaes", "nsga", "gp", "grid"])
def test_a_killed_study_proposes_what_an_uninterrupted_one_would(tmp_path: Path, sampler: str) -> None:
    """One worker; killed in its third trial. Points, values, states and reports are equal."""
    space: dict[str, Any] = {
        "lr": {"low": 1e-3, "high": 0.1, "log": True},
        "momentum": {"low": 0.0, "high": 0.95},
        "batch_size": {"choices": [128, 256]},
    }
    if sampler == "grid":
        space = {"lr": {"choices": [0.001, 0.01, 0.1]}, "batch_size": {"choices": [128, 256]}}
    params = {"n_startup_trials": 2} if sampler in ("tpe", "gp", "cmaes") else {}
    spec = make_spec(
        train={"max_epochs": 3, "optimizer": "sgd"},
        search_space=space,
        sampler={"name": sampler, "params": params},
        budget={"trials": 5},
        workers={"threads": 1},
        pruner={"name": "median", "params": {"n_startup_trials": 2}},
    )
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = run_spec(spec, tmp_path / "whole")
    run_killed(spec, tmp_path / "killed", "save_last:8")
    resumed = run_spec(spec, tmp_path / "killed")
    assert [trial_facts(t) for t in whole.trials] == [trial_facts(t) for t in resumed.trials]
    assert len(resumed.trials) == 5
    if sampler != "gp":  # which may well ask for a point again
        assert len({tuple(t.params.items()) for t in resumed.trials}) == 5


def trial_facts(trial: optuna.trial.FrozenTrial) -> tuple[Any, ...]:
    return (trial.number, trial.state, trial.value, trial.params, trial.intermediate_values)


def test_the_budget_counts_all_runs_together(tmp_path: Path) -> None:
    spec = trial_spec("sgd", "fp32", budget={"trials": 3}, train={"max_epochs": 2})
    run_killed(spec, tmp_path, "save_last:3")
    assert len(run_spec(spec, tmp_path).trials) == 3
    again = run_spec(spec, tmp_path)
    assert len(again.trials) == 3
    assert again.tracker.started == {}


def test_a_pruner_that_prunes_everything_ends(tmp_path: Path) -> None:
    spec = trial_spec(
        "sgd",
        "fp32",
        budget={"trials": 3},
        pruner={"name": "threshold", "params": {"lower": 2.0}},
        train={"max_epochs": 3},
    )
    ran = run_spec(spec, tmp_path)
    assert ran.states() == ["PRUNED"] * 3
    assert len(run_spec(spec, tmp_path).trials) == 3


def test_two_processes_share_one_budget(tmp_path: Path) -> None:
    spec = trial_spec("sgd", "fp32", budget={"trials": 6}, train={"max_epochs": 2})
    for pid in [start(spec, tmp_path), start(spec, tmp_path)]:
        assert os.waitpid(pid, 0) == (pid, 0)
    trials = run_spec(spec, tmp_path).trials
    assert [t.number for t in trials] == list(range(6))
    assert {t.state.name for t in trials} == {"COMPLETE"}
    assert len({tuple(t.params.items()) for t in trials}) == 6


def test_a_trial_that_kills_its_workers_ends_failed(tmp_path: Path) -> None:
    spec = trial_spec(
        "sgd", "fp32", budget={"trials": 1}, train={"max_epochs": 2}, workers={"threads": 1, "max_attempts": 2}
    )
    run_killed(spec, tmp_path, "append_record:1")
    run_killed(spec, tmp_path, "sweep_temporaries:1")
    ran = run_spec(spec, tmp_path)
    assert ran.states() == ["FAIL", "COMPLETE"]
    assert ran.trials[0].user_attrs["error"] == "Its workers died 2 times without a new checkpoint."


def test_a_trial_killed_twice_goes_on_from_its_latest_checkpoint(tmp_path: Path) -> None:
    spec = trial_spec("adamw", "fp32", train={"max_epochs": 6})
    run_killed(spec, tmp_path, "save_last:2")
    run_killed(spec, tmp_path, "save_last:2")
    ran = run_spec(spec, tmp_path)
    assert (len(ran.trials), ran.trials[0].user_attrs["attempt"]) == (1, 3)
    log = (tmp_path / "checkpoints/trial-0000/trial.log").read_text()
    assert "Attempt 2 goes on after epoch 1." in log
    assert "Attempt 3 goes on after epoch 3." in log


def test_a_lost_checkpoint_fails_the_trial_and_tries_its_point_again(tmp_path: Path) -> None:
    spec = trial_spec("adamw", "fp32")
    run_killed(spec, tmp_path, "save_last:3")
    for path in (tmp_path / "checkpoints/trial-0000").glob("last-*.pt"):
        path.write_bytes(b"damaged")
    ran = run_spec(spec, tmp_path)
    assert ran.states() == ["FAIL", "COMPLETE"]
    assert ran.trials[0].params == ran.trials[1].params
    assert "last-0002.pt: not a usable checkpoint" in ran.trials[0].user_attrs["error"]


def test_a_damaged_last_checkpoint_falls_back_to_the_one_before(tmp_path: Path) -> None:
    spec = trial_spec("adamw", "fp32")
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole = run_spec(spec, tmp_path / "whole")
    run_killed(spec, tmp_path / "killed", "save_last:3")
    path = tmp_path / "killed/checkpoints/trial-0000/last-0002.pt"
    path.write_bytes(path.read_bytes()[:-100])
    resumed = run_spec(spec, tmp_path / "killed")
    assert_same_bits(final_state(whole), final_state(resumed))
    log = (tmp_path / "killed/checkpoints/trial-0000/trial.log").read_text()
    assert "last-0002.pt" in log


def test_a_redone_epoch_that_differs_is_warned_about_and_the_first_value_stays(tmp_path: Path) -> None:
    spec = trial_spec("adamw", "fp32", checkpoints={"every_epochs": 2})
    run_killed(spec, tmp_path, "append_record:3")
    path = tmp_path / "checkpoints/trial-0000/records.jsonl"
    lines = path.read_text().splitlines()
    record = json.loads(lines[2])
    record["metrics"]["val_accuracy"] = 0.123
    path.write_text("\n".join([*lines[:2], json.dumps(record)]) + "\n")
    ran = run_spec(spec, tmp_path)
    assert [m["val_accuracy"] for m in measured(ran)][2] == 0.123
    log = (tmp_path / "checkpoints/trial-0000/trial.log").read_text()
    assert "epoch 2 was redone and val_accuracy is 0." in log
    assert "the first time it was 0.123, which stays recorded" in log


def test_leaving_after_an_epoch_releases_the_trial(tmp_path: Path) -> None:
    spec = trial_spec("adamw", "fp32", checkpoints={"every_epochs": 3})
    (tmp_path / "whole").mkdir()
    whole = run_spec(spec, tmp_path / "whole")
    asked = iter([False, False, True, True, True])
    left = run_spec(spec, tmp_path, leave=lambda: next(asked))
    assert left.states() == ["RUNNING"]
    assert left.tracker.finished[0][0] == "KILLED"
    resumed = run_spec(spec, tmp_path)
    assert (resumed.states(), resumed.trials[0].user_attrs["deaths"]) == (["COMPLETE"], 0)
    assert_same_bits(final_state(whole), final_state(resumed))


def test_a_stopped_process_is_no_dead_one(tmp_path: Path) -> None:
    """SIGSTOP within the grace period: its trial is left alone, and its result is the one that counts."""
    spec = trial_spec("sgd", "fp32", budget={"trials": 2}, train={"max_epochs": 6}, early_stopping={"patience": 9})
    pid = start(spec, tmp_path)
    try:
        while not list((tmp_path / "checkpoints").glob("trial-0000/last-*.pt")):
            time.sleep(0.02)
        os.kill(pid, signal.SIGSTOP)
        other = run_spec(spec, tmp_path)
        assert 0 not in other.tracker.started
    finally:
        os.kill(pid, signal.SIGCONT)
    assert os.waitpid(pid, 0) == (pid, 0)
    ran = run_spec(spec, tmp_path)
    assert ran.states() == ["COMPLETE", "COMPLETE"]
    assert ran.trials[0].user_attrs["attempt"] == 1


@pytest.mark.parametrize("sampler", ["random", "tpe", "qmc"])
@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_a_kill_between_two_draws_changes_no_point(tmp_path: Path, sampler: str, count: int) -> None:
    space = {name: {"low": 0.0, "high": 0.5} for name in ("weight_decay", "momentum", "task.label_smoothing")}
    spec = make_spec(
        data={"source": "toys:few_digits"}, train={"max_epochs": 1}, search_space=space, sampler={"name": sampler}
    )
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = run_spec(spec, tmp_path / "whole")
    run_killed(spec, tmp_path / "killed", f"space._suggest_one:{count}")
    resumed = run_spec(spec, tmp_path / "killed")
    assert [t.params for t in whole.trials] == [t.params for t in resumed.trials]
    if sampler != "qmc":  # whose sequence starts in a corner
        assert len({value for t in resumed.trials for value in t.params.values()}) == 6


MEDIAN = {"name": "median", "params": {"n_startup_trials": 1}}
HALVING = {"name": "successive_halving", "params": {"reduction_factor": 2}}


@pytest.mark.parametrize("every_epochs", [1, 3])
@pytest.mark.parametrize(
    ("pruner", "place"),
    [
        pytest.param(MEDIAN, "Claims.set_attrs:1", id="median"),
        pytest.param(HALVING, "Claims.set_attrs:4", id="successive-halving"),
        pytest.param(HALVING, "PrunersNote.set_trial_system_attr:4", id="successive-halving-before-our-note"),
    ],
)
def test_a_trial_pruned_before_the_kill_is_pruned_after_it(
    tmp_path: Path, pruner: dict[str, Any], place: str, every_epochs: int
) -> None:
    """Killed between the pruner's word and the tell: the same step and value. Trial 0 passes three rungs first."""
    series = [[3.0, 2.0, 1.9, 1.8, 1.7, 1.6], [2.9, 2.8, 2.7, 2.6, 2.5, 2.4]]
    spec = listed_spec(series, pruner=pruner, checkpoints={"every_epochs": every_epochs})
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = run_spec(spec, tmp_path / "whole")
    assert whole.states() == ["COMPLETE", "PRUNED"]
    run_killed(spec, tmp_path / "killed", place)
    resumed = run_spec(spec, tmp_path / "killed")
    assert [trial_facts(t) for t in whole.trials] == [trial_facts(t) for t in resumed.trials]


@pytest.mark.parametrize("place", ["append_record:10", "append_record:11", "append_record:12"])
def test_redone_validations_ask_the_pruner_nothing_new(tmp_path: Path, place: str) -> None:
    """Three validations an epoch, a checkpoint every second epoch: several reported ones are redone."""
    series = [[3.0, 2.0, 1.0] * 2 + [0.9] * 6, [2.9, 2.8, 2.7, 2.6, 2.5, 2.4, 0.95, 0.94, 0.93, 0.92, 0.91, 0.9]]
    spec = listed_spec(
        series,
        train={"max_epochs": 4, "validations_per_epoch": 3, "batch_size": 2},
        checkpoints={"every_epochs": 2},
        pruner={"name": "median", "params": {"n_startup_trials": 1, "n_warmup_steps": 6}},
    )
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = run_spec(spec, tmp_path / "whole")
    run_killed(spec, tmp_path / "killed", place)
    resumed = run_spec(spec, tmp_path / "killed")
    assert [trial_facts(t) for t in whole.trials] == [trial_facts(t) for t in resumed.trials]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_kill_while_the_study_is_created_does_no_harm(tmp_path: Path, count: int) -> None:
    spec = trial_spec("sgd", "fp32", train={"max_epochs": 1})
    run_killed(spec, tmp_path, f"Study.set_user_attr:{count}")
    assert run_spec(spec, tmp_path).states() == ["COMPLETE"]


def test_a_lost_folder_fails_the_trial_and_tries_its_point_again(tmp_path: Path) -> None:
    spec = trial_spec("adamw", "fp32")
    run_killed(spec, tmp_path, "save_last:3")
    shutil.rmtree(tmp_path / "checkpoints/trial-0000")
    ran = run_spec(spec, tmp_path)
    assert ran.states() == ["FAIL", "COMPLETE"]
    assert ran.trials[0].params == ran.trials[1].params
    assert "values were reported, but the trial's files are gone" in ran.trials[0].user_attrs["error"]
