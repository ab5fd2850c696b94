"""What only a CUDA device can show. `tests/gpu/run.sh` runs it; the ordinary run of pytest leaves it out."""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from builders import make_config, toy_session
from harness import Ran, Remembered
from sweeper import DataInfo, load_model
from sweeper.data import load_data
from sweeper.errors import DivergedError
from sweeper.spec import DataSpec, TaskSpec
from sweeper.tasks import build_task
from sweeper.tracking.texts import as_text
from sweeper.training.loop import Clock, to_device, train_window
from sweeper.training.precision import resolve_precision
from sweeper.training.session import Session, build_session
from sweeper.training.trial_folder import TrialFolder, open_checkpoint
from test_commands import as_json, runs, sweep
from test_loop import run_in_file_order, run_in_file_order_raw, steered
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
        speed = json.loads(
            (folder / f"mlruns/checkpoints/on-the-card/trial-{number:04d}/speed_config.json").read_text()
        )
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


# --- no step waits for the card


@contextmanager
def waits_are(reaction: str) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*prototype feature")
        torch.cuda.set_sync_debug_mode(reaction)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def warm_session(optimizer: str, precision: str, fused: Any, clip: dict[str, Any]) -> tuple[Session, list[Any], Any]:
    """A session after two of its six windows, with the windows that are left and their batches in pinned memory."""
    config = make_config(
        model={"name": "cnn", "params": {"width": 8, "batch_norm": True, "dropout": 0.1}},
        task={"class_weights": "balanced"},
        train={
            "device": DEVICE,
            "optimizer": optimizer,
            "precision": precision,
            "batch_size": 32,
            "accumulation_steps": 2,
            "init_scale": 1024.0,  # so that no first step overflows
            **clip,
        },
        speed={"fused": fused},
    )
    session = build_session(config, load_data(config.data))
    plan = session.windows.plan(range(64 * 6))
    windows = session.windows.group(plan)
    with closing(session.train_loader.epoch(0, plan)) as epoch:
        loaded = list(epoch)
    assert session.speed.non_blocking
    assert all(tensor.is_pinned() for batch in loaded for tensor in batch)
    batches = iter(loaded)
    for window in windows[:2]:
        train_window(session, window, batches, Clock(session))
    return session, windows[2:], batches


CLIPS = [
    pytest.param({"max_grad_norm": 1.0}, id="by-norm"),
    pytest.param({"max_grad_norm": None}, id="measured"),
    pytest.param({"max_grad_value": 0.1}, id="by-value"),
]


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [
        *[(optimizer, precision) for optimizer in ("adamw", "sgd") for precision in ("fp32", "bf16", "fp16")],
        ("adam", "fp32"),
        ("adagrad", "fp32"),
    ],
)
def test_a_step_never_waits_for_the_card(optimizer: str, precision: str, clip: dict[str, Any]) -> None:
    session, windows, batches = warm_session(optimizer, precision, "auto", clip)
    assert session.speed.fused
    with closing(session), waits_are("error"):
        for window in windows:
            train_window(session, window, batches, Clock(session))
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):  # so a wait would have been seen
            session.meters.read()
    reading = session.meters.read()
    assert (reading.good_steps, reading.skipped) == (6, 0)


