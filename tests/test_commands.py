"""The commands as a person types them: real processes, real databases, real MLflow, real signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from mlflow.tracking import MlflowClient

from sweeper import load_model
from sweeper.data import load_data
from sweeper.spec import DataSpec

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
    while not condition():
        assert process.poll() is None, process.communicate()
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


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a study that ran to its end. Its name has what paths may have."""
    folder = tmp_path_factory.mktemp('a folder\'s "name"')
    (folder / "study.yaml").write_text(STUDY)
    done = sweep(folder, "run", "study.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The best val_accuracy is" in done.stdout
    assert done.stderr == ""
    return folder


def as_json(folder: Path, command: str, *arguments: str) -> Any:
    done = sweep(folder, command, "study.yaml", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# --- after a run


def test_status_and_best_keep_their_contract(ran: Path) -> None:
    status, best = as_json(ran, "status"), as_json(ran, "best")
    assert list(status) == ["study", "monitor", "direction", "budget", "trials", "best", "last_activity"]
    assert status["budget"] == {"trials": 3, "hours": None, "target": None, "patience_trials": None, "max_failures": 3}
    assert list(status["trials"]) == ["complete", "pruned", "failed", "running", "interrupted", "waiting"]
    assert sum(status["trials"].values()) == 3
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", status["last_activity"])
    assert list(best) == ["trial", "value", "epoch", "params", "mlflow_run_id", "checkpoint"]
    assert {key: best[key] for key in status["best"]} == status["best"]
    assert set(best["params"]) == {"lr", "batch_size"}


def test_the_best_value_is_the_checkpoints_value(ran: Path) -> None:
    """The stored value, recomputed by hand from the loaded model on the validation split."""
    best = as_json(ran, "best")
    model = load_model(best["checkpoint"])
    assert not model.training
    val = load_data(DataSpec(source="digits", test_fraction=0.1)).splits.val
    with torch.inference_mode():
        hits = (model(val.inputs).argmax(1) == val.targets).sum().item()
    assert hits / len(val) == best["value"]


def test_best_prints_sections_that_read_back_as_the_trial(ran: Path, tmp_path: Path) -> None:
    pasted = sweep(ran, "best", "study.yaml").stdout
    best = as_json(ran, "best")
    lines = [line for line in STUDY.splitlines() if not line.startswith(("train:", "model:"))]
    (tmp_path / "study.yaml").write_text("\n".join(lines) + "\n" + pasted)
    from sweeper.studyfile import read_study_file

    train = read_study_file(tmp_path / "study.yaml").spec.train
    assert (train.lr, train.batch_size) == (best["params"]["lr"], best["params"]["batch_size"])


def test_show_and_logs(ran: Path) -> None:
    shown = as_json(ran, "show", "0")
    assert [v["validation"] for v in shown["validations"]] == list(range(len(shown["validations"])))
    assert max(v["metrics"]["val_accuracy"] for v in shown["validations"]) == shown["value"]
    assert "optim/grad_norm" in sweep(ran, "show", "study.yaml", "0").stdout
    assert sweep(ran, "logs", "study.yaml", "0").returncode == 0
    missing = sweep(ran, "logs", "study.yaml", "99")
    assert (missing.returncode, missing.stderr.splitlines()[0]) == (1, "There is no trial 99 in the study 'small'")


def test_mlflow_has_one_run_per_trial_and_everything_in_it(ran: Path) -> None:
    found = runs(ran)
    assert sorted(found) == ["small", "trial-0000", "trial-0001", "trial-0002"]
    assert {run.info.status for run in found.values()} == {"FINISHED"}
    parent = found["small"]
    best = as_json(ran, "best")
    for number in range(3):
        run = found[f"trial-{number:04d}"]
        shown = as_json(ran, "show", str(number))
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.data.tags["stop_reason"] == shown["stop_reason"]
        assert run.info.run_id == shown["mlflow_run_id"]
        assert float(run.data.params["lr"]) == shown["params"]["lr"]
        history = client_of(ran).get_metric_history(run.info.run_id, "val_accuracy")
        expected = [(v["validation"], v["metrics"]["val_accuracy"]) for v in shown["validations"]]
        assert sorted((m.step, m.value) for m in history) == expected
    assert found[f"trial-{best['trial']:04d}"].info.run_id == best["mlflow_run_id"]
    assert parent.data.metrics["best/val_accuracy"] == best["value"]


def test_mlflow_shows_params_metrics_speed_and_data(ran: Path) -> None:
    run = runs(ran)["trial-0000"]
    shown = as_json(ran, "show", "0")
    params, metrics = run.data.params, run.data.metrics
    assert params["effective_batch_size"] == str(shown["params"]["batch_size"])
    assert (params["precision"], params["device"], params["speed.precision"]) == ("fp32", "cpu", "fp32")
    assert (params["scheduler.name"], params["model.params.width"], params["data.val_fraction"]) == (
        "cosine",
        "32",
        "0.2",
    )
    speed = "device_name driver cuda cudnn torch python cpu_count threads num_workers pin_memory prefetch_factor"
    speed += " persistent_workers non_blocking cudnn_benchmark channels_last tf32 compile fused loader batch_size"
    assert {f"speed.{name}" for name in speed.split()} <= set(params)
    assert params["speed.torch"] == torch.__version__
    expected = "train_loss val_loss val_accuracy best/val_accuracy optim/lr optim/grad_norm optim/clipped_fraction"
    expected += " optim/skipped_steps speed/samples_per_s speed/train_s speed/val_s speed/data_wait_fraction"
    assert {*expected.split(), "memory/resident_mib"} <= set(metrics)
    (dataset,) = [entry.dataset for entry in run.inputs.dataset_inputs]
    assert dataset.name == "digits"
    assert json.loads(dataset.profile)["sizes"] == {"train": 1258, "val": 359, "test": 180}
    assert len(dataset.digest) >= 8


def test_mlflow_keeps_files(ran: Path, tmp_path: Path) -> None:
    found, client = runs(ran), client_of(ran)
    run_id = found["trial-0000"].info.run_id
    assert {a.path for a in client.list_artifacts(run_id)} >= {"config.json", "speed_config.json", "trial.log", "best"}
    study = client.download_artifacts(found["small"].info.run_id, "study.yaml", str(tmp_path))
    assert Path(study).read_text() == STUDY
    best = Path(client.download_artifacts(run_id, "best", str(tmp_path)))
    done = subprocess.run([sys.executable, str(best / "load_best.py")], capture_output=True, text=True)
    assert (done.returncode, "tensor([[" in done.stdout) == (0, True), done.stderr
    assert len((best / "load_best.py").read_text().splitlines()) <= 12


def test_looking_writes_nothing_and_waits_for_no_lock(ran: Path) -> None:
    lock = ran / "mlruns/optuna.db.lock"
    lock.unlink()
    before = sorted((path.name, path.stat().st_mtime_ns) for path in (ran / "mlruns").iterdir())
    for command in (["status"], ["best"], ["show", "0"], ["logs", "0"]):
        assert sweep(ran, command[0], "study.yaml", *command[1:]).returncode == 0
    assert sorted((path.name, path.stat().st_mtime_ns) for path in (ran / "mlruns").iterdir()) == before


WANDERING = """
import os
from torch import nn

def build(params, data):
    os.chdir("/")
    return nn.Sequential(nn.Flatten(), nn.Linear(64, data.num_outputs))
"""


def test_user_code_that_changes_the_folder_moves_nothing(tmp_path: Path) -> None:
    (tmp_path / "wandering.py").write_text(WANDERING)
    (tmp_path / "study.yaml").write_text(
        STUDY.replace("{name: mlp, params: {width: 32}}", "{name: 'wandering:build'}").replace("trials: 3", "trials: 1")
    )
    done = sweep(tmp_path, "run", "study.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    best = as_json(tmp_path, "best")
    script = f"import sweeper; print(sweeper.load_model({best['checkpoint']!r})[1].out_features)"
    loaded = subprocess.run([sys.executable, "-c", script], cwd="/", capture_output=True, text=True)
    assert loaded.stdout == "10\n", loaded.stderr
    kept = {file.path for file in client_of(tmp_path).list_artifacts(runs(tmp_path)["small"].info.run_id)}
    assert kept == {"study.yaml"}


def test_a_removed_checkpoint_is_not_offered(ran: Path) -> None:
    best = as_json(ran, "best")
    checkpoint, hidden = Path(best["checkpoint"]), ran / "hidden.pt"
    checkpoint.rename(hidden)
    try:
        assert as_json(ran, "best") == {**best, "checkpoint": None}
        lines = sweep(ran, "best", "study.yaml").stdout.splitlines()[-2:]
        assert lines == [
            f"# checkpoint: {checkpoint} has been removed",
            f"# MLflow keeps a copy: run {best['mlflow_run_id']}, artifact best/best.pt",
        ]
    finally:
        hidden.rename(checkpoint)


def test_running_again_adds_nothing(ran: Path) -> None:
    before = as_json(ran, "status")
    done = sweep(ran, "run", "study.yaml")
    assert done.returncode == 0
    assert as_json(ran, "status") == before
    assert sorted(runs(ran)) == ["small", "trial-0000", "trial-0001", "trial-0002"]


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        pytest.param(
            "[64, 128]",
            "[64, 128, 256]",
            ["search_space.batch_size.choices: was [64, 128], now [64, 128, 256]"],
            id="choices",
        ),
        pytest.param(
            "low: 1e-3, high: 1e-1",
            "low: 1e-4, high: 1e-1",
            ["search_space.lr.low: was 0.001, now 0.0001"],
            id="range",
        ),
        pytest.param("log: true", "log: false", ["search_space.lr.log: was true, now false"], id="log"),
        pytest.param(
            "lr: {low: 1e-3, high: 1e-1, log: true}",
            "accumulation_steps: {low: 1, high: 2}",
            ['search_space.lr: was {"low": 0.001', "search_space.accumulation_steps: was absent, now"],
            id="another-parameter",
        ),
        pytest.param(
            "direction: maximize",
            "direction: minimize",
            ['objective.direction: was "maximize", now "minimize"'],
            id="direction",
        ),
    ],
)
def test_a_changed_file_is_refused_with_the_difference(ran: Path, old: str, new: str, changes: list[str]) -> None:
    (ran / "changed.yaml").write_text(STUDY.replace(old, new))
    before = as_json(ran, "status")
    done = sweep(ran, "run", "changed.yaml")
    assert done.returncode == 1
    assert all(f"  {change}" in done.stderr for change in changes), done.stderr
    assert "Traceback" not in done.stderr
    assert as_json(ran, "status") == before


def test_best_shows_what_was_run_not_what_the_file_says_now(ran: Path) -> None:
    changed = STUDY.replace("max_epochs: 4", "max_epochs: 4, weight_decay: 0.5, optimizer: sgd")
    (ran / "changed.yaml").write_text(changed)
    assert sweep(ran, "best", "changed.yaml").stdout == sweep(ran, "best", "study.yaml").stdout


def test_a_new_study_of_an_old_name_takes_nothing_from_it(tmp_path: Path) -> None:
    """The study's database was deleted, its checkpoints and MLflow were not."""
    (tmp_path / "study.yaml").write_text(STUDY.replace("trials: 3", "trials: 1"))
    assert sweep(tmp_path, "run", "study.yaml").returncode == 0
    first = as_json(tmp_path, "best")
    (tmp_path / "mlruns/optuna.db").unlink()
    other = STUDY.replace("trials: 3", "trials: 1").replace("low: 1e-3, high: 1e-1", "low: 1e-7, high: 1e-6")
    (tmp_path / "study.yaml").write_text(other)
    assert sweep(tmp_path, "run", "study.yaml").returncode == 0
    second = as_json(tmp_path, "best")
    assert second["value"] < first["value"]
    assert second["checkpoint"] != first["checkpoint"]
    assert second["mlflow_run_id"] != first["mlflow_run_id"]
    assert "goes on" not in sweep(tmp_path, "logs", "study.yaml", "0").stdout


def test_a_reader_that_leaves_does_not_stop_the_study(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(STUDY)
    command = f"{sys.executable} -m sweeper.cli run study.yaml | head -n 1"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.startswith("small: maximize")
    trials = as_json(tmp_path, "status")["trials"]
    assert trials["running"] + trials["interrupted"] == 0
    assert {run.info.status for run in runs(tmp_path).values()} <= {"FINISHED", "KILLED", "FAILED"}


def test_another_spelling_of_the_same_file_is_accepted(ran: Path) -> None:
    spelled = (
        STUDY.replace("1e-1", "0.1")
        .replace("val_fraction: 0.2", "val_fraction: 2e-1")
        .replace("trials: 3", "trials: 2")
    )
    (ran / "spelled.yaml").write_text(spelled)
    assert sweep(ran, "run", "spelled.yaml").returncode == 0


# --- nothing is created, nothing is imported


@pytest.mark.parametrize("command", ["status", "best"])
def test_looking_at_nothing_creates_nothing(tmp_path: Path, command: str) -> None:
    (tmp_path / "study.yaml").write_text(STUDY)
    done = sweep(tmp_path, command, "study.yaml")
    assert done.returncode == 1
    assert done.stderr.startswith(f"There is no database {tmp_path}/mlruns/optuna.db\n")
    assert os.listdir(tmp_path) == ["study.yaml"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        pytest.param("max_epochs: 4", "max_epoch: 4", "study.yaml:6: train.max_epoch: unknown key", id="key"),
        pytest.param(
            "max_epochs: 4", "device: cuda:7", "study.yaml:6: train.device: 'cuda:7' is asked for", id="no-cuda"
        ),
        pytest.param("max_epochs: 4", "device: mps", "study.yaml:6: train.device: 'mps' is asked for", id="no-mps"),
        pytest.param(
            "max_epochs: 4", "optimizer: adamm", "study.yaml:6: train.optimizer: torch.optim has no", id="optim"
        ),
        pytest.param(
            "max_epochs: 4",
            "optimizer_params: {betass: [0.9, 0.99]}",
            "study.yaml:6: train.optimizer_params.betass: AdamW takes no argument",
            id="optimizer-argument",
        ),
        pytest.param("width: 32", "widht: 32", "study.yaml:5: model.params.widht:", id="model-parameter"),
        pytest.param("name: mlp", "name: mpl", "study.yaml:5: model.name:", id="model"),
        pytest.param("name: mlp", "name: 'no_such_module:build'", "study.yaml:5: model.name: module", id="module"),
        pytest.param("source: digits", "source: digit", "study.yaml:4: data.source:", id="source"),
        pytest.param("monitor: val_accuracy", "monitor: val_acc", "study.yaml:3: objective.monitor:", id="monitor"),
        pytest.param(
            "trials: 3}", "trials: 3}\nsampler: {params: {gama: 1}}", "study.yaml:11: sampler.params.gama", id="sampler"
        ),
        pytest.param(
            "trials: 3}",
            "trials: 3}\npruner: {name: threshold}",
            "study.yaml:11: pruner.params: ThresholdPruner refuses",
            id="pruner",
        ),
        pytest.param(
            "batch_size: {choices: [64, 128]}",
            "model.params.depth: {choices: [1, -1]}",
            "study.yaml:5: model.params.depth:",
            id="model-extreme",
        ),
        pytest.param(
            "trials: 3}",
            "trials: 3}\nstorage: postgresql://u:secret@h/d",
            "study.yaml:11: storage: 'postgresql'",
            id="postgres",
        ),
    ],
)
def test_a_fault_is_exit_1_with_its_line_and_creates_nothing(tmp_path: Path, old: str, new: str, message: str) -> None:
    (tmp_path / "study.yaml").write_text(STUDY.replace(old, new))
    done = sweep(tmp_path, "run", "study.yaml")
    assert done.returncode == 1
    assert done.stderr.startswith(message), done.stderr
    assert "Traceback" not in done.stderr
    assert "secret" not in done.stderr + done.stdout
    assert os.listdir(tmp_path) == ["study.yaml"]


def test_check_trains_nothing(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(STUDY)
    done = sweep(tmp_path, "check", "study.yaml")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "The study file is sound.")
    assert os.listdir(tmp_path) == ["study.yaml"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        pytest.param(["--help"], 0, id="help"),
        pytest.param(["run"], 2, id="no-file"),
        pytest.param(["fly", "study.yaml"], 2, id="no-command"),
        pytest.param(["logs", "study.yaml", "minus-one"], 2, id="no-number"),
    ],
)
def test_usage(tmp_path: Path, arguments: list[str], code: int) -> None:
    assert sweep(tmp_path, *arguments).returncode == code


