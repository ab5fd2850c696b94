"""Datasets whose samples are rows of tensors: a batch is one index operation, without collation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from sweeper.data.pixels import normalise, to_unit


class InMemory(Dataset[tuple[Tensor, Tensor]]):
    """`inputs` (N, ...) and `targets` (N, ...), given out as they are."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        assert len(inputs) == len(targets), (inputs.shape, targets.shape)
        self.inputs = inputs
        self.targets = targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The batch (inputs, targets) of these samples: copies, ready to use."""
        at = torch.as_tensor(indices)
        return self.inputs[at], self.targets[at]

    def take(self, indices: Sequence[int]) -> Self:
        """The dataset of these samples alone."""
        at = torch.as_tensor(indices, dtype=torch.int64)
        return type(self)(self.inputs[at], self.targets[at])


class InMemoryPictures(InMemory):
    """`inputs` are bytes (N, channels, height, width), a quarter of their float32; batches come out normalised."""

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        pixels, targets = super().__getitems__(indices)
        return normalise(to_unit(pixels)), targets

    def unit_sample(self, index: int) -> tuple[Tensor, Tensor]:
        return to_unit(self.inputs[index]), self.targets[index]


def into_memory(dataset: Any) -> Any:
    """`InMemory` for what is the same thing under another name: a `TensorDataset` of two, or a `Subset` of one.

    Anything else, subclasses of them included, comes back as it is: it may do more than look up rows.
    """
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        return InMemory(*(tensor.detach().cpu() for tensor in dataset.tensors))
    if type(dataset) is Subset:
        whole = into_memory(dataset.dataset)
        return whole.take(dataset.indices) if isinstance(whole, InMemory) else dataset
    return dataset
