"""Kills, outages and refusals between a worker and MLflow: real processes, a real server that goes and comes back."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient
from mlflow.entities import ViewType

from mlflow_side import DATASET, Server, only_run, patiently, points, record, runs_of, settings_for, wait_until
from sweeper.tracking import Tracker


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one database for many studies: creating its tables takes seconds."""
    return tmp_path_factory.mktemp('it\'s a "place"')


@pytest.fixture(scope="module")
def client(place: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{place / 'mlflow.db'}")


# Kills

WORKER = """
import os, signal, sys, time
from pathlib import Path
from sweeper.records import EpochRecord
from sweeper.tracking import Tracker, TrackingSettings
settings, spool, kill = TrackingSettings.from_json(eval(sys.argv[1])), Path(sys.argv[2]), sys.argv[3]
tracker = Tracker(spool, settings)
tracker.start()
tracker.study_started({}, [])
tracker.trial_started(7, None, {"lr": 0.1}, {}, DATASET)
while kill != "at once" and not tracker.new_run_ids():
    time.sleep(0.05)
for validation in range(40):
    tracker.trial_record(7, EpochRecord(validation, 0, 0, True, 1_700_000_000_000 + validation, {"val_loss": 0.5}))
if kill != "worker":
    tracker._writer.kill()
tracker._events.write(b'{"event": "trial_fini')
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_worker(place: Path, study: str, kill: str) -> Path:
    """A worker that sent 40 validations of trial 7 and died, its writer with it unless `kill` is "worker"."""
    spool = place / "spool" / study
    script = WORKER.replace("DATASET", repr(DATASET))
    values = repr(settings_for(place, study).to_json())
    done = subprocess.run([sys.executable, "-c", script, values, str(spool), kill], check=False)
    assert done.returncode == -signal.SIGKILL
    return spool


@pytest.mark.parametrize("kill", ["at once", "half-way, cursor lost"])
def test_what_a_kill_left_is_delivered_once_by_the_next_run(kill: str, place: Path, client: MlflowClient) -> None:
    study = kill.replace(", ", "-").replace(" ", "-")
    spool = killed_worker(place, study, kill)
    if kill.endswith("lost"):
        next(spool.glob("*/cursor")).unlink()
    tracker = Tracker(spool, settings_for(place, study))
    tracker.start()
    tracker.study_started({}, [])
    tracker.trial_started(7, None, {"lr": 0.1}, {}, DATASET)
    for validation in (39, 40):
        tracker.trial_record(7, record(validation, val_loss=0.5))
    tracker.trial_finished(7, "FINISHED", {})
    tracker.study_finished("FINISHED", {}, {})
    assert tracker.close(patiently)
    assert tracker.problems() == []
    run = only_run(client, study, "trial-0007")
    assert points(client, run, "val_loss") == [(step, 0.5) for step in range(41)]
    assert tracker.new_run_ids() == {7: run.info.run_id}
    assert (run.info.status, only_run(client, study, study).info.status) == ("FINISHED", "FINISHED")
    assert list(spool.iterdir()) == []


def test_the_writer_of_a_killed_worker_delivers_and_closes_what_is_open(place: Path, client: MlflowClient) -> None:
    spool = killed_worker(place, "orphan", "worker")
    wait_until(lambda: [path.suffix for path in spool.iterdir()] == [".runs"])
    run = only_run(client, "orphan", "trial-0007")
    assert points(client, run, "val_loss") == [(step, 0.5) for step in range(40)]
    assert (run.info.status, only_run(client, "orphan", "orphan").info.status) == ("KILLED", "KILLED")
    assert run.data.tags["stop_reason"] == "interrupted"


def test_runs_that_a_killed_worker_never_heard_of_are_told_to_the_next(place: Path, client: MlflowClient) -> None:
    spool = killed_worker(place, "unheard", "worker")
    wait_until(lambda: list(spool.glob("*.runs")))
    next_one = Tracker(spool, settings_for(place, "unheard"))
    next_one.start()
    assert wait_until(next_one.new_run_ids) == {7: only_run(client, "unheard", "trial-0007").info.run_id}
    assert next_one.close(patiently)
    assert list(spool.iterdir()) == []


def test_a_killed_writer_is_started_again(place: Path, client: MlflowClient) -> None:
    tracker = Tracker(place / "spool" / "revived", settings_for(place, "revived"))
    tracker.start()
    tracker.trial_started(0, None, {}, {}, DATASET)
    for step in range(20):
        tracker.trial_record(0, record(step, val_loss=0.5))
    wait_until(tracker.new_run_ids)
    assert tracker._writer is not None
    tracker._writer.kill()
    tracker._writer.wait()
    tracker.trial_record(0, record(20, val_loss=0.5))
    tracker.trial_finished(0, "FINISHED", {})
    assert tracker.close(patiently)
    run = only_run(client, "revived", "trial-0000")
    assert points(client, run, "val_loss") == [(step, 0.5) for step in range(21)]
    assert run.info.status == "FINISHED"


FORKING = """
import os, signal, sys, time
from pathlib import Path
from sweeper.tracking import Tracker, TrackingSettings
tracker = Tracker(Path(sys.argv[2]), TrackingSettings.from_json(eval(sys.argv[1])))
tracker.start()
child = os.fork()
if child == 0:
    time.sleep(600)
delivered = tracker.close()
os.kill(child, signal.SIGKILL)
print(delivered, "mlflow" in sys.modules, "torch" in sys.modules)
"""


def test_a_loader_worker_that_outlives_the_close_does_not_hold_it_up(place: Path) -> None:
    arguments = [repr(settings_for(place, "forking").to_json()), str(place / "spool" / "forking")]
    done = subprocess.run([sys.executable, "-c", FORKING, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False", "False"]


def test_two_that_start_at_once_share_experiment_and_parent(tmp_path: Path) -> None:
    half_made = tmp_path / "mlflow.db.new-left-by-a-kill"
    half_made.write_bytes(b"SQLite format 3\0")
    trackers = [Tracker(tmp_path / "spool", settings_for(tmp_path, "shared")) for _ in range(2)]
    for number, tracker in enumerate(trackers):
        tracker.start()
        tracker.study_started({}, [])
        tracker.trial_started(number, None, {}, {}, DATASET)
        tracker.trial_finished(number, "FINISHED", {})
    assert [(tracker.close(patiently), tracker.problems()) for tracker in trackers] == [(True, []), (True, [])]
    assert trackers[0].parent_ids() == trackers[1].parent_ids()
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    counts = {name: len(runs) for name, runs in runs_of(client, "shared").items()}
    assert counts == {"shared": 1, "trial-0000": 1, "trial-0001": 1}
    assert not half_made.exists()


def test_the_writer_tells_nobody_elsewhere(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        monkeypatch.delenv(name, raising=False)
    tracker = Tracker(place / "spool" / "quiet", settings_for(place, "quiet"))
    tracker.start()
    assert tracker._writer is not None
    environment = psutil.Process(tracker._writer.pid).environ()
    assert (environment["MLFLOW_DISABLE_TELEMETRY"], environment["DO_NOT_TRACK"]) == ("true", "true")
    tracker.study_finished("FINISHED", {}, {})
    assert tracker.close(patiently)


def test_of_two_workers_the_one_that_leaves_last_knows_it(tmp_path: Path) -> None:
    first, second = (Tracker(tmp_path / "spool", settings_for(tmp_path, "two")) for _ in range(2))
    for tracker in (first, second):
        tracker.start()
    assert [first.leaves_last(), second.leaves_last()] == [False, True]
    assert first.close(patiently)
    assert second.close(patiently)


# What the user can mend


def test_a_deleted_experiment_is_named_and_restoring_it_loses_nothing(place: Path, client: MlflowClient) -> None:
    spool = place / "spool" / "deleted"
    tracker = Tracker(spool, settings_for(place, "deleted"))
    tracker.start()
    tracker.trial_started(0, None, {}, {}, DATASET)
    wait_until(tracker.new_run_ids)
    experiment_id = tracker.parent_ids()[0]
    assert experiment_id is not None
    client.delete_experiment(experiment_id)
    tracker.trial_record(0, record(0, val_loss=0.5))
    (problem,) = wait_until(tracker.problems)
    assert problem == (
        "The experiment 'deleted' was deleted in MLflow. Restore it with"
        f" `mlflow experiments restore -x {experiment_id}`, or give the study another name."
    )
    assert not tracker.close(lambda: 0)
    client.restore_experiment(experiment_id)
    again = Tracker(spool, settings_for(place, "deleted"))
    again.start()
    assert again.close(patiently)
    run = only_run(client, "deleted", "trial-0000")
    assert points(client, run, "val_loss") == [(0, 0.5)]


def test_an_artifact_that_cannot_be_stored_costs_nothing_else(place: Path, client: MlflowClient) -> None:
    in_the_way = place / "file"
    in_the_way.touch()
    best = place / "best.pt"
    best.write_bytes(b"weights")
    tracker = Tracker(place / "spool" / "unwritable", settings_for(place, "unwritable", artifacts=in_the_way))
    tracker.start()
    tracker.trial_started(0, None, {}, {}, DATASET)
    tracker.trial_artifact(0, best, "best/best.pt")
    tracker.trial_record(0, record(0, val_loss=0.5))
    tracker.trial_finished(0, "FINISHED", {})
    assert tracker.close(patiently)
    (problem,) = tracker.problems()
    assert problem.startswith("MLflow does not get the file best/best.pt of trial 0: ")
    assert problem.endswith(f"It stays at {best}.")
    run = only_run(client, "unwritable", "trial-0000")
    assert (run.info.status, points(client, run, "val_loss")) == ("FINISHED", [(0, 0.5)])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.stop()


def test_an_outage_loses_and_doubles_nothing(server: Server, tmp_path: Path) -> None:
    best = tmp_path / "best.pt"
    best.write_bytes(b"weights")
    settings = settings_for(tmp_path, "outage", uri=server.uri.replace("//", "//me:secret@"))
    tracker = Tracker(tmp_path / "spool", settings)
    tracker.start()
    tracker.study_started({}, [])
    tracker.trial_started(0, None, {"lr": 0.1}, {}, DATASET)
    tracker.trial_record(0, record(0, val_loss=0.9))
    (problem,) = wait_until(tracker.problems)
    assert problem.startswith("MLflow cannot be opened: API request to http://me:***@127.0.0.1")
    server.start()
    run_id = wait_until(tracker.new_run_ids)[0]
    server.stop()
    for validation in range(1, 4):
        tracker.trial_record(0, record(validation, val_loss=0.9 - validation / 10))
    tracker.trial_artifact(0, best, "best/best.pt")
    wait_until(lambda: len(tracker.problems()) == 2)
    server.start()
    tracker.trial_finished(0, "FINISHED", {"stop_reason": "max_epochs"})
    wait_until(server.answers)
    assert tracker.close(patiently)
    client = MlflowClient(server.uri)
    run = only_run(client, "outage", "trial-0000")
    assert (run.info.run_id, run.info.status) == (run_id, "FINISHED")
    assert points(client, run, "val_loss") == [(step, 0.9 - step / 10) for step in range(4)]
    assert (tmp_path / "stored" / run.info.experiment_id / run_id / "artifacts/best/best.pt").read_bytes() == b"weights"
    assert len(client.search_runs([run.info.experiment_id], run_view_type=ViewType.ALL)) == 2


def test_without_a_server_the_spool_stays_and_no_password_is_in_it(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path / "spool", settings_for(tmp_path, "away", uri="http://me:secret@127.0.0.1:9"))
    tracker.start()
    tracker.trial_started(0, None, {"storage": "postgresql://me:secret@host/db"}, {}, DATASET)
    wait_until(tracker.problems)
    assert not tracker.close(lambda: 0)
    (events,) = (tmp_path / "spool").glob("*/events.jsonl")
    assert [json.loads(line)["event"] for line in events.read_text(encoding="utf-8").splitlines()] == ["trial_started"]
    for path in (tmp_path / "spool").rglob("*"):
        assert path.is_dir() or "secret" not in path.read_text(encoding="utf-8")
