"""Recognise out-of-memory, and give memory back after a trial."""

from __future__ import annotations

import gc

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """torch's own error, or the allocator's message where a library raises a plain RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return type(error) is RuntimeError and "out of memory" in str(error).lower()


def release_memory() -> None:
    """Collect reference circles (a model and its hooks) and return cached blocks. Call it outside any `except`."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