@pytest.mark.parametrize(("optimizer", "precision", "fused"), [("rmsprop", "fp32", "auto"), ("adamw", "fp16", False)])
def test_an_optimizer_that_cannot_mask_waits_once_a_step(optimizer: str, precision: str, fused: Any) -> None:
    session, windows, batches = warm_session(optimizer, precision, fused, {})
    assert not session.speed.fused
    with closing(session), warnings.catch_warnings(record=True) as seen, waits_are("warn"):
        warnings.simplefilter("always")
        for window in windows:
            train_window(session, window, batches, Clock(session))
    waits = [warning for warning in seen if "synchronizing CUDA operation" in str(warning.message)]
    assert len(waits) == len(windows), [f"{warning.filename}:{warning.lineno}" for warning in waits]


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_leave_from_pinned_memory_and_arrive_with_channels_last(
    channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy from other memory is staged, and the host waits for that, which no debug mode shows."""
    session, _, _ = warm_session("adamw", "bf16", "auto", {})
    assert session.speed.channels_last
    batch = torch.rand(4, channels, 8, 8).pin_memory(), torch.arange(4).pin_memory()
    left: list[bool] = []
    original = Tensor.to

    def noted(self: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        left.append(self.is_pinned())
        return original(self, *arguments, **keywords)

    with closing(session):
        monkeypatch.setattr(Tensor, "to", noted)
        arrived = to_device(batch, session)
    assert left == [True, True]
    assert all(tensor.device.type == DEVICE for tensor in arrived)
    assert arrived[0].is_contiguous(memory_format=torch.channels_last)
    assert all(torch.equal(there.cpu(), here) for there, here in zip(arrived, batch, strict=True))


# --- losses, steps and clipping have the values of the CPU

LABELS = DataInfo("toy", (4,), 3, {"train": 64}, target_dtype="uint8", target_shape=(3,))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("enabled", [pytest.param(True, id="autocast"), pytest.param(False, id="off")])
def test_the_multilabel_loss_under_autocast_is_that_of_the_cpu(precision: str, enabled: bool) -> None:
    """Eighths up to 8 are exact in both half types: only the loss's own arithmetic could differ."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(64, 3, generator=generator) * 16).round().clamp(-64, 64) / 8
    targets = (torch.rand(64, 3, generator=generator) > 0.5).to(torch.uint8)
    expected = F.binary_cross_entropy_with_logits(logits, targets.float())
    task = build_task(TaskSpec(name="multilabel"), LABELS).to(torch.device(DEVICE))
    output = logits.to(DEVICE, dtype).requires_grad_()
    with torch.autocast(DEVICE, dtype=dtype, enabled=enabled):
        total, weight = task.loss(output, (output, targets.to(DEVICE)))
    assert (total.dtype, total.device.type) == (torch.float32, DEVICE)
    assert (total / weight).item() == pytest.approx(expected.item(), abs=1e-6)
    total.backward()
    assert output.grad is not None
    gradient = (logits.sigmoid() - targets) / 3
    torch.testing.assert_close(output.grad.cpu().float(), gradient, rtol=1e-2, atol=1e-6)  # bf16 holds 8 bits


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_a_multilabel_model_trains_on_the_card(precision: str) -> None:
    session = toy_session(
        "digits_in_binary",
        "flat_model",
        task={"name": "multilabel"},
        max_epochs=3,
        optimizer="adamw",
        lr=0.01,
        device=DEVICE,
        precision=precision,
    )
    losses = [record.metrics["val_loss"] for record in run(session)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] < math.log(2) * 1.1  # an untrained model's is near log 2


def test_a_ragged_window_on_the_card_is_the_mean_over_its_samples() -> None:
    keys: dict[str, Any] = {"lr": 0.001, "batch_size": 4, "accumulation_steps": 2, "device": DEVICE}
    session = toy_session("line_data", "line_model", speed={"tf32": False}, precision="fp32", **keys)
    assert run_in_file_order(session) == pytest.approx([0.102, 0.445538], rel=1e-5)


@pytest.mark.parametrize(
    ("keys", "norm", "used", "clipped"),
    [
        pytest.param({"max_grad_norm": 1.0}, 5.0, (0.6, 0.8), 1.0, id="norm-2"),
        pytest.param({"max_grad_norm": 1.0, "norm_type": "inf"}, 4.0, (0.75, 1.0), 1.0, id="norm-inf"),
        pytest.param({"max_grad_norm": None}, 5.0, (3.0, 4.0), 0.0, id="measured-only"),
        pytest.param({"max_grad_norm": None, "max_grad_value": 3.5}, 5.0, (3.0, 3.5), 1.0, id="by-value"),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_gradients_on_the_card_are_clipped_after_unscaling(
    keys: dict[str, Any], norm: float, used: tuple[float, float], clipped: float, precision: str
) -> None:
    where: dict[str, Any] = {"device": DEVICE, "precision": precision}
    session = steered([(3.0, 4.0)] * 4, lr=1.0, batch_size=2, accumulation_steps=2, **where, **keys)
    (record,) = run(session)
    assert (-next(session.model.parameters()).detach()).tolist() == pytest.approx(used, rel=1e-6)
    assert record.metrics["optim/grad_norm"] == pytest.approx(norm)
    assert record.metrics["optim/clipped_fraction"] == clipped


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "adagrad", "rmsprop"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_bad_gradient_on_the_card_never_reaches_weights_or_state(optimizer: str, precision: str) -> None:
    """The bad window comes first: all is then as with a fresh optimizer. The schedule does not move either."""
    keys: dict[str, Any] = {
        "lr": 0.1,
        "batch_size": 1,
        "momentum": 0.9,
        "optimizer": optimizer,
        "precision": precision,
        "device": DEVICE,
        "max_epochs": 9,
        "scheduler": {"name": "linear", "start_factor": 0.1, "end_factor": 1.0},
    }
    session, clean = steered([(math.inf, 1.0), (1.0, 2.0)], **keys), steered([(1.0, 2.0)], **keys)
    run_in_file_order_raw(session)
    run_in_file_order_raw(clean)
    assert torch.equal(next(session.model.parameters()), next(clean.model.parameters()))
    state, clean_state = (s.stepper.optimizer.state_dict()["state"][0] for s in (session, clean))
    assert state.keys() == clean_state.keys()
    for key, value in clean_state.items():
        assert torch.equal(torch.as_tensor(state[key]), torch.as_tensor(value)), key
    reading = session.meters.read()
    assert (reading.skipped, reading.good_steps, int(session.stepper.happened)) == (1, 1, 1)
    assert reading.grad_norm == pytest.approx(math.sqrt(5))


def test_fp16_overflow_on_the_card_ends_the_trial_as_diverged() -> None:
    keys: dict[str, Any] = {"precision": "fp16", "batch_size": 2, "device": DEVICE}
    session = toy_session("constant_data", "line_model", {"count": 8, "value": 70000.0}, **keys)
    with torch.no_grad():
        next(session.model.parameters()).fill_(1.0)
    with pytest.raises(DivergedError, match="loss is not finite"):
        run(session)
