"""Tracking against real MLflow: a SQLite file, and a server that comes late, goes and comes back."""

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path, PureWindowsPath
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run, ViewType

from sweeper.errors import SpecError
from sweeper.records import EpochRecord
from sweeper.tracking import Tracker, TrackingSettings, check_tracking, redact
from sweeper.tracking.texts import as_text, plan_params

LARGEST = sys.float_info.max
WAIT_S = 60.0
DATASET = {"name": "digits", "digest": "d" * 64, "source": "digits", "source_type": "digits", "sizes": {"train": 8}}


def settings_for(place: Path, study: str, **changes: Any) -> TrackingSettings:
    values: dict[str, Any] = {
        "uri": f"sqlite:///{place / 'mlflow.db'}",
        "artifacts": place / "artifacts",
        "study": study,
        "study_token": f"token-of-{study}",
        "monitor": "val_loss",
        "direction": "minimize",
    }
    return TrackingSettings(**{**values, **changes})


def record(validation: int, **metrics: float) -> EpochRecord:
    return EpochRecord(validation, validation, 10 * validation, True, 1_700_000_000_000 + validation, metrics)


def wait_until(true: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        found = true()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("it never happened")


def runs_of(client: MlflowClient, study: str) -> dict[str, list[Run]]:
    """Name -> the study's runs of that name; the parent has the study's."""
    experiments = [found for found in client.search_experiments() if found.name == study]
    assert len(experiments) == 1
    found: dict[str, list[Run]] = {}
    for run in client.search_runs([experiments[0].experiment_id]):
        found.setdefault(run.info.run_name, []).append(run)
    return found


def only_run(client: MlflowClient, study: str, name: str) -> Run:
    runs = runs_of(client, study)[name]
    assert len(runs) == 1
    return runs[0]


def points(client: MlflowClient, run: Run, metric: str) -> list[tuple[int, float]]:
    """(step, value) of every point that MLflow has, repeated ones too."""
    return sorted((point.step, point.value) for point in client.get_metric_history(run.info.run_id, metric))


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
    first: dict[str, Any] = {"delivered": tracker.close(), "ids": tracker.new_run_ids(), "problems": tracker.problems()}
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
    second: dict[str, Any] = {"delivered": again.close(), "ids": again.new_run_ids(), "problems": again.problems()}
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
    assert tracker.close()
    tracker = Tracker(place / "spool" / "namesake", settings_for(place, "namesake", study_token="another"))
    tracker.start()
    tracker.trial_started(0, "a" * 32, {}, {}, DATASET)  # a run that this MLflow does not know
    assert tracker.close()
    runs = runs_of(client, "namesake")
    assert tracker.new_run_ids()[0] in {run.info.run_id for run in runs["trial-0000"]}
    assert {name: len(found) for name, found in runs.items()} == {"namesake": 2, "trial-0000": 2}


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
def test_what_a_kill_left_is_delivered_once_by_the_next_run(
    kill: str, told: dict[str, Any], place: Path, client: MlflowClient
) -> None:
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
    assert tracker.close()
    assert tracker.problems() == []
    run = only_run(client, study, "trial-0007")
    assert points(client, run, "val_loss") == [(step, 0.5) for step in range(41)]
    assert tracker.new_run_ids() == {7: run.info.run_id}
    assert (run.info.status, only_run(client, study, study).info.status) == ("FINISHED", "FINISHED")
    assert list(spool.iterdir()) == []


def test_the_writer_of_a_killed_worker_delivers_and_closes_what_is_open(
    told: dict[str, Any], place: Path, client: MlflowClient
) -> None:
    spool = killed_worker(place, "orphan", "worker")
    wait_until(lambda: list(spool.iterdir()) == [])
    run = only_run(client, "orphan", "trial-0007")
    assert points(client, run, "val_loss") == [(step, 0.5) for step in range(40)]
    assert (run.info.status, only_run(client, "orphan", "orphan").info.status) == ("KILLED", "KILLED")
    assert run.data.tags["stop_reason"] == "interrupted"


def test_a_killed_writer_is_started_again(told: dict[str, Any], place: Path, client: MlflowClient) -> None:
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
    assert tracker.close()
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


def test_a_loader_worker_that_outlives_the_close_does_not_hold_it_up(told: dict[str, Any], place: Path) -> None:
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
    assert [(tracker.close(), tracker.problems()) for tracker in trackers] == [(True, []), (True, [])]
    assert trackers[0].parent_ids() == trackers[1].parent_ids()
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    counts = {name: len(runs) for name, runs in runs_of(client, "shared").items()}
    assert counts == {"shared": 1, "trial-0000": 1, "trial-0001": 1}
    assert not half_made.exists()


# What the user can mend


def test_a_deleted_experiment_is_named_and_restoring_it_loses_nothing(
    told: dict[str, Any], place: Path, client: MlflowClient
) -> None:
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
    assert again.close()
    run = only_run(client, "deleted", "trial-0000")
    assert points(client, run, "val_loss") == [(0, 0.5)]


def test_an_artifact_that_cannot_be_stored_costs_nothing_else(
    told: dict[str, Any], place: Path, client: MlflowClient
) -> None:
    in_the_way = place / "file"
    in_the_way.touch()
    best = told["files"] / "best.pt"
    tracker = Tracker(place / "spool" / "unwritable", settings_for(place, "unwritable", artifacts=in_the_way))
    tracker.start()
    tracker.trial_started(0, None, {}, {}, DATASET)
    tracker.trial_artifact(0, best, "best/best.pt")
    tracker.trial_record(0, record(0, val_loss=0.5))
    tracker.trial_finished(0, "FINISHED", {})
    assert tracker.close()
    (problem,) = tracker.problems()
    assert problem.startswith("MLflow does not get the file best/best.pt of trial 0: ")
    assert problem.endswith(f"It stays at {best}.")
    run = only_run(client, "unwritable", "trial-0000")
    assert (run.info.status, points(client, run, "val_loss")) == ("FINISHED", [(0, 0.5)])


# A server


class Server:
    """`mlflow server` on a free port; `uri` stays the same over stops and starts."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self.folder / 'server.db'}"]
        command += ["--artifacts-destination", str(self.folder / "stored")]
        quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **quiet},
                cwd=self.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def stop(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


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
    assert tracker.close()
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


# Words


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        pytest.param("postgresql://me:secret@host/db", "postgresql://me:***@host/db", id="user-and-password"),
        pytest.param("mysql+pymysql://me:p@ss/w@host/db", "mysql+pymysql://me:***@host/db", id="odd-password"),
        pytest.param("redis://:secret@host", "redis://:***@host", id="no-user"),
        pytest.param('{"a": "http://me:secret@h", "b": "c@d"}', '{"a": "http://me:***@h", "b": "c@d"}', id="json"),
        pytest.param("mysql://host/db?user=me&password=s", "mysql://host/db?user=me&password=***", id="query"),
        pytest.param("http://host:5000/path", "http://host:5000/path", id="a-port-is-no-password"),
        pytest.param("sqlite:///mlruns/mlflow.db", "sqlite:///mlruns/mlflow.db", id="a-file"),
    ],
)
def test_redact_strikes_out_passwords(text: str, redacted: str) -> None:
    assert redact(text) == redacted


@pytest.mark.parametrize(
    ("value", "text"),
    [
        pytest.param(None, "null", id="null"),
        pytest.param(True, "true", id="boolean"),
        pytest.param(0.1, "0.1", id="float"),
        pytest.param(1e-05, "1e-05", id="small-float"),
        pytest.param("off", "off", id="text"),
        pytest.param(["http://a:b@c", 2], '["http://a:***@c", 2]', id="list"),
        pytest.param(Path("a b"), "a b", id="path"),
    ],
)
def test_values_become_texts(value: Any, text: str) -> None:
    assert as_text(value) == text


@pytest.mark.parametrize(
    ("old", "new", "tags", "planned"),
    [
        pytest.param({}, {"lr": "0.1"}, {}, ({"lr": "0.1"}, {}), id="new"),
        pytest.param({"lr": "0.1"}, {"lr": "0.1"}, {}, ({}, {}), id="same"),
        pytest.param({"lr": "0.1"}, {"lr": "1e-1"}, {}, ({}, {}), id="same-number"),
        pytest.param({"n": "4"}, {"n": "2"}, {}, ({}, {"changed.n": "4 -> 2"}), id="changed"),
        pytest.param({"n": "4"}, {"n": "4"}, {"changed.n": "4 -> 2"}, ({}, {"changed.n": "4 -> 4"}), id="changed-back"),
        pytest.param({"n": "true"}, {"n": "1"}, {}, ({}, {"changed.n": "true -> 1"}), id="a-boolean-is-no-number"),
        pytest.param({"p": "p" * 6000}, {"p": "p" * 6001}, {}, ({}, {"sweeper.cut_params": "p"}), id="cut-again"),
    ],
)
def test_params_are_planned(old: dict[str, str], new: dict[str, str], tags: dict[str, str], planned: Any) -> None:
    assert plan_params(new, old, tags) == planned


@pytest.mark.parametrize(
    ("uri", "what"),
    [
        pytest.param("sqlite:///", "names no file", id="no-file"),
        pytest.param("sqlite:///:memory:", "names no file", id="memory"),
        pytest.param("sqlite:///{place}", "names a folder", id="a-folder"),
        pytest.param("sqlite:///{place}/text/mlflow.db", "which is no folder", id="below-a-file"),
        pytest.param("sqlite:///{place}/text", "no SQLite database", id="another-file"),
        pytest.param("http://", "has no usable host and port", id="no-host"),
        pytest.param("http://me:secret@host:99999", "has no usable host and port", id="no-port"),
    ],
)
def test_a_uri_that_cannot_work_is_said_so_before_anything_runs(uri: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a text", encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        check_tracking(uri.format(place=tmp_path))
    assert caught.value.fault.path == ("tracking", "uri")
    assert what in caught.value.fault.what
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "uri", ["sqlite:///{place}/new/folder/mlflow.db", "http://localhost:5000", "https://me:secret@host/prefix"]
)
def test_a_usable_uri_passes_and_nothing_is_created(uri: str, tmp_path: Path) -> None:
    check_tracking(uri.format(place=tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("folder", "location"),
    [
        pytest.param(Path("/data/my runs"), "file:///data/my%20runs", id="space"),
        pytest.param(PureWindowsPath("D:\\runs"), "file:///D:/runs", id="drive"),
        pytest.param(PureWindowsPath("D:/runs"), "file:///D:/runs", id="drive-with-slash"),
    ],
)
def test_the_artifact_folder_is_given_as_a_uri(folder: Path, location: str, tmp_path: Path) -> None:
    assert settings_for(tmp_path, "a", artifacts=folder).artifact_location == location
    assert settings_for(tmp_path, "a", artifacts=folder, uri="http://host:5000").artifact_location is None
