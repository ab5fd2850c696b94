"""The learning rate of every optimizer step, as one table made before training starts.

A table has no state: a resumed trial reads on at its step, and a step that was skipped does not move it. The closed
forms are those of `torch.optim.lr_scheduler`. Only `plateau` depends on what happens: `Plateau` holds its state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sweeper.spec import SchedulerSpec

Floats = NDArray[np.float64]


def lr_table(spec: SchedulerSpec, base_lrs: Sequence[float], total_steps: int, steps_per_epoch: int) -> Floats:
    """The learning rate that optimizer step s (from 0) uses: float64, shape (total_steps, len(base_lrs)).

    A warm-up of W steps uses `base_lr * (s + 1) / W`. Then the schedule starts at its own step 0 and is
    `total_steps - W` long (at least 1). `plateau` is constant here: see `Plateau`.
    """
    lrs = np.asarray(base_lrs, dtype=np.float64)
    warmup = warmup_steps(spec, steps_per_epoch)
    steps = np.arange(total_steps)
    length = max(1, total_steps - warmup)
    main = _MAIN[spec.name](spec, np.maximum(steps - warmup, 0)[:, None], lrs[None, :], length, steps_per_epoch)
    ramp = (steps[:, None] + 1) / max(1, warmup) * lrs
    return np.where(steps[:, None] < warmup, ramp, main)


def warmup_steps(spec: SchedulerSpec, steps_per_epoch: int) -> int:
    """The length of the warm-up in optimizer steps; 0 without one."""
    return _steps(spec.warmup_epochs, steps_per_epoch) if spec.warmup_epochs else spec.warmup_steps


def schedule_notes(spec: SchedulerSpec, total_steps: int, steps_per_epoch: int) -> list[str]:
    """Sentences about a schedule that runs, but hardly as it was meant."""
    warmup = warmup_steps(spec, steps_per_epoch)
    if warmup <= total_steps:
        return []
    return [
        f"The warm-up of {warmup} steps is longer than the trial of {total_steps} steps: the learning rate never "
        f"rises above {total_steps / warmup:.4g} of its peak. Shorten train.scheduler.warmup_epochs or warmup_steps, "
        "train longer, or keep the effective batch size smaller."
    ]


def _steps(epochs: float, steps_per_epoch: int) -> int:
    return max(1, round(epochs * steps_per_epoch))


# Each schedule takes steps of shape (n, 1), lrs of shape (1, groups) and its length in steps; it returns (n, groups).


def _constant(spec: SchedulerSpec, steps: NDArray[np.int64], lrs: Floats, length: int, steps_per_epoch: int) -> Floats:
    return np.broadcast_to(lrs, (len(steps), lrs.shape[1])).copy()


def _step(spec: SchedulerSpec, steps: NDArray[np.int64], lrs: Floats, length: int, steps_per_epoch: int) -> Floats:
    decays = steps // _steps(spec.step_size, steps_per_epoch)
    return lrs * spec.gamma**decays


def _cosine(spec: SchedulerSpec, steps: NDArray[np.int64], lrs: Floats, length: int, steps_per_epoch: int) -> Floats:
    return _half_cosine(lrs, spec.eta_min, steps / length)


def _cosine_warm_restarts(
    spec: SchedulerSpec, steps: NDArray[np.int64], lrs: Floats, length: int, steps_per_epoch: int
) -> Floats:
    first = _steps(spec.T_0, steps_per_epoch)
    starts, periods = [0], [first]
    while starts[-1] + periods[-1] < length:  # the starts as whole numbers: torch's logarithm can miss one by rounding
        starts.append(starts[-1] + periods[-1])
        periods.append(periods[-1] * spec.T_mult)
    cycle = np.searchsorted(starts, steps, side="right") - 1
    return _half_cosine(lrs, spec.eta_min, (steps - np.array(starts)[cycle]) / np.array(periods)[cycle])


def _one_cycle(spec: SchedulerSpec, steps: NDArray[np.int64], lrs: Floats, length: int, steps_per_epoch: int) -> Floats:
    start = lrs / spec.div_factor
    peak_step = spec.pct_start * length - 1  # need not be whole; below 0 where the rise is shorter than one step
    position = steps.astype(np.float64)
    rise = position / peak_step if peak_step > 0 else np.ones(steps.shape, dtype=np.float64)
    fall = (position - peak_step) / (length - 1 - peak_step)
    rising, falling = _half_cosine(start, lrs, rise), _half_cosine(lrs, start / spec.final_div_factor, fall)
    return np.where(steps <= peak_step, rising, falling)


def _linear(spec: SchedulerSpec, steps: NDArray[np.int64], lrs: Floats, length: int, steps_per_epoch: int) -> Floats:
    return lrs * (spec.start_factor + (spec.end_factor - spec.start_factor) * steps / length)


def _polynomial(
    spec: SchedulerSpec, steps: NDArray[np.int64], lrs: Floats, length: int, steps_per_epoch: int
) -> Floats:
    return lrs * (1.0 - steps / length) ** spec.power


def _half_cosine(start: Floats, end: Floats | float, progress: Floats) -> Floats:
    """From `start` (progress 0) to `end` (progress 1) along half a cosine."""
    return end + (start - end) * (1 + np.cos(math.pi * progress)) / 2


_Schedule = Callable[[SchedulerSpec, NDArray[np.int64], Floats, int, int], Floats]
_MAIN: dict[str, _Schedule] = {
    "constant": _constant,
    "step": _step,
    "cosine": _cosine,
    "cosine_warm_restarts": _cosine_warm_restarts,
    "one_cycle": _one_cycle,
    "linear": _linear,
    "polynomial": _polynomial,
    "plateau": _constant,
}


class Plateau:
    """Reduce `scale` by `factor` when more than `patience` validations in a row brought nothing new.

    `scale` is for the caller to apply: `max(lr * scale, min(lr, min_lr))` for each lr of the table, so that `min_lr`
    is a floor under the reductions and lifts no warm-up.

    As `torch.optim.lr_scheduler.ReduceLROnPlateau` with its threshold (1e-4, relative) and no cooldown, except that
    values that are not finite are passed over (torch counts them as bad), and that there is no least change `eps`.
    """

    threshold = 1e-4

    def __init__(
        self, factor: float, patience: int, direction: Literal["minimize", "maximize"], min_lr: float = 0.0
    ) -> None:
        self.factor = factor
        self.patience = patience
        self.direction = direction
        self.min_lr = min_lr
        self.scale = 1.0
        self.best: float | None = None
        self.num_bad = 0

    def observe(self, value: float) -> None:
        """Take in the monitor's value; once per validation."""
        if not math.isfinite(value):
            return
        if self._is_better(value):
            self.best, self.num_bad = value, 0
            return
        self.num_bad += 1
        if self.num_bad > self.patience:
            self.scale *= self.factor
            self.num_bad = 0

    def _is_better(self, value: float) -> bool:
        if self.best is None:
            return True
        if self.direction == "minimize":
            return value < self.best * (1 - self.threshold)
        return value > self.best * (1 + self.threshold)

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "best": self.best, "num_bad": self.num_bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self.best, self.num_bad = state["scale"], state["best"], state["num_bad"]
