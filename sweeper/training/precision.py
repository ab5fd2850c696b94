"""Device and mixed precision: what `auto` means here, autocast, and when a loss scale is needed."""

from __future__ import annotations

import contextlib
from typing import Literal

import torch

from sweeper.errors import SpecError

Precision = Literal["fp32", "bf16", "fp16"]
DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """`auto` is CUDA, then MPS, then the CPU. Raises `SpecError` for a device that this machine does not have."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SpecError(
            ("train", "device"),
            f"{name!r} is asked for, but torch {torch.__version__} sees no CUDA device",
            "Write `device: auto` or `device: cpu`, or install a CUDA driver and build of torch.",
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SpecError(
            ("train", "device"),
            f"{name!r} is asked for, but there are {torch.cuda.device_count()} CUDA devices, counted from 0",
            "Write the index of one of them.",
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise SpecError(("train", "device"), "'mps' is asked for, but this machine has no Metal GPU", "Write `auto`.")
    return device


def resolve_precision(name: str, device: torch.device) -> Precision:
    """`auto`: bf16 where the GPU has it in hardware, fp16 on older CUDA, fp32 elsewhere.

    Raises `SpecError` for half precision on MPS: its autocast refuses types with a warning only, and its scaler wants
    float64, so the logged precision would not be what ran.
    """
    if name == "auto":
        if device.type != "cuda":
            return "fp32"
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    if device.type == "mps" and name != "fp32":
        raise SpecError(("train", "precision"), f"{name} does not train reliably on MPS", "Write `precision: fp32`.")
    assert name in DTYPES, name
    return name  # type: ignore[return-value]


def autocast(precision: Precision, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """One forward pass in `precision`. Entered anew for each pass, so that no cast of a weight outlives its step."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.amp.autocast(device.type, dtype=DTYPES[precision])


def make_scaler(precision: Precision, device: torch.device, init_scale: float) -> torch.amp.GradScaler | None:
    """A GradScaler for fp16. None for bf16 and fp32, whose range needs no scale."""
    if precision != "fp16":
        return None
    return torch.amp.GradScaler(device.type, init_scale=init_scale)
