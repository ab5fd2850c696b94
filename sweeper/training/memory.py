"""Recognise out-of-memory, and give memory back after a trial."""

from __future__ import annotations

import gc

import psutil
import torch
from torch import nn

from sweeper.errors import SpecError

GIB = 2**30
OTHERS_MATTER = 0.05
"""The fraction of a GPU's memory that other processes must hold to be worth a word; a CUDA context is less."""


def check_weights_fit(model: nn.Module, device: torch.device) -> None:
    """Raises `SpecError` when weights and gradients alone, one number each, need more memory than the device has.

    The model may stand on any device, `meta` too.
    """
    needed = 2 * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    if device.type == "cuda":
        there, where = torch.cuda.get_device_properties(device).total_memory, str(device)
    else:
        there, where = psutil.virtual_memory().total, "this machine"
    if needed > there:
        raise SpecError(
            ("model",),
            f"its weights and gradients alone need {needed / GIB:.1f} GiB, and {where} has {there / GIB:.1f}",
            "Choose a smaller one, or search smaller values of model.params.",
        )


def is_out_of_memory(error: BaseException) -> bool:
    """torch's own error, or the allocator's message where a library, or CUDA itself, raises another RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    words = ("out of memory", "alloc_failed", "defaultcpuallocator")  # CUDA's, cuBLAS's and cuDNN's, the CPU's
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


def release_memory() -> None:
    """Collect reference circles (a model and its hooks) and return cached blocks. Call it outside any `except`."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def taken_by_others(device: torch.device) -> str | None:
    """A sentence when other processes hold much of a GPU's memory: then it is they who are to be looked at."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    if others < max(OTHERS_MATTER * total, GIB):
        return None
    return (
        f"{device} has {total / GIB:.1f} GiB, and other processes hold {others / GIB:.1f} of them"
        " (`nvidia-smi` names them)."
    )
