"""Trials on a CUDA device: sweeps, kills, moves to the CPU and back. `tests/gpu/run.sh` runs this folder; the ordinary
run of pytest leaves it out."""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from torch import Tensor

from builders import make_config
from harness import Ran, Remembered
from sweeper import load_model
from sweeper.data import load_data
from sweeper.spec import DataSpec
from sweeper.tracking.texts import as_text
from sweeper.training.loop import Clock, train_window
from sweeper.training.precision import resolve_precision
from sweeper.training.session import Session, build_session
from sweeper.training.trial_folder import TrialFolder, open_checkpoint
from test_commands import as_json, runs, sweep
from test_session import few_digits_session, run

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
TESTS = Path(__file__).parent.parent


# --- the digits sweep, by the command

STUDY = """\
study: on-the-card
objective: {monitor: val_accuracy, direction: maximize}
data: {source: digits, val_fraction: 0.2}
model: {name: cnn, params: {width: 8}}
train: {max_epochs: 4, device: DEVICE, precision: PRECISION, scheduler: {name: cosine}}
search_space:
  lr: {low: 1e-3, high: 1e-2, log: true}
  accumulation_steps: {choices: [1, 2]}
budget: {trials: 3}
"""


@pytest.fixture(scope="module", params=["fp16", "bf16"])
def swept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder in which the sweep ran to its end, and the precision it was asked for."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "study.yaml").write_text(STUDY.replace("DEVICE", DEVICE).replace("PRECISION", request.param))
    done = sweep(folder, "run", "study.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, request.param


def test_a_sweep_on_the_card_completes_and_says_what_it_ran_on(swept: tuple[Path, str]) -> None:
    folder, precision = swept
    assert as_json(folder, "status")["trials"]["complete"] == 3
    found = runs(folder)
    for number in range(3):
        params = found[f"trial-{number:04d}"].data.params
        (path,) = folder.glob(f"mlruns/checkpoints/on-the-card-*/trial-{number:04d}/speed_config.json")
        speed = json.loads(path.read_text())
        assert (params["device"], params["precision"]) == (DEVICE, precision)
        assert {f"speed.{name}": as_text(value) for name, value in speed.items()}.items() <= params.items()
        assert (speed["device"], speed["precision"]) == (DEVICE, precision)
        assert speed["device_name"] == torch.cuda.get_device_name(0)
        assert re.fullmatch(r"\d+(\.\d+)+", speed["driver"])
        assert (speed["cuda"], speed["cudnn"]) == (torch.version.cuda, torch.backends.cudnn.version())
        automatic = ("pin_memory", "non_blocking", "cudnn_benchmark", "channels_last", "fused")
        assert {name: speed[name] for name in automatic} == dict.fromkeys(automatic, True)


def test_memory_and_loss_scale_of_a_trial_on_the_card_are_logged(swept: tuple[Path, str]) -> None:
    folder, precision = swept
    for name, logged in runs(folder).items():
        if name.startswith("trial-"):
            metrics = logged.data.metrics
            memory = {key: value for key, value in metrics.items() if key.startswith("memory/")}
            assert set(memory) == {f"memory/{kind}_mib" for kind in ("allocated", "peak", "reserved", "resident")}
            assert all(math.isfinite(value) and value > 0 for value in memory.values()), memory
            assert memory["memory/allocated_mib"] <= memory["memory/peak_mib"]
            assert ("optim/loss_scale" in metrics) == (precision == "fp16")
            if precision == "fp16":
                assert math.frexp(metrics["optim/loss_scale"])[0] == 0.5  # a power of two


def test_the_best_of_the_card_opens_on_the_cpu(swept: tuple[Path, str]) -> None:
    """In fp32 and on the CPU a few of the 359 pictures may fall to another class than in half precision."""
    best = as_json(swept[0], "best")
    model = load_model(best["checkpoint"])
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}
    val = load_data(DataSpec(source="digits")).splits.val
    with torch.inference_mode():
        hits = (model(val.inputs).argmax(1) == val.targets).sum().item()
    assert hits / len(val) == pytest.approx(best["value"], abs=0.02)
    assert best["value"] > 0.8


def test_automatic_precision_is_what_the_card_has_in_hardware() -> None:
    has_bf16 = torch.cuda.get_device_capability()[0] >= 8
    assert resolve_precision("auto", torch.device(DEVICE)) == ("bf16" if has_bf16 else "fp16")


# --- kill and resume, in processes of their own