@pytest.mark.parametrize(
    ("code", "forbidden"),
    [
        pytest.param("import sweeper", ("torch", "mlflow", "optuna", "numpy"), id="import"),
        pytest.param("import sweeper.cli", ("torch", "mlflow", "optuna", "numpy"), id="help"),
        pytest.param(
            "import sys; sys.argv = ['sweep', 'status', 'study.yaml']\n"
            "from sweeper.cli import main\ntry: main()\nexcept SystemExit: pass",
            ("torch", "mlflow"),
            id="status",
        ),
        pytest.param(
            "import sys; sys.argv = ['sweep', 'best', 'study.yaml']\n"
            "from sweeper.cli import main\ntry: main()\nexcept SystemExit: pass",
            ("torch", "mlflow"),
            id="best",
        ),
    ],
)
def test_light_commands_import_nothing_heavy(ran: Path, code: str, forbidden: tuple[str, ...]) -> None:
    script = f"{code}\nimport sys\nprint('loaded:', sorted(set(sys.modules) & set({forbidden!r})))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ran, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "loaded: []", done.stderr


# --- interruptions

LONG = (
    STUDY.replace("max_epochs: 4", "max_epochs: 200").replace("trials: 3", "trials: 2")
    + "early_stopping: {patience: 500}\n"
)


