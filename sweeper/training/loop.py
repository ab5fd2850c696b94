"""The training loop: a generator that yields one `EpochRecord` after each validation.

Micro-batches are summed into windows, a window becomes one optimizer step: unscale, clip, step, or skip if a gradient
is not finite. Nothing is read back from the device between two validations except every `CHECK_EVERY` steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

import psutil
import torch
from torch import Tensor

from sweeper.data.loader import EpochLoader
from sweeper.errors import DivergedError
from sweeper.records import EpochRecord
from sweeper.tasks.base import Task
from sweeper.training.meters import Reading
from sweeper.training.precision import autocast
from sweeper.training.session import EVALUATION_BATCH_FACTOR, Session
from sweeper.training.windows import Plan, epoch_order, validation_steps

CHECK_EVERY = 50
MOST_SKIPPED_IN_A_ROW = 20


def train(session: Session) -> Generator[EpochRecord, None, None]:
    """Train from `session.epoch` to `max_epochs`. Close it (`contextlib.closing`) when leaving early.

    After a record whose epoch is complete, `session.state_dict()` is the state to save. Ends early with
    `session.timed_out` at `timeout_s`. Raises `DivergedError` when training cannot go on.
    """
    session.model.train()
    while session.epoch < session.config.train.max_epochs and not session.timed_out:
        with closing(_train_epoch(session, session.epoch)) as records:
            yield from records


def _train_epoch(session: Session, epoch: int) -> Generator[EpochRecord, None, None]:
    config, windows = session.config, session.windows
    groups = windows.group(windows.plan(epoch_order(windows.num_samples, config.seed, epoch)))
    plan = [micro_batch for window in groups for micro_batch in window]
    due = validation_steps(len(groups), config.train.validations_per_epoch)
    clock = Clock(session)
    with closing(session.train_loader.epoch(epoch, plan)) as batches:
        for position, window in enumerate(groups, start=1):
            train_window(session, window, batches, clock)
            if position % CHECK_EVERY == 0:
                _raise_if_diverged(session, session.meters.read())
            session.timed_out = clock.out_of_time()
            if position in due:  # in time or not, it is what the epoch was for
                complete = position == len(groups)
                session.epoch = epoch + complete
                validation = epoch * len(due) + due.index(position)
                yield _validate(session, epoch, validation, complete, clock)
                clock.restart()
            if session.timed_out:
                return


def train_window(session: Session, window: Plan, batches: Iterator[Any], clock: Clock) -> None:
    """One optimizer step on the mean over all samples of the window, exactly as one big batch would give it.

    Each micro-batch adds the gradient of its loss sum / number of samples in the window; the sum is then corrected
    to the window's total weight, which is known only afterwards (and is that number unless samples are weighted).
    """
    num_samples = sum(len(indices) for indices in window)
    total_weight = torch.zeros((), dtype=torch.float32, device=session.device)
    for _ in window:
        with clock.waiting():
            batch = next(batches)
        loss_sum, weight = forward_loss(session, batch)
        session.meters.add_loss(loss_sum.detach(), weight)
        total_weight += weight
        mean_part = loss_sum / num_samples
        (session.scaler.scale(mean_part) if session.scaler is not None else mean_part).backward()
        session.moved()
    optimizer = session.stepper.optimizer
    if session.scaler is not None:
        session.scaler.unscale_(optimizer)
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    clip = session.clipper(gradients, num_samples / total_weight)
    bad = ~torch.isfinite(clip.norm)
    session.stepper.step(bad)
    if session.scaler is not None:
        session.scaler.update()
    session.meters.add_step(clip, bad)
    clock.samples += num_samples
    optimizer.zero_grad(set_to_none=True)


def forward_loss(session: Session, batch: Any) -> tuple[Tensor, Tensor]:
    """(sum of the weighted losses, sum of the weights) of one micro-batch, both of shape () on the device."""
    batch = to_device(batch, session)
    with autocast(session.precision, session.device):
        output = session.task.forward(session.model, batch)
    return session.task.loss(output, batch)


def to_device(batch: Any, session: Session) -> Any:
    """Tensors of a nested batch on the session's device; images in its memory format."""
    if isinstance(batch, Tensor):
        # Moved first: another memory format is a copy, which on the host would not be in pinned memory.
        batch = batch.to(session.device, non_blocking=session.speed.non_blocking)
        if session.speed.channels_last and batch.ndim == 4:
            batch = batch.contiguous(memory_format=torch.channels_last)
        return batch
    if isinstance(batch, dict):
        return {key: to_device(value, session) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, session) for value in batch)
    return batch


def _raise_if_diverged(session: Session, reading: Reading) -> None:
    if reading.bad_losses:
        raise DivergedError("the training loss is not finite")
    if reading.streak >= MOST_SKIPPED_IN_A_ROW:
        raise DivergedError(f"{reading.streak} optimizer steps in a row had gradients that are not finite")


def _raise_if_poisoned(session: Session) -> None:
    """Weights and buffers (batch norm's statistics) are looked at once a validation."""
    for kind, tensors in (("weight", session.model.named_parameters()), ("buffer", session.model.named_buffers())):
        named = [(name, tensor) for name, tensor in tensors if tensor.is_floating_point() and tensor.numel()]
        if not named:
            continue
        finite = torch.stack([torch.isfinite(tensor).all() for _, tensor in named])
        if not bool(finite.all()):
            name = next(name for (name, _), good in zip(named, finite.tolist(), strict=True) if not good)
            raise DivergedError(f"the {kind} {name} is not finite")


