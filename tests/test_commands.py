"""What the commands print and MLflow shows once a study has run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from commands import STUDY, as_json, client_of, runs, sweep
from sweeper import load_model
from sweeper.data import load_data
from sweeper.spec import DataSpec


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
    assert (params["speed.torch"], params["speed.threads"]) == (torch.__version__, "1")
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
    for command in ("init -q", "add wandering.py", "-c user.name=me -c user.email=me@host commit -qm first"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
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
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, capture_output=True, text=True, check=True)
    tags = runs(tmp_path)["small"].data.tags
    assert (tags["mlflow.source.git.commit"], tags["git.dirty"]) == (head.stdout.strip(), "false")


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
    assert "Nothing to do: the trials of the budget are done." in done.stdout
    assert sorted(runs(ran)) == ["small", "trial-0000", "trial-0001", "trial-0002"]
    parent, best = runs(ran)["small"], as_json(ran, "best")
    history = client_of(ran).get_metric_history(parent.info.run_id, "best/val_accuracy")
    assert [(point.step, point.value) for point in history] == [(best["trial"], best["value"])]
    assert json.loads(parent.data.tags["best_params"]) == best["params"]


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


@pytest.mark.parametrize(
    ("code", "forbidden"),
    [
        pytest.param("import sweeper", ("torch", "mlflow", "optuna", "numpy"), id="import"),
        pytest.param(
            "import sys; sys.argv = ['sweep', '--help']\n"
            "from sweeper.cli import main\ntry: main()\nexcept SystemExit: pass",
            ("torch", "mlflow", "optuna", "numpy"),
            id="help",
        ),
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
