"""Everything one trial trains with, built once from its config, saved and restored as one state."""

from __future__ import annotations

import contextlib
import math
import os
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from sweeper.data import LoadedData
from sweeper.data.loader import EpochLoader, is_in_memory, resolve_num_workers
from sweeper.errors import SpecError
from sweeper.models import build_model, has_batch_norm
from sweeper.spec import TrialConfig
from sweeper.tasks import build_task
from sweeper.tasks.base import Task
from sweeper.training.clipping import Clipper
from sweeper.training.fitting import SMALLEST_BATCH_FOR_BATCH_NORM, Fitting
from sweeper.training.meters import Meters
from sweeper.training.optimizer import Stepper, build_optimizer, can_mask
from sweeper.training.plain import restore_rng, rng_state
from sweeper.training.precision import Precision, make_scaler, resolve_device, resolve_precision
from sweeper.training.schedule import Plateau, lr_table, schedule_notes
from sweeper.training.speed import Speed, apply_speed, resolve_speed
from sweeper.training.windows import Windows, validation_steps

# No gradients are kept in validation, so that more samples fit at once; the metrics are means over samples anyway.
EVALUATION_BATCH_FACTOR = 4


@dataclass
class Session:
    """A trial in the making. `epoch` is the next epoch to train, `elapsed_s` the time it took so far.

    `moved` is called after each micro-batch, of validation too.
    """

    config: TrialConfig
    device: torch.device
    speed: Speed
    data: LoadedData
    task: Task
    model: nn.Module
    stepper: Stepper
    clipper: Clipper
    scaler: torch.amp.GradScaler | None
    plateau: Plateau | None
    windows: Windows
    meters: Meters
    train_loader: EpochLoader
    val_loader: EpochLoader
    fitting: Fitting
    epoch: int = 0
    elapsed_s: float = 0.0
    timed_out: bool = False
    moved: Callable[[], None] = lambda: None

    @property
    def precision(self) -> Precision:
        return self.speed.precision  # type: ignore[return-value]

    def observe(self, value: float) -> None:
        """Tell the plateau schedule one validation's monitor."""
        if self.plateau is not None:
            self.plateau.observe(value)
            self.stepper.set_scale(self.plateau.scale, self.config.train.scheduler.min_lr)

    def state_dict(self) -> dict[str, Any]:
        """The state at the end of an epoch, from which the trial goes on bit for bit. Holds live tensors: save it
        before the next step."""
        return {
            "epoch": self.epoch,
            "device": self.device.type,
            "elapsed_s": self.elapsed_s,
            "model": self.model.state_dict(),
            "stepper": self.stepper.state_dict(),
            "scaler": self.scaler.state_dict() if self.scaler is not None else {},
            "plateau": self.plateau.state_dict() if self.plateau is not None else {},
            "meters": self.meters.state_dict(),
            "micro_batch_size": self.windows.micro_batch_size,
            "speed": asdict(self.speed),
            "rng": rng_state(self.device),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.elapsed_s = state["epoch"], state["elapsed_s"]
        self.model.load_state_dict(state["model"])
        if self.plateau is not None and state["plateau"]:
            self.plateau.load_state_dict(state["plateau"])
        # The optimizer comes last: building a schedule after it would reset its learning rates.
        self.stepper.load_state_dict(state["stepper"], self.config.train.scheduler.min_lr)
        if self.scaler is not None and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self.meters.load_state_dict(state["meters"])
        restore_rng(state["rng"], self.device)

    def close(self) -> None:
        """Stop the loader workers."""
        self.train_loader.close()
        self.val_loader.close()


def build_session(
    config: TrialConfig, data: LoadedData, saved: dict[str, Any] | None = None, largest_part: int | None = None
) -> Session:
    """Seed every generator, then build model, optimizer, schedule and loaders on the trial's device.

    `saved` is the state of an earlier attempt: on the same kind of device, what `auto` meant then is meant again.
    The state itself is for `load_state_dict`. Batches are cut into parts of at most `largest_part` samples, or of as
    many as are known to fit. Raises `SpecError` for a value that a part refuses.
    """
    train = config.train
    device = resolve_device(train.device)
    task = build_task(config.task, data.info)
    check_monitor(config, task)
    speed = _resolve(config, data, device, saved)
    apply_speed(speed, train.deterministic)
    reset_switches()
    seed_everything(config.seed)
    model = build_model(config.model, task.info).to(device)
    if speed.channels_last:
        model = model.to(memory_format=torch.channels_last)
    if speed.compile:
        model.compile()
    fitting = Fitting(config, task.info, device, speed.precision)
    sizes = [fitting.largest(train.batch_size), largest_part, saved and saved["micro_batch_size"]]
    largest_part = min(size for size in sizes if size)
    windows = Windows(len(data.splits.train), train.batch_size, train.accumulation_steps, largest_part)
    _warn_of_small_batches(model, windows)
    validation_steps(windows.steps_per_epoch, train.validations_per_epoch)
    stepper = _build_stepper(config, model, device, speed, windows.steps_per_epoch)
    scheduler = train.scheduler
    plateau = None
    if scheduler.name == "plateau":
        plateau = Plateau(scheduler.factor, scheduler.patience, config.objective.direction, scheduler.min_lr)
    norm_type = math.inf if train.norm_type == "inf" else float(train.norm_type)
    train_loader, val_loader = _build_loaders(config, data, speed)
    return Session(
        config=config,
        device=device,
        speed=speed,
        data=data,
        task=task.to(device),
        model=model,
        stepper=stepper,
        clipper=Clipper(train.max_grad_norm, train.max_grad_value, norm_type),
        scaler=make_scaler(speed.precision, device, train.init_scale),  # type: ignore[arg-type]
        plateau=plateau,
        windows=windows,
        meters=Meters(device),
        train_loader=train_loader,
        val_loader=val_loader,
        fitting=fitting,
    )


@contextlib.contextmanager
def on_no_device(unless: bool) -> Iterator[None]:
    """Build modules without memory and without drawing weights, to see whether they can be built at all.

    `unless`: on the CPU all the same, for code of users, which may look at its weights. The generators stay untouched.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu" if unless else "meta"):
        yield


def reset_switches() -> None:
    """torch's global switches as a new process has them: the user's code of an earlier trial may have turned them."""
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.autograd.set_detect_anomaly(False)


def seed_everything(seed: int) -> None:
    """Python's, NumPy's and torch's global generators, on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def check_monitor(config: TrialConfig, task: Task) -> None:
    """Raises `SpecError` unless the objective's monitor is one of the values that a validation measures."""
    measured = ["train_loss", "val_loss", *(f"val_{name}" for name in task.metrics())]
    monitor = config.objective.monitor
    if monitor not in measured:
        what = f"{monitor!r} is not measured by the task {config.task.name!r}"
        raise SpecError(("objective", "monitor"), what, f"Write one of: {', '.join(measured)}.")


def _resolve(config: TrialConfig, data: LoadedData, device: torch.device, saved: dict[str, Any] | None) -> Speed:
    train = config.train
    in_memory = is_in_memory(data.splits.train)
    cores = min(torch.get_num_threads(), os.cpu_count() or 1)
    resolved = resolve_speed(
        config,
        device,
        resolve_precision(train.precision, device),
        num_workers=resolve_num_workers(config.speed.num_workers, in_memory, cores),
        can_fuse=can_mask(train, device),
        images=len(data.info.input_shape) == 3,
    )
    if saved is None or saved["device"] != device.type:
        return resolved
    # What was `auto` stays as it was, because some of it rounds differently; what the file says now applies.
    kept = {key: value for key, value in saved["speed"].items() if getattr(config.speed, key, None) == "auto"}
    if train.precision == "auto":
        kept["precision"] = saved["speed"]["precision"]
    return replace(resolved, **kept, non_blocking=kept.get("pin_memory", resolved.pin_memory))


def _warn_of_small_batches(model: nn.Module, windows: Windows) -> None:
    size, drawn = windows.micro_batch_size, windows.batch_size
    batch_norm = has_batch_norm(model)
    if size < drawn:
        so = f"; batch norm takes its statistics from {size} samples" if batch_norm else ""
        warnings.warn(
            f"batch_size {drawn} does not fit into memory: it is taken in {windows.parts_per_batch} parts of up to "
            f"{size}, which add up to the same gradient; effective_batch_size stays{so}",
            stacklevel=3,
        )
    if size < SMALLEST_BATCH_FOR_BATCH_NORM and batch_norm:
        warnings.warn(
            f"batch norm sees micro-batches of {size}; its statistics are noisy below "
            f"{SMALLEST_BATCH_FOR_BATCH_NORM}, and accumulation_steps does not change that",
            stacklevel=3,
        )


def _build_stepper(
    config: TrialConfig, model: nn.Module, device: torch.device, speed: Speed, steps_per_epoch: int
) -> Stepper:
    train = config.train
    optimizer = build_optimizer(model, train, fused=speed.fused)
    base_lrs = [train.applied_lr * group["lr_factor"] for group in optimizer.param_groups]
    total_steps = steps_per_epoch * train.max_epochs
    for note in schedule_notes(train.scheduler, total_steps, steps_per_epoch):
        warnings.warn(note, stacklevel=3)
    table = lr_table(train.scheduler, base_lrs, total_steps, steps_per_epoch)
    return Stepper(optimizer, table, masking=speed.fused, device=device)


def _build_loaders(config: TrialConfig, data: LoadedData, speed: Speed) -> tuple[EpochLoader, EpochLoader]:
    def loader(dataset: Any, augment: list[Any]) -> EpochLoader:
        return EpochLoader(
            dataset,
            seed=config.seed,
            augment=augment,
            num_workers=speed.num_workers,
            pin_memory=speed.pin_memory,
            prefetch_factor=speed.prefetch_factor or config.speed.prefetch_factor,
            persistent_workers=speed.persistent_workers,
        )

    return loader(data.splits.train, config.data.augment), loader(data.splits.val, [])