def work(study: dict[str, Any], folder: Path, killed_at: str | None = None, *, hide_card: bool = False) -> Ran:
    """Work on the study of `trial_spec(**study)` in a fresh process, to its end or to its SIGKILL."""
    command = [sys.executable, "-m", "gpu.fresh_process", os.fspath(folder), *([killed_at] if killed_at else [])]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""} if hide_card else dict(os.environ)
    done = subprocess.run(command, cwd=TESTS, env=environment, input=json.dumps(study), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    stored = optuna.load_study(study_name="toy", storage=f"sqlite:///{folder}/optuna.db")
    return Ran(stored, Remembered(), folder / "checkpoints")


def moving_study(optimizer: str, precision: str) -> dict[str, Any]:
    """One trial of six epochs with 3 steps each; dropout on the device, augmentation in loader workers."""
    return {
        "optimizer": optimizer,
        "precision": precision,
        "train": {"max_epochs": 6},
        "early_stopping": {"patience": 9},
        "speed": {"num_workers": 2},
    }


def only_trial(ran: Ran) -> TrialFolder:
    return TrialFolder(ran.folder / "trial-0000", 2)


def newest_checkpoint(ran: Ran) -> Path:
    return sorted(only_trial(ran).path.glob("last-*.pt"))[-1]


def speed_of_attempt(ran: Ran, attempt: int) -> dict[str, Any]:
    name = "speed_config.json" if attempt == 1 else f"speed_config.{attempt}.json"
    return json.loads((only_trial(ran).path / name).read_text())


def assert_one_whole_trial(ran: Ran, attempts: int) -> None:
    """It is the same trial, and every one of its 18 steps was made or skipped once."""
    assert (ran.states(), ran.reasons()) == (["COMPLETE"], ["max_epochs"])
    assert ran.trials[0].user_attrs["attempt"] == attempts
    records = only_trial(ran).records()
    assert [record.validation for record in records] == list(range(6))
    assert records[-1].step + sum(record.metrics["optim/skipped_steps"] for record in records) == 18
    values = [record.metrics["val_accuracy"] for record in records]
    assert ran.trials[0].value == max(values)
    log = (only_trial(ran).path / "trial.log").read_text()
    assert [f"Attempt {n} goes on after epoch {2 * n - 3}." in log for n in range(2, attempts + 1)] == [True] * (
        attempts - 1
    )


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_trial_killed_on_the_card_goes_on_there(tmp_path: Path, precision: str) -> None:
    study = moving_study("adamw", precision)
    state = open_checkpoint(newest_checkpoint(work(study, tmp_path, "save_last:2")))["session"]
    assert set(state["scaler"]) >= {"scale"} if precision == "fp16" else state["scaler"] == {}
    ran = work(study, tmp_path)
    assert_one_whole_trial(ran, attempts=2)
    for attempt in (1, 2):
        speed = speed_of_attempt(ran, attempt)
        assert (speed["device"], speed["precision"], speed["num_workers"]) == (DEVICE, precision, 2)
    for record in only_trial(ran).records():
        assert ("optim/loss_scale" in record.metrics) == (precision == "fp16")


@pytest.mark.parametrize(
    ("places", "optimizer", "precision"),
    [
        pytest.param(["cuda", "cpu", "cuda"], "adamw", "fp16", id="card-cpu-card"),
        pytest.param(["cpu", "cuda", "cpu"], "sgd", "auto", id="cpu-card-cpu"),
    ],
)
def test_a_trial_goes_on_where_there_is_no_card_and_back(
    tmp_path: Path, places: list[str], optimizer: str, precision: str
) -> None:
    """`device: auto`, two epochs in each place. The random states are bytes on the CPU wherever they were saved."""
    study = moving_study(optimizer, precision)
    for attempt, place in enumerate(places, start=1):
        killed_at = "save_last:2" if attempt < 3 else None
        ran = work(study, tmp_path, killed_at, hide_card=place == "cpu")
        assert speed_of_attempt(ran, attempt)["device"] == place
        session = torch.load(newest_checkpoint(ran), weights_only=True)["session"]  # each tensor where it was
        assert {tensor.device.type for tensor in session["model"].values()} == {place}
        rng = session["rng"]
        assert ("cuda" in rng) == (place == "cuda")
        states = [rng["torch"], *([rng["cuda"]] if place == "cuda" else [])]
        assert {(state.device.type, state.dtype) for state in states} == {("cpu", torch.uint8)}
    assert_one_whole_trial(ran, attempts=3)
    log = (only_trial(ran).path / "trial.log").read_text()
    moves = set(itertools.pairwise(places))
    warned = "The checkpoint was saved on {} and training goes on on {}:"
    assert (warned.format("a CUDA device", "cpu") in log) == (("cuda", "cpu") in moves)
    assert (warned.format("a device other than CUDA", "cuda") in log) == (("cpu", "cuda") in moves)
    assert {tensor.device.type for tensor in load_model(only_trial(ran).path).state_dict().values()} == {"cpu"}


# --- restoring, in this process


def test_dropout_on_the_card_goes_on_where_it_was(tmp_path: Path) -> None:
    """Were the card's generator not restored, the masks and so the losses would be others."""
    keys: dict[str, Any] = {"device": DEVICE, "precision": "fp32", "deterministic": True, "lr": 0.01}
    folder = TrialFolder(tmp_path, 1)
    whole = run(few_digits_session(**keys))
    end = torch.cuda.get_rng_state()
    first = few_digits_session(**keys)
    records = run(first, epochs=3)
    folder.save_last(first.state_dict(), 2)
    second = few_digits_session(**keys)
    state = folder.load_last()
    assert state is not None
    second.load_state_dict(state)
    records += run(second)
    assert torch.equal(torch.cuda.get_rng_state(), end)
    for name in ("train_loss", "val_loss", "optim/grad_norm"):
        series = [[record.metrics[name] for record in part] for part in (records, whole)]
        assert series[0] == pytest.approx(series[1], rel=1e-4), name


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adagrad", "rmsprop"])
def test_the_state_of_every_kind_of_optimizer_moves_with_its_trial(optimizer: str, tmp_path: Path) -> None:
    """Step counts stay on the CPU where the optimizer does not mask; all else is where the weights are."""
    folder = TrialFolder(tmp_path, 1)
    for epochs, device in ((2, DEVICE), (4, "cpu"), (6, DEVICE)):
        session = few_digits_session(optimizer=optimizer, lr=0.01, device=device, precision="fp32")
        state = folder.load_last()
        if state is not None:
            session.load_state_dict(state["session"])
            for name, tensor in session.model.state_dict().items():
                assert torch.equal(tensor.cpu(), state["session"]["model"][name]), name
        assert len(run(session, epochs)) == 2
        for kept in session.stepper.optimizer.state.values():
            places = {name: value.device.type for name, value in kept.items() if isinstance(value, Tensor)}
            steps = places.pop("step", device)
            assert steps == (device if session.speed.fused else "cpu")
            assert set(places.values()) <= {device}
        folder.save_last({"session": session.state_dict()}, epochs - 1)
    assert int(session.stepper.happened) == 6 * session.windows.steps_per_epoch


@pytest.mark.parametrize(("before", "after"), [("fp16", "bf16"), ("bf16", "fp16"), ("fp16", "fp32")])
def test_a_loss_scale_is_only_loaded_where_one_is_used(before: str, after: str) -> None:
    first = few_digits_session(device=DEVICE, precision=before)
    second = few_digits_session(device=DEVICE, precision=after, init_scale=16.0)
    run(first, epochs=2)
    second.load_state_dict(first.state_dict())
    assert (second.scaler is None) == (after != "fp16")
    records = run(second)
    assert len(records) == 4
    scales = [record.metrics.get("optim/loss_scale") for record in records]
    assert scales == [16.0 if after == "fp16" else None] * 4  # a fresh one, too young to have grown


def test_resuming_holds_no_second_copy_on_the_card(tmp_path: Path) -> None:
    """Some 8 MiB of weights: loaded on the card beside those that are there, they and Adam's moments would show."""
    config = make_config(
        model={"name": "mlp", "params": {"width": 1024, "depth": 3}},
        train={"device": DEVICE, "precision": "fp32", "optimizer": "adamw"},
    )
    data = load_data(config.data)
    folder = TrialFolder(tmp_path, 1)

    def fresh() -> Session:
        return build_session(config, data)

    def resumed() -> Session:
        session = build_session(config, data)
        state = folder.load_last()
        assert state is not None
        session.load_state_dict(state)
        return session

    session = fresh()
    train_windows(session, 2)  # also takes the workspaces that cuBLAS keeps
    folder.save_last(session.state_dict(), 0)
    session.close()
    del session
    peaks = [peak_bytes(fresh), peak_bytes(resumed)]
    assert peaks[0] > 32 << 20  # weights, gradients and two moments
    assert peaks[1] <= peaks[0] + (1 << 20)


def peak_bytes(build: Callable[[], Session]) -> int:
    """The most that a session and its first two steps hold on the card, beside what was held before."""
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with closing(build()) as session:
        train_windows(session, 2)
    return torch.cuda.max_memory_allocated() - before


def train_windows(session: Session, count: int) -> None:
    plan = session.windows.plan(range(session.config.train.effective_batch_size * count))
    with closing(session.train_loader.epoch(0, plan)) as batches:
        for window in session.windows.group(plan):
            train_window(session, window, batches, Clock(session))