def last_epoch(folder: Path) -> int:
    names = (path.stem for path in (folder / "mlruns/checkpoints").glob("small-*/trial-0000/last-*.pt"))
    return max((int(name.split("-")[1]) for name in names), default=-1)


@pytest.mark.parametrize(
    "signals",
    [
        pytest.param([signal.SIGINT], id="ctrl-c"),
        pytest.param([signal.SIGINT, signal.SIGINT], id="ctrl-c-twice"),
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
        "        if self.training: raise RuntimeError('the model is broken')\n"
        "        return super().forward(inputs.flatten(1))\n"
        "def build(params, data): return Broken(64, data.num_outputs)\n"
    )
    text = STUDY.replace("{name: mlp, params: {width: 32}}", "{name: 'broken:build'}").replace("trials: 3", "trials: 9")
    (tmp_path / "study.yaml").write_text(text)
    done = sweep(tmp_path, "run", "study.yaml")
    assert done.returncode == 3, done.stderr
    assert "4 trials failed, more than budget.max_failures (3)" in done.stderr
    assert "RuntimeError: the model is broken" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Traceback" in sweep(tmp_path, "logs", "study.yaml", "0").stdout
    statuses = {name: run.info.status for name, run in runs(tmp_path).items()}
    assert statuses == dict.fromkeys(["small", *(f"trial-{n:04d}" for n in range(4))], "FAILED")
    best = sweep(tmp_path, "best", "study.yaml")
    assert (best.returncode, "has no best trial yet" in best.stderr) == (1, True)
