"""What the tracking tests share: settings, records, and the eyes of an MLflow client."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run

from sweeper.records import EpochRecord
from sweeper.tracking import TrackingSettings

# A machine under load takes its time; nothing here waits longer than it must.
WAIT_S = 600.0


def patiently() -> float:
    return WAIT_S


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
