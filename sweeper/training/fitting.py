"""Which micro-batch fits into a device's memory: found by running out of it, and remembered for the next trials.

Batches are cut into smaller parts, never changed: a window keeps its samples and its gradient, so that
`effective_batch_size` and the learning rate mean what was drawn.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import platformdirs
import psutil
import torch

from sweeper.records import DataInfo
from sweeper.spec import TrialConfig

SMALLEST_BATCH_FOR_BATCH_NORM = 16


def halved(micro_batch_size: int, has_batch_norm: bool) -> int | None:
    """The next smaller micro-batch; None when there is none that trains as well: batch norm needs its 16 samples."""
    smaller = -(-micro_batch_size // 2)
    floor = SMALLEST_BATCH_FOR_BATCH_NORM if has_batch_norm else 1
    return smaller if floor <= smaller < micro_batch_size else None


class Fitting:
    """What is known of one model on one kind of device, in the user's cache folder.

    The key is everything that decides how much memory a sample takes; other settings find nothing. Reading and
    writing never raise: a lost cache costs one more out-of-memory.
    """

    def __init__(self, config: TrialConfig, info: DataInfo, device: torch.device, precision: str) -> None:
        key: list[Any] = [
            _device_key(device),
            precision,
            config.model.model_dump(mode="json"),
            config.task.name,
            config.train.optimizer,
            list(info.input_shape),
            info.input_dtype,
            info.num_outputs,
            config.speed.model_dump(mode="json"),
        ]
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        self.path = Path(platformdirs.user_cache_dir("sweeper")) / "micro-batches" / f"{digest[:32]}.json"

    def largest(self, batch_size: int) -> int:
        """The micro-batch to begin with: `batch_size`, unless as many did not fit before."""
        known = self._read()
        if known is None:
            return batch_size
        fits, too_large = known
        return min(batch_size, fits) if batch_size >= too_large else batch_size

    def remember(self, fits: int, too_large: int) -> None:
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            beside = self.path.with_suffix(f".{os.getpid()}.tmp")
            beside.write_text(json.dumps({"fits": fits, "too_large": too_large}), encoding="utf-8")
            os.replace(beside, self.path)

    def _read(self) -> tuple[int, int] | None:
        try:
            known = json.loads(self.path.read_text(encoding="utf-8"))
            return max(1, int(known["fits"])), int(known["too_large"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _device_key(device: torch.device) -> list[Any]:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return [properties.name, properties.total_memory]
    return [device.type, psutil.virtual_memory().total]
