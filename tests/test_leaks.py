"""After 20 trials that ended in every way a worker holds what it held after the first."""

from __future__ import annotations

import json
from pathlib import Path

import optuna

from commands import STUDY, sweep

WAYS = ["well", "raises", "memory", "diverges", "well"]
# Each model writes down what the process holds before it is built; then its trial ends as it is told to.
GAUGED = """
import gc, json, os, threading
import psutil, torch
from torch import nn

class Model(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.linear, self.way = nn.Linear(64, 10), way
        self.circle = [self]  # such as hooks make: only the garbage collector frees it
    def forward(self, inputs):
        outputs = self.linear(inputs.flatten(1))
        if self.training and torch.is_grad_enabled():
            if self.way == "raises":
                raise ValueError("this one cannot be trained")
            if self.way == "memory" and len(inputs) > 16:
                torch.empty(10**15)
            if self.way == "diverges":
                return outputs * float("nan")
        return outputs

def build(params, data):
    if os.path.exists("mlruns/optuna.db"):  # not in the checks before
        gc.collect()
        held = {
            "tensors": sum(isinstance(o, torch.Tensor) for o in gc.get_objects()),
            "modules": sum(isinstance(o, nn.Module) for o in gc.get_objects()),
            "files": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "python threads": threading.active_count(),
            "children": len(psutil.Process().children(recursive=True)),
        }
        with open("held.jsonl", "a") as file:
            file.write(json.dumps(held) + "\\n")
    return Model(params["way"])
"""


def test_twenty_trials_leave_what_the_first_one_left(tmp_path: Path) -> None:
    """Cases 84 and 85."""
    (tmp_path / "gauged.py").write_text(GAUGED)
    points = [{"model.params.way": way, "lr": 0.001 + number / 1000} for number, way in enumerate(WAYS * 4)]
    text = STUDY.replace("{name: mlp, params: {width: 32}}", "{name: 'gauged:build'}")
    text = text.replace("trials: 3", "trials: 16, max_failures: 9").replace("max_epochs: 4", "max_epochs: 3")
    text = text.replace("  batch_size: {choices: [64, 128]}", f"  model.params.way: {{choices: {WAYS[:4]}}}")
    text += f"pruner: {{name: median, params: {{n_startup_trials: 2}}}}\nspeed: {{num_workers: 1}}\nenqueue: {points}\n"
    (tmp_path / "study.yaml").write_text(text)
    done = sweep(tmp_path, "run", "study.yaml")
    assert done.returncode == 0, done.stderr
    study = optuna.load_study(study_name="small", storage=f"sqlite:///{tmp_path}/mlruns/optuna.db")
    reasons = [trial.user_attrs["stop_reason"] for trial in study.trials]
    assert [reasons[number] for number in (1, 3)] == ["failed", "diverged"]
    assert (reasons.count("failed"), reasons.count("diverged")) == (4, 4)
    held = [json.loads(line) for line in (tmp_path / "held.jsonl").read_text().splitlines()]
    assert len(held) >= 22  # one more for each time that memory was short
    # The second is the first that begins after a trial has ended.
    assert [line for line in held[1:] if line != held[1]] == []
