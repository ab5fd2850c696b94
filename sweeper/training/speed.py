"""What `auto` under `speed` means on this device, and the full account of how fast a trial was set up to run."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sweeper.spec import SpeedSpec, TrialConfig
from sweeper.training.windows import Windows


@dataclass(frozen=True)
class Speed:
    """The resolved settings of one trial. They are frozen in its checkpoint, because some of them round differently."""

    precision: str
    num_workers: int
    pin_memory: bool
    prefetch_factor: int | None
    persistent_workers: bool
    non_blocking: bool
    cudnn_benchmark: bool
    channels_last: bool
    tf32: bool
    compile: bool
    fused: bool
    threads: int


def resolve_speed(
    config: TrialConfig, device: torch.device, precision: str, *, num_workers: int, can_fuse: bool, images: bool
) -> Speed:
    """`num_workers` is already resolved by the data; `images` says that a sample is (channels, height, width)."""
    spec, cuda = config.speed, device.type == "cuda"
    pin = cuda if spec.pin_memory == "auto" else spec.pin_memory and torch.cuda.is_available()
    half = precision != "fp32"
    return Speed(
        precision=precision,
        num_workers=num_workers,
        pin_memory=pin,
        prefetch_factor=spec.prefetch_factor if num_workers else None,
        persistent_workers=spec.persistent_workers and num_workers > 0,
        non_blocking=pin,
        cudnn_benchmark=cuda and _resolved(spec, "cudnn_benchmark", auto=not config.train.deterministic),
        channels_last=images and _resolved(spec, "channels_last", auto=cuda and half),
        tf32=cuda and spec.tf32,
        compile=spec.compile,
        fused=can_fuse and _resolved(spec, "fused", auto=True),
        threads=torch.get_num_threads(),
    )


def _resolved(spec: SpeedSpec, name: str, *, auto: bool) -> bool:
    value = getattr(spec, name)
    return auto if value == "auto" else bool(value)


def apply_speed(speed: Speed, deterministic: bool) -> None:
    """Set torch's switches of this process for one trial."""
    # The older switches, which set the newer ones too. The other way round, reading the older ones raises.
    torch.set_float32_matmul_precision("high" if speed.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = speed.tf32
    torch.backends.cudnn.benchmark = speed.cudnn_benchmark
    if deterministic:
        # Read when cuBLAS starts, hence before the first CUDA call of the process.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic, warn_only=True)


def set_threads(threads: int) -> None:
    """Fix torch's CPU threads of this process: another number adds in another order, and so rounds differently."""
    torch.set_num_threads(threads)


def speed_config(speed: Speed, device: torch.device, windows: Windows) -> dict[str, Any]:
    """Everything that decides how fast this attempt runs, as plain values for `speed_config.json`.

    `batch_size` and `accumulation_steps` are what runs, which differs from what was drawn where memory was short.
    """
    cuda = device.type == "cuda"
    return {
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
        "driver": _driver_version() if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu_count": os.cpu_count(),
        "loader": "dataloader",
        "batch_size": windows.micro_batch_size,
        "accumulation_steps": windows.accumulation_steps * windows.parts_per_batch,
        "effective_batch_size": windows.batch_size * windows.accumulation_steps,
        **asdict(speed),
    }


def _driver_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return lines[0] if lines else None
