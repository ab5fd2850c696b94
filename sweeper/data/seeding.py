"""Random draws that depend on a key alone, and leave the random streams of training where they were."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Put the CPU states of torch, Python and NumPy back at the end. Loading data must not move dropout's stream."""
    torch_state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def seed_global(seed: int) -> None:
    """Seed what user code and torchvision's transforms draw from. Only the CPU: `torch.manual_seed` would also reseed
    the CUDA stream that dropout uses."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread, as it does in loader workers: sums over large images depend on how they are cut."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
