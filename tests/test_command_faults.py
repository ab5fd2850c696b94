"""A fault costs a sentence and leaves nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from commands import STUDY, sweep


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
            "study.yaml:9: search_space.model.params.depth: -1 cannot be used: must be at least 0",
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
