"""Signals, kills and failures of a whole `sweep run`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from commands import STUDY, SWEEP, as_json, client_of, last_epoch, runs, start, sweep, wait_for
from pictures import write_noise

DIGITS = "{source: digits, val_fraction: 0.2, test_fraction: 0.1}"
LONG = (
    STUDY.replace("max_epochs: 4", "max_epochs: 200").replace("trials: 3", "trials: 2")
    + "early_stopping: {patience: 500}\n"
)


@pytest.mark.parametrize(
    "signals",
    [
        pytest.param([signal.SIGINT], id="ctrl-c"),
        pytest.param([signal.SIGTERM], id="term"),
        pytest.param([signal.SIGHUP], id="hup"),
    ],
)
def test_a_signal_releases_the_trial_and_closes_every_run(tmp_path: Path, signals: list[int]) -> None:
    (tmp_path / "study.yaml").write_text(LONG)
    process = start(tmp_path, "run", "study.yaml")
    wait_for(lambda: last_epoch(tmp_path) >= 1, process)
    for number in signals:
        os.killpg(process.pid, number)
    _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert "Interrupted. `sweep run study.yaml` goes on where it stopped." in errors
    assert "Traceback" not in errors
    trials = as_json(tmp_path, "status")["trials"]
    assert (trials["interrupted"], trials["running"]) == (1, 0)
    assert {name: run.info.status for name, run in runs(tmp_path).items()} == {
        "small": "KILLED",
        "trial-0000": "KILLED",
    }


GATED = """
import pathlib, time
import torch
from sweeper import Splits

class Gated(torch.utils.data.Dataset):
    # Reading waits while there is a file `hold`, and says so with a file `held`.
    def __len__(self):
        return 40
    def __getitem__(self, index):
        while pathlib.Path("hold").exists():
            pathlib.Path("held").touch()
            time.sleep(0.01)
        time.sleep(0.005)
        return torch.full((4,), float(index)), index % 2

def load(params, split_seed):
    return Splits(Gated())
"""


def gated(folder: Path, **speed: int) -> subprocess.Popen[str]:
    """A study that stands in the middle of an epoch after the first, until the file `hold` is removed."""
    (folder / "gated.py").write_text(GATED)
    text = LONG.replace(DIGITS, "{source: gated:load}")
    (folder / "study.yaml").write_text(f"{text}speed: {json.dumps(speed)}\n")
    process = start(folder, "run", "study.yaml")
    wait_for(lambda: last_epoch(folder) >= 0, process)
    (folder / "hold").touch()
    wait_for((folder / "held").exists, process)
    return process


def num_records(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("mlruns/checkpoints/*/trial-0000/records.jsonl"))


def test_ctrl_c_once_finishes_the_epoch_and_saves_it(tmp_path: Path) -> None:
    process = gated(tmp_path)
    before = num_records(tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    assert process.stderr is not None
    assert [process.stderr.readline().strip() for _ in range(2)][-1].startswith("Finishing this epoch, then leaving.")
    (tmp_path / "hold").unlink()
    _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert (num_records(tmp_path), last_epoch(tmp_path)) == (before + 1, before)


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_twice_leaves_the_epoch_unfinished(tmp_path: Path, second: int) -> None:
    process = gated(tmp_path)
    before = num_records(tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    assert process.stderr is not None
    assert [process.stderr.readline().strip() for _ in range(2)][-1].startswith("Finishing this epoch")
    os.killpg(process.pid, second)
    process.communicate()
    assert process.returncode == 130
    assert (num_records(tmp_path), last_epoch(tmp_path)) == (before, before - 1)


def test_a_signal_to_all_processes_is_no_failure_of_the_loader_workers(tmp_path: Path) -> None:
    process = gated(tmp_path, num_workers=2)
    os.killpg(process.pid, signal.SIGTERM)
    _, errors = process.communicate()
    assert process.returncode == 130, errors
    trials = as_json(tmp_path, "status")["trials"]
    assert (trials["interrupted"], trials["failed"]) == (1, 0)


SLOW_DATA = """
import pathlib, time
from sweeper import Splits

