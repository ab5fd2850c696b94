"""Single samples made into batches, and the targets of a whole dataset."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, default_collate

from sweeper.data.seeding import kept_random_state, one_thread, seed_global
from sweeper.errors import DataError
from sweeper.spec import derive_seed

READ_AT_ONCE = 64
"""Samples held at a time where only their targets are wanted."""

COMPARED = 64
"""Samples that `targets` is compared with."""


def read_samples(dataset: Any, keys: list[tuple[int, int]], seed: int) -> list[Any]:
    """The samples of keys (epoch, index), each drawn from its key alone.

    A sample has the same bits in the main process and in every loader worker, in any order, and the global random
    states are afterwards as they were before.
    """
    samples = []
    with kept_random_state(), one_thread():
        for epoch, index in keys:
            seed_global(derive_seed(seed, epoch, index))
            samples.append(dataset[index])
    return samples


def first_batch(dataset: Any, size: int) -> tuple[Any, Any]:
    """The batch (inputs, targets) of the first samples, `size` of them or all, on the CPU."""
    return collate(read_samples(dataset, [(0, index) for index in range(min(size, len(dataset)))], seed=0))


def collate(samples: list[Any]) -> tuple[Any, Any]:
    """The batch (inputs, targets) of samples (input, target); inputs may be anything `default_collate` takes.

    Raises `DataError` for samples that do not go into one batch.
    """
    try:
        inputs, targets = default_collate(samples)
    except (RuntimeError, TypeError) as error:
        shapes = sorted({_shapes(sample) for sample in samples})
        raise DataError(
            f"Samples cannot be put into one batch: {error}.\n"
            f"  They are {'; '.join(shapes[:4])}. Give every sample tensors of the same shape."
        ) from error
    if isinstance(samples[0][1], float):
        targets = targets.float()  # default_collate makes float64 of Python floats, which MPS does not know
    return inputs, targets


def _shapes(sample: Any) -> str:
    if isinstance(sample, tuple | list):
        return f"({', '.join(_shapes(part) for part in sample)})"
    shape = getattr(sample, "shape", None)
    return type(sample).__name__ + (f" {tuple(shape)}" if shape is not None else "")


def targets_of(dataset: Any) -> Tensor:
    """All targets (N, ...), without decoding images where the dataset keeps them as `targets`, as torchvision's do.

    `targets` is believed when it holds what samples all over the dataset hold (a `target_transform` may change them);
    otherwise every sample is read.
    """
    if isinstance(dataset, Subset):
        return targets_of(dataset.dataset)[torch.as_tensor(dataset.indices, dtype=torch.int64)]
    if isinstance(dataset, ConcatDataset):
        return torch.cat([targets_of(part) for part in dataset.datasets])
    kept = getattr(dataset, "targets", None)
    if isinstance(kept, Tensor) and hasattr(dataset, "take"):
        return kept
    if kept is not None and len(kept) == len(dataset):
        targets, spread = torch.as_tensor(kept), range(0, len(dataset), max(1, len(dataset) // COMPARED))
        some = _read_targets(dataset, spread)
        if targets.dtype == some.dtype and torch.equal(targets[list(spread)], some):
            return targets
    return _read_targets(dataset, range(len(dataset)))


def _read_targets(dataset: Any, indices: range) -> Tensor:
    read: list[Any] = []
    for start in range(0, len(indices), READ_AT_ONCE):
        keys = [(0, index) for index in indices[start : start + READ_AT_ONCE]]
        read += [(0, target) for _, target in read_samples(dataset, keys, seed=0)]
    return collate(read)[1]
