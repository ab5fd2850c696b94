"""A disk that is full or gone: trials go on without checkpoints, and each says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from commands import STUDY, as_json, runs, sweep

LARGE = (
    STUDY.replace("width: 32", "width: 4096")
    .replace("max_epochs: 4", "max_epochs: 2")
    .replace("trials: 3", "trials: 4")
)


def values(folder: Path) -> list[Any]:
    shown = [as_json(folder, "show", str(number)) for number in range(4)]
    return [(trial["stop_reason"], trial["value"], trial["best_epoch"], trial["params"]) for trial in shown]


def test_a_full_disk_for_checkpoints_changes_no_result(tmp_path: Path, small_disk: Path) -> None:
    """Case 40: one MiB, and a model of more than that."""
    small, ample = tmp_path / "small", tmp_path / "ample"
    for folder, checkpoints in ((small, small_disk), (ample, ample / "checkpoints")):
        folder.mkdir()
        (folder / "study.yaml").write_text(f"{LARGE}checkpoints: {{dir: {str(checkpoints)!r}}}\n")
    done = sweep(small, "run", "study.yaml")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "went on without checkpoints" in line]
    assert [line.split()[2] for line in lines] == ["0", "1", "2", "3"]
    assert all("No space left on device" in line or "File too large" in line for line in lines)
    assert all(str(small_disk) in line for line in lines)
    assert sweep(ample, "run", "study.yaml").returncode == 0
    assert values(small) == values(ample)
    assert list(small_disk.rglob("*.pt*")) == []
    assert as_json(small, "best")["checkpoint"] is None
    for name, run in runs(small).items():
        assert run.info.status == "FINISHED"
        assert ("without checkpoints" in run.data.tags.get("note", "")) == name.startswith("trial-")
    logged = {name: run.data.metrics["val_accuracy"] for name, run in runs(small).items() if name.startswith("trial-")}
    assert logged == {
        name: run.data.metrics["val_accuracy"] for name, run in runs(ample).items() if name.startswith("trial-")
    }


UNPLUGGING = """
import shutil
from pathlib import Path
from torch import nn

class Unplugging(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.validated = nn.Linear(64, 10), False

    def forward(self, inputs):
        if self.training and self.validated and Path("disk").is_dir():
            shutil.rmtree("disk")
            Path("disk").write_text("in the way")
        self.validated = self.validated or not self.training and Path("mlruns").is_dir()
        return self.linear(inputs.flatten(1))

def build(params, data):
    return Unplugging()
"""


def test_a_folder_that_vanishes_while_trials_run_stops_none(tmp_path: Path) -> None:
    (tmp_path / "unplug.py").write_text(UNPLUGGING)
    text = STUDY.replace("{name: mlp, params: {width: 32}}", "{name: 'unplug:build'}")
    (tmp_path / "study.yaml").write_text(text + "checkpoints: {dir: disk}\n")
    done = sweep(tmp_path, "run", "study.yaml")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "disk").read_text() == "in the way"
    lines = [line for line in done.stdout.splitlines() if "went on without checkpoints" in line]
    assert [line.split()[2] for line in lines] == ["0", "1", "2"]
    assert all("Not a directory" in line or "File exists" in line for line in lines), lines
    assert as_json(tmp_path, "status")["trials"]["complete"] == 3
    assert {run.info.status for run in runs(tmp_path).values()} == {"FINISHED"}