def load(params, split_seed):
    pathlib.Path("loading").touch()
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("number", "words"),
    [
        pytest.param(signal.SIGINT, "Interrupted.", id="ctrl-c"),
        pytest.param(signal.SIGTERM, "Interrupted by SIGTERM.", id="term"),
        pytest.param(signal.SIGHUP, "Interrupted by SIGHUP.", id="hup"),
    ],
)
def test_a_signal_before_the_first_trial_leaves_at_once_and_nothing_behind(
    tmp_path: Path, number: int, words: str
) -> None:
    (tmp_path / "slow.py").write_text(SLOW_DATA)
    (tmp_path / "study.yaml").write_text(STUDY.replace("source: digits", "source: slow:load"))
    process = start(tmp_path, "run", "study.yaml")
    wait_for((tmp_path / "loading").exists, process)
    os.killpg(process.pid, number)
    _, errors = process.communicate()
    assert (process.returncode, errors.strip()) == (130, words)
    assert not (tmp_path / "mlruns").exists()


def test_what_nohup_protects_stays_protected(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(STUDY)
    command = ["nohup", *SWEEP, "run", "study.yaml"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=tmp_path, text=True, start_new_session=True, **pipes)
    wait_for(lambda: last_epoch(tmp_path) >= 0, process)
    os.kill(process.pid, signal.SIGHUP)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert as_json(tmp_path, "status")["trials"]["complete"] == 3


def writer_of(pid: int) -> int:
    """The process that delivers to MLflow."""
    (writer,) = [child.pid for child in psutil.Process(pid).children() if "sweeper.tracking.writer" in child.cmdline()]
    return writer


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_last_delivery_still_says_the_result(tmp_path: Path, number: int) -> None:
    (tmp_path / "study.yaml").write_text(STUDY)
    process = start(tmp_path, "run", "study.yaml")
    wait_for(lambda: last_epoch(tmp_path) >= 0, process)
    writer = writer_of(process.pid)
    os.kill(writer, signal.SIGSTOP)  # MLflow takes its time
    try:
        wait_for(lambda: as_json(tmp_path, "status")["trials"]["complete"] == 3, process)
        spool = tmp_path / "mlruns/spool"
        wait_for(lambda: any(b"study_finished" in file.read_bytes() for file in spool.rglob("events*")), process)
        os.kill(process.pid, number)
    finally:
        os.kill(writer, signal.SIGCONT)
    output, errors = process.communicate()
    assert process.returncode == 130, errors
    assert "The best val_accuracy is" in output
    assert as_json(tmp_path, "best")["mlflow_run_id"] in {run.info.run_id for run in runs(tmp_path).values()}
    assert {run.info.status for run in runs(tmp_path).values()} == {"FINISHED"}


def test_after_sigkill_the_study_goes_on_in_the_same_runs(tmp_path: Path) -> None:
    """SIGKILL to everything, the tracking process included; then a short rest of the study."""
    (tmp_path / "slow.py").write_text(
        "import time, torch\n"
        "class Slow(torch.nn.Linear):\n"
        "    def forward(self, inputs):\n"
        "        time.sleep(0.03 if self.training else 0)\n"
        "        return super().forward(inputs.flatten(1))\n"
        "def build(params, data): return Slow(64, data.num_outputs)\n"
    )
    text = STUDY.replace("max_epochs: 4", "max_epochs: 40").replace("trials: 3", "trials: 1")
    text = text.replace("{name: mlp, params: {width: 32}}", "{name: 'slow:build'}") + "early_stopping: {patience: 50}\n"
    (tmp_path / "study.yaml").write_text(text)
    process = start(tmp_path, "run", "study.yaml")
    wait_for(lambda: last_epoch(tmp_path) >= 2 and (tmp_path / "mlruns/mlflow.db").exists(), process)
    tracking = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    for pid in [process.pid, *map(int, tracking)]:
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    assert as_json(tmp_path, "status")["trials"]["interrupted"] == 1
    done = sweep(tmp_path, "run", "study.yaml")
    assert done.returncode == 0, done.stderr
    found = runs(tmp_path)
    assert {name: run.info.status for name, run in found.items()} == {"small": "FINISHED", "trial-0000": "FINISHED"}
    run = found["trial-0000"]
    history = client_of(tmp_path).get_metric_history(run.info.run_id, "train_loss")
    steps = [metric.step for metric in history]
    assert sorted(steps) == list(range(len(as_json(tmp_path, "show", "0")["validations"])))
    assert as_json(tmp_path, "best")["mlflow_run_id"] == run.info.run_id
    files = {artifact.path for artifact in client_of(tmp_path).list_artifacts(run.info.run_id)}
    assert "speed_config.2.json" in files
    assert run.data.tags["attempt"] == "2"


def test_failing_trials_end_the_run_with_3_and_name_the_error(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "import torch\n"
        "class Broken(torch.nn.Linear):\n"
        "    def forward(self, inputs):\n"
        "        if torch.is_grad_enabled(): raise RuntimeError('the model is broken')\n"
        "        return super().forward(inputs.flatten(1))\n"
        "def build(params, data): return Broken(64, data.num_outputs)\n"
    )
    text = STUDY.replace("{name: mlp, params: {width: 32}}", "{name: 'broken:build'}").replace("trials: 3", "trials: 9")
    (tmp_path / "study.yaml").write_text(text)
    done = sweep(tmp_path, "run", "study.yaml")
    assert done.returncode == 3, done.stderr
    assert "the first 3 trials all failed with the same error: RuntimeError: the model is broken" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Traceback" in sweep(tmp_path, "logs", "study.yaml", "0").stdout
    statuses = {name: run.info.status for name, run in runs(tmp_path).items()}
    assert statuses == dict.fromkeys(["small", *(f"trial-{n:04d}" for n in range(3))], "FAILED")
    best = sweep(tmp_path, "best", "study.yaml")
    assert (best.returncode, "has no best trial yet" in best.stderr) == (1, True)


LOCKING = """
import sqlite3
from torch import nn
HELD = []

class Locking(nn.Module):
    # Holds the study's database from the first training step on.
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 10)
    def forward(self, inputs):
        if self.training and not HELD and inputs.device.type != "meta" and PATH.exists():
            HELD.append(sqlite3.connect(PATH, isolation_level=None))
            HELD[0].execute("BEGIN EXCLUSIVE")
        return self.linear(inputs.flatten(1))

def build(params, data):
    return Locking()
"""


@pytest.mark.parametrize("hours", ["", ", hours: 1"])
def test_a_database_that_does_not_answer_is_said_and_fails_no_trial(tmp_path: Path, hours: str) -> None:
    head = f"from pathlib import Path\nPATH = Path({str(tmp_path / 'mlruns/optuna.db')!r})\n"
    (tmp_path / "locking.py").write_text(head + LOCKING)
    text = STUDY.replace("{name: mlp, params: {width: 32}}", "{name: 'locking:build'}").replace("3}", f"3{hours}}}")
    (tmp_path / "study.yaml").write_text(text)
    script = "import sweeper.storage as s, sys; s.BUSY_TIMEOUT_S = 0.5; import sweeper.views.reading as r\n"
    script += "r.BUSY_TIMEOUT_S = 0.5; sys.argv = ['sweep', 'run', 'study.yaml']\nfrom sweeper.cli import main\nmain()"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"{tmp_path}/mlruns/optuna.db: the database does not answer: database is locked" in done.stderr
    assert "Close the program that holds it" in done.stderr
    assert "Traceback" not in done.stderr
    trials = as_json(tmp_path, "status")["trials"]
    assert (trials["interrupted"], trials["failed"], trials["complete"]) == (1, 0, 0)


def test_data_that_changed_since_is_refused(tmp_path: Path) -> None:
    for number in range(8):
        write_noise(tmp_path / "pics" / "ab"[number % 2] / f"{number}.png", seed=number)
    text = STUDY.replace(DIGITS, "{source: image_folder, root: pics}")
    (tmp_path / "study.yaml").write_text(text)
    assert sweep(tmp_path, "run", "study.yaml").returncode == 0
    write_noise(tmp_path / "pics/a/new.png", seed=99)
    again = sweep(tmp_path, "run", "study.yaml")
    assert again.returncode == 1
    assert "is not what it was when the study began: it had 6 train, 2 val" in again.stderr
    (tmp_path / "pics/a/new.png").unlink()
    done = sweep(tmp_path, "run", "study.yaml")
    assert done.returncode == 0
    assert "Nothing to do: the trials of the budget are done." in done.stdout
