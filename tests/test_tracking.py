"""What MLflow holds after a study: against a real database of MLflow."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from mlflow_side import DATASET, only_run, patiently, points, record, runs_of, settings_for
from sweeper.tracking import Tracker

LARGEST = sys.float_info.max


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one database for many studies: creating its tables takes seconds."""
    return tmp_path_factory.mktemp('it\'s a "place"')


@pytest.fixture(scope="module")
def client(place: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{place / 'mlflow.db'}")


@pytest.fixture(scope="module")
def told(place: Path, client: MlflowClient) -> dict[str, Any]:
    """A study of two `sweep run`s, with trials that end in every way; the second continues trials 3 and 4."""
    with contextlib.chdir(place):  # a `mlruns` that MLflow made by itself would show here
        return tell(place, client)


def tell(place: Path, client: MlflowClient) -> dict[str, Any]:
    spool = place / "spool" / "told"
    files = place / "files"
    files.mkdir()
    (files / "study.yaml").write_text("storage: postgresql://me:secret@host/db\n", encoding="utf-8")
    (files / "best.pt").write_bytes(b"\0weights://me:secret@host")
    tracker = Tracker(spool, settings_for(place, "told"))
    tracker.start()
    tracker.study_started({"git.dirty": "false"}, [(files / "study.yaml", "study file.yaml")])
    params = {
        "lr": 0.1,
        "max_grad_norm": None,
        "tf32": True,
        "speed.num_workers": 4,
        "data.path": "p" * 6001,
        "url": "http://me:secret@host",
    }
    for number in range(5):
        tracker.trial_started(number, None, params, {"attempt": 1}, DATASET)
    for validation, val_loss in enumerate([math.nan, math.inf, 0.5]):
        tracker.trial_record(0, record(validation, val_loss=val_loss))
        tracker.trial_record(0, record(validation, val_loss=val_loss))
    tracker.trial_artifact(0, files / "best.pt", "best/best.pt")
    tracker.trial_artifact(0, files / "gone.pt", "best/gone.pt")
    tracker.trial_record(1, record(0, **{"no$name": 1.0}))
    tracker.trial_record(1, record(1, val_loss=0.25))
    tracker.trial_finished(0, "FINISHED", {"stop_reason": "early_stopped"})
    tracker.trial_finished(1, "FINISHED", {"stop_reason": "pruned"})
    tracker.trial_finished(2, "FAILED", {"stop_reason": "failed"})
    tracker.trial_finished(3, "KILLED", {"stop_reason": "interrupted"})
    tracker.trial_finished(4, "KILLED", {"stop_reason": "interrupted"})
    tracker.trial_finished(9, "KILLED", {"stop_reason": "interrupted"})
    tracker.study_finished("KILLED", {}, {})
    first: dict[str, Any] = {
        "delivered": tracker.close(patiently),
        "ids": tracker.new_run_ids(),
        "problems": tracker.problems(),
    }
    statuses = {name: runs[0].info.status for name, runs in runs_of(client, "told").items()}
    experiment_id, parent_id = tracker.parent_ids()

    again = Tracker(spool, settings_for(place, "told", parent_run_id=parent_id))
    again.start()
    again.study_started({}, [])
    resumed = {"lr": "1e-1", "speed.num_workers": 2, "max_grad_norm": None}
    again.trial_started(3, first["ids"][3], resumed, {"attempt": 2}, DATASET)
    again.trial_started(4, None, resumed, {"attempt": 2}, DATASET)
    again.trial_finished(3, "FINISHED", {"stop_reason": "max_epochs"})
    again.trial_finished(5, "FAILED", {"stop_reason": "failed"})
    again.study_finished("FINISHED", {"best_trial": "1"}, {"best/val_loss": 0.25})
    second: dict[str, Any] = {
        "delivered": again.close(patiently),
        "ids": again.new_run_ids(),
        "problems": again.problems(),
    }
    return {
        "first": first,
        "second": second,
        "statuses": statuses,
        "parents": (experiment_id, parent_id, again.parent_ids()),
        "files": files,
        "spool": spool,
    }


def test_everything_is_delivered_and_the_spool_is_emptied(told: dict[str, Any], place: Path) -> None:
    assert (told["first"]["delivered"], told["second"]["delivered"]) == (True, True)
    assert [path.name for path in told["spool"].iterdir()] == ["rejected.jsonl"]
    assert not (place / "mlruns").exists()


def test_runs_end_as_their_trials_did(told: dict[str, Any], client: MlflowClient) -> None:
    assert told["statuses"] == {
        "told": "KILLED",
        "trial-0000": "FINISHED",
        "trial-0001": "FINISHED",
        "trial-0002": "FAILED",
        "trial-0003": "KILLED",
        "trial-0004": "KILLED",
    }
    now = {
        name: (run.info.status, run.data.tags.get("stop_reason")) for name, (run,) in runs_of(client, "told").items()
    }
    assert now == {
        "told": ("FINISHED", None),
        "trial-0000": ("FINISHED", "early_stopped"),
        "trial-0001": ("FINISHED", "pruned"),
        "trial-0002": ("FAILED", "failed"),
        "trial-0003": ("FINISHED", "max_epochs"),
        "trial-0004": ("RUNNING", "interrupted"),
        "trial-0005": ("FAILED", "failed"),  # failed before it started
    }


def test_run_ids_are_told_once_and_those_known_are_not(told: dict[str, Any], client: MlflowClient) -> None:
    ids = {int(name[6:]): run.info.run_id for name, (run,) in runs_of(client, "told").items() if name != "told"}
    assert told["first"]["ids"] == {number: ids[number] for number in range(5)}
    assert told["second"]["ids"] == {number: ids[number] for number in (4, 5)}
    experiment_id, parent_id, again = told["parents"]
    assert again == (experiment_id, parent_id)
    assert only_run(client, "told", "told").info.run_id == parent_id


def test_children_hang_below_the_parent(told: dict[str, Any], client: MlflowClient) -> None:
    tags = only_run(client, "told", "trial-0001").data.tags
    assert (tags["mlflow.parentRunId"], tags["sweeper.trial"]) == (told["parents"][1], "told/1")
    parent = only_run(client, "told", "told")
    assert parent.data.tags["sweeper.study"] == "told"
    assert (parent.data.tags["best_trial"], parent.data.metrics["best/val_loss"]) == ("1", 0.25)


def test_params_say_what_the_values_were(told: dict[str, Any], client: MlflowClient) -> None:
    run = only_run(client, "told", "trial-0000")
    assert run.data.params == {
        "lr": "0.1",
        "max_grad_norm": "null",
        "tf32": "true",
        "speed.num_workers": "4",
        "data.path": "p" * 6000,
        "url": "http://me:***@host",
    }
    assert run.data.tags["sweeper.cut_params"] == "data.path"


@pytest.mark.parametrize("name", ["trial-0003", "trial-0004"])
def test_a_resumed_trial_keeps_its_params_and_tags_what_changed(
    name: str, told: dict[str, Any], client: MlflowClient
) -> None:
    run = only_run(client, "told", name)
    assert (run.data.params["lr"], run.data.params["speed.num_workers"]) == ("0.1", "4")
    changed = {tag: value for tag, value in run.data.tags.items() if tag.startswith("changed.")}
    assert changed == {"changed.speed.num_workers": "4 -> 2"}
    assert run.data.tags["attempt"] == "2"


def test_nonfinite_metrics_are_kept_and_tagged(told: dict[str, Any], client: MlflowClient) -> None:
    run = only_run(client, "told", "trial-0000")
    (nan_step, nan), second, third = points(client, run, "val_loss")
    assert nan_step == 0
    assert math.isnan(nan)
    assert (second, third) == ((1, LARGEST), (2, 0.5))
    assert run.data.tags["nonfinite.val_loss"] == "inf at step 1"
    assert {point.timestamp for point in client.get_metric_history(run.info.run_id, "val_loss")} == {
        1_700_000_000_000,
        1_700_000_000_001,
        1_700_000_000_002,
    }


def test_a_refused_event_is_put_aside_and_the_rest_goes_on(told: dict[str, Any], client: MlflowClient) -> None:
    assert points(client, only_run(client, "told", "trial-0001"), "val_loss") == [(1, 0.25)]
    lost, refused = told["first"]["problems"]
    assert refused.startswith("MLflow refuses the metrics of trial 1: ")
    assert "no$name" in refused
    assert lost.startswith("MLflow does not get the file best/gone.pt of trial 0: ")
    assert str(told["files"] / "gone.pt") in lost
    lines = (told["spool"] / "rejected.jsonl").read_text(encoding="utf-8").splitlines()
    assert {json.loads(line)["reason"] for line in lines} == {lost, refused}
    assert told["second"]["problems"] == []


def test_artifacts_have_their_names_and_texts_no_password(
    told: dict[str, Any], client: MlflowClient, tmp_path: Path
) -> None:
    trial, parent = only_run(client, "told", "trial-0000"), only_run(client, "told", "told")
    weights = client.download_artifacts(trial.info.run_id, "best/best.pt", str(tmp_path))
    assert Path(weights).read_bytes() == b"\0weights://me:secret@host"
    text = client.download_artifacts(parent.info.run_id, "study file.yaml", str(tmp_path))
    assert Path(text).read_text(encoding="utf-8") == "storage: postgresql://me:***@host/db\n"
    assert "secret" in (told["files"] / "study.yaml").read_text(encoding="utf-8")


def test_the_data_set_is_an_input(told: dict[str, Any], client: MlflowClient) -> None:
    inputs = only_run(client, "told", "trial-0003").inputs
    assert inputs is not None
    (described,) = inputs.dataset_inputs
    assert (described.dataset.name, described.dataset.digest) == ("digits", "d" * 36)
    assert json.loads(described.dataset.profile or "") == {"digest": "d" * 64, "sizes": {"train": 8}}


def test_a_new_study_of_an_old_name_takes_no_old_run(told: dict[str, Any], place: Path, client: MlflowClient) -> None:
    tracker = Tracker(place / "spool" / "namesake", settings_for(place, "namesake"))
    tracker.start()
    tracker.trial_started(0, None, {}, {}, DATASET)
    assert tracker.close(patiently)
    tracker = Tracker(place / "spool" / "namesake", settings_for(place, "namesake", study_token="another"))
    tracker.start()
    tracker.trial_started(0, "a" * 32, {}, {}, DATASET)  # a run that this MLflow does not know
    assert tracker.close(patiently)
    runs = runs_of(client, "namesake")
    assert tracker.new_run_ids()[0] in {run.info.run_id for run in runs["trial-0000"]}
    assert {name: len(found) for name, found in runs.items()} == {"namesake": 2, "trial-0000": 2}
