"""Data functions as a user writes them. Named in tests as `user_data:NAME`."""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, random_split

from sweeper import Splits

NOT_A_FUNCTION = 3


class Drawing(Dataset[Any]):
    """Samples that hold what each global random state gives."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        drawn = [float(torch.rand(())), random.random(), float(np.random.rand()), float(index)]
        return torch.tensor(drawn, dtype=torch.float64), index % 2


class Named(Dataset[Any]):
    """Items of any form, with the attributes given."""

    def __init__(self, items: list[Any], **attributes: Any) -> None:
        self.items = items
        self.reads = 0
        for name, value in attributes.items():
            setattr(self, name, value)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return self.items[index]


class DeathSignal(Dataset[Any]):
    """Samples that hold the signal which the kernel sends to the reading process when its parent dies; 0 for none."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> tuple[int, int]:
        found = ctypes.c_int(0)
        if sys.platform == "linux":
            pr_get_pdeathsig = 2  # from <sys/prctl.h>
            ctypes.CDLL(None).prctl(pr_get_pdeathsig, ctypes.byref(found))
        return found.value, 0


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(1.0, 0)])


def given(params: dict[str, Any], split_seed: int) -> Any:
    """What the test put there."""
    return params["result"]


class Breaking(Named):
    def __getitem__(self, index: int) -> Any:
        raise ZeroDivisionError(f"sample {index}")


def rows(count: int, classes: int = 2) -> TensorDataset:
    return TensorDataset(torch.arange(2.0 * count).reshape(count, 2), torch.arange(count) % classes)


def drawing(params: dict[str, Any], split_seed: int) -> Splits:
    return Splits(Drawing(), Drawing())


def carelessly_split(params: dict[str, Any], split_seed: int) -> Splits:
    """`random_split` without a generator: it draws from the global random state."""
    train, val = random_split(rows(20), [15, 5])
    return Splits(train, val)


def every_second(params: dict[str, Any], split_seed: int) -> Splits:
    return Splits(Subset(rows(20, 4), range(0, 20, 2)))