def _validate(session: Session, epoch: int, validation: int, complete: bool, clock: Clock) -> EpochRecord:
    """Read the counters, look for divergence, evaluate, and put it all in one record."""
    synchronize(session.device)
    train_s = clock.elapsed()
    reading = session.meters.read()
    _raise_if_diverged(session, reading)
    _raise_if_poisoned(session)
    started = time.perf_counter()
    measured = evaluate(session, session.val_loader)
    synchronize(session.device)
    metrics = {
        "train_loss": reading.train_loss,
        **{f"val_{name}": value for name, value in measured.items()},
        **_optimizer_metrics(session, reading),
        "speed/samples_per_s": clock.samples / train_s,
        "speed/train_s": train_s,
        "speed/val_s": time.perf_counter() - started,
        "speed/data_wait_fraction": min(1.0, clock.waited_s / train_s),
        **memory_metrics(session.device),
    }
    session.observe(metrics[session.config.objective.monitor])
    session.meters.reset()
    session.elapsed_s = clock.total()
    step = int(session.stepper.happened)
    return EpochRecord(validation, epoch, step, complete, time.time_ns() // 1_000_000, metrics)


def _optimizer_metrics(session: Session, reading: Reading) -> dict[str, float]:
    metrics = {
        "optim/grad_norm": reading.grad_norm,
        "optim/clipped_fraction": reading.clipped_fraction,
        "optim/skipped_steps": float(reading.skipped),
    }
    last_step = max(0, int(session.stepper.happened) - 1)
    for group, lr in zip(session.stepper.optimizer.param_groups, session.stepper.lrs_at(last_step), strict=True):
        metrics[f"optim/lr_{group['name']}" if group["name"] else "optim/lr"] = lr
    if session.scaler is not None:
        metrics["optim/loss_scale"] = session.scaler.get_scale()
    return metrics


def evaluate(session: Session, loader: EpochLoader) -> dict[str, float]:
    """`loss` and the task's metrics as means over the samples of the loader's data, in the trial's precision.

    The same weights give the same values for every batch size.
    """
    task: Task = session.task
    metrics = {name: metric.to(session.device) for name, metric in task.metrics().items()}
    wide = torch.float32 if session.device.type == "mps" else torch.float64
    loss_sum, weight_sum = torch.zeros(2, dtype=wide, device=session.device).unbind()
    size = session.windows.micro_batch_size * EVALUATION_BATCH_FACTOR
    plan = [list(range(start, min(start + size, len(loader)))) for start in range(0, len(loader), size)]
    session.model.eval()
    try:
        with torch.inference_mode(), closing(loader.epoch(0, plan)) as batches:
            for loaded in batches:
                batch = to_device(loaded, session)
                with autocast(session.precision, session.device):
                    output = task.forward(session.model, batch)
                batch_loss, weight = task.loss(output, batch)
                loss_sum += batch_loss
                weight_sum += weight
                for metric in metrics.values():
                    metric.update(output, batch[1])
                session.moved()
    finally:
        session.model.train()
    values = torch.stack([loss_sum / weight_sum, *(m.compute().to(wide) for m in metrics.values())]).tolist()
    return dict(zip(["loss", *metrics], values, strict=True))


def memory_metrics(device: torch.device) -> dict[str, float]:
    """MiB in use; the CUDA figures only where the trial runs on CUDA. The peak starts anew at each validation."""
    mib = 1 << 20
    metrics = {"memory/resident_mib": psutil.Process().memory_info().rss / mib}
    if device.type == "cuda":
        metrics |= {
            "memory/allocated_mib": torch.cuda.memory_allocated(device) / mib,
            "memory/peak_mib": torch.cuda.max_memory_allocated(device) / mib,
            "memory/reserved_mib": torch.cuda.memory_reserved(device) / mib,
        }
        torch.cuda.reset_peak_memory_stats(device)
        utilization = gpu_utilization(device)
        if utilization is not None:
            metrics["gpu/utilization"] = utilization
    return metrics


def gpu_utilization(device: torch.device) -> float | None:
    """Percent of the last sampling period in which a kernel ran; None where NVML does not answer."""
    try:
        return float(torch.cuda.utilization(device))
    except Exception:  # NVML raises types of its own module, which may be missing altogether
        return None


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked, so that a clock tells the truth."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


class Clock:
    """Time since the last validation, and how much of it was spent waiting for data."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._before = session.elapsed_s
        self._begin = time.perf_counter()
        self.restart()

    def restart(self) -> None:
        self._start = time.perf_counter()
        self.waited_s = 0.0
        self.samples = 0

    def elapsed(self) -> float:
        return max(time.perf_counter() - self._start, 1e-9)

    def total(self) -> float:
        """Seconds of the whole trial, earlier attempts included."""
        return self._before + time.perf_counter() - self._begin

    def out_of_time(self) -> bool:
        return self.total() > (self._session.config.train.timeout_s or math.inf)

    def waiting(self) -> Clock:
        return self

    def __enter__(self) -> None:
        self._wait_start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.waited_s += time.perf_counter() - self._wait_start
