"""The commands as a person types them: real processes, real databases, real MLflow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mlflow.tracking import MlflowClient

SWEEP = [sys.executable, "-m", "sweeper.cli"]
STUDY = """\
# a comment that stays in the artifact
study: small
objective: {monitor: val_accuracy, direction: maximize}
data: {source: digits, val_fraction: 0.2, test_fraction: 0.1}
model: {name: mlp, params: {width: 32}}
train: {max_epochs: 4, scheduler: {name: cosine}}
search_space:
  lr: {low: 1e-3, high: 1e-1, log: true}
  batch_size: {choices: [64, 128]}
budget: {trials: 3}
workers: {threads: 1}
"""


def sweep(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """One command in `folder`. The package is imported from where the tests import it."""
    return subprocess.run(
        [*SWEEP, *arguments], cwd=folder, capture_output=True, text=True, env={**os.environ, **environment}
    )


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*SWEEP, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(condition: Any, process: subprocess.Popen[str]) -> None:
    """Until something is so; fails when the process has ended, or after minutes."""
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def client_of(folder: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{folder}/mlruns/mlflow.db")


def runs(folder: Path) -> dict[str, Any]:
    """Every run of the study by name. Fails if a name stands twice."""
    client = client_of(folder)
    (experiment,) = [e for e in client.search_experiments() if e.name != "Default"]
    found = client.search_runs([experiment.experiment_id])
    names = [run.info.run_name for run in found]
    assert sorted(names) == sorted(set(names))
    return dict(zip(names, found, strict=True))


def as_json(folder: Path, command: str, *arguments: str) -> Any:
    done = sweep(folder, command, "study.yaml", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def last_epoch(folder: Path) -> int:
    names = (path.stem for path in (folder / "mlruns/checkpoints").glob("small-*/trial-0000/last-*.pt"))
    return max((int(name.split("-")[1]) for name in names), default=-1)
