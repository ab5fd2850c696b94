"""Training, validation and test data, and how the file's fractions cut them out of one set."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Subset

from sweeper.data.samples import targets_of
from sweeper.errors import DataError
from sweeper.spec import DataSpec, derive_seed


class MapStyle(Protocol):
    """Samples by number: every torch dataset that has a length."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Splits:
    """Map-style torch datasets of (input, target) pairs.

    Without `val`, the study file's `val_fraction` of `train` becomes the validation data.
    """

    train: MapStyle
    val: MapStyle | None = None
    test: MapStyle | None = None


def complete(splits: Splits, spec: DataSpec) -> Splits:
    """With `val`, and `test` where the file asks for one, cut from `train`; both are fractions of `train` as given.

    Raises `DataError` when there are too few samples.
    """
    _warn_of_unused(splits, spec)
    test_fraction = spec.test_fraction if splits.test is None else 0.0
    val_fraction = spec.val_fraction if splits.val is None else 0.0
    if not test_fraction and not val_fraction:
        return splits
    train, test, val = stratified(targets_of(splits.train), (test_fraction, val_fraction), spec.split_seed)
    for name, fraction, indices in (("test", test_fraction, test), ("val", val_fraction, val)):
        if fraction and not indices:
            size = len(splits.train)
            raise DataError(
                f"data.{name}_fraction ({fraction:g}) of {size} samples leaves no {name} sample.\n"
                f"  Make it larger than {1 / size:.3g}, or give more data."
            )
    if not train:
        raise DataError("The validation and test fractions leave no sample to train on.\n  Give more data.")
    return Splits(
        train=take(splits.train, train),
        val=take(splits.train, val) if splits.val is None else splits.val,
        test=take(splits.train, test) if test else splits.test,
    )


def _warn_of_unused(splits: Splits, spec: DataSpec) -> None:
    for name, own in (("val", splits.val), ("test", splits.test)):
        fraction = getattr(spec, f"{name}_fraction")
        if own is not None and fraction != DataSpec.model_fields[f"{name}_fraction"].default:
            warnings.warn(
                f"data.{name}_fraction ({fraction:g}) is not used: the data has its own {name} set", stacklevel=3
            )


def take(dataset: Any, indices: list[int]) -> Any:
    """The dataset of these samples alone; in-memory data stays in memory."""
    return dataset.take(indices) if hasattr(dataset, "take") else Subset(dataset, indices)


def are_classes(targets: Tensor, named: bool = False) -> bool:
    """Whether targets are class indices: one integer from 0 for each sample; unless the classes have names, not
    more of them than samples, as counts and prices would be."""
    if targets.dim() != 1 or targets.is_floating_point() or targets.is_complex():
        return False
    return bool(targets.min() >= 0) and (named or int(targets.max()) < len(targets))


def stratified(targets: Tensor, fractions: tuple[float, ...], seed: int) -> tuple[list[int], ...]:
    """Indices in ascending order: first what is left, then one list for each fraction, in that order.

    Each part has `fraction * N` samples, rounded, and of each class its share, rounded up or down (largest
    remainders first, ties by lot), so long as one sample of the class is left over. The choice depends on `seed`
    alone, and a part on no later fraction. Targets that are no classes are one class.
    """
    labels = targets.long() if are_classes(targets) else torch.zeros(len(targets), dtype=torch.int64)
    generator = torch.Generator().manual_seed(derive_seed(seed))
    shuffled = torch.randperm(len(labels), generator=generator)
    by_class = shuffled[torch.argsort(labels[shuffled], stable=True)]
    sizes = labels.unique(return_counts=True)[1].tolist()
    waiting = [members.tolist() for members in by_class.split(sizes)]
    parts = []
    for fraction in fractions:
        room = [len(members) for members in waiting]
        part: list[int] = []
        for members, seats in zip(waiting, _allot(sizes, fraction, room, generator), strict=True):
            part += members[:seats]
            del members[:seats]
        parts.append(sorted(part))
    rest = sorted(index for members in waiting for index in members)
    return (rest, *parts)


def _allot(sizes: list[int], fraction: float, room: list[int], generator: torch.Generator) -> list[int]:
    """How many samples each class gives: largest remainder method. `room` is what each class still has."""
    quotas = [size * fraction for size in sizes]
    seats = [min(math.floor(quota), max(0, left - 1)) for quota, left in zip(quotas, room, strict=True)]
    missing = math.floor(sum(sizes) * fraction + 0.5) - sum(seats)
    lots = torch.rand(len(sizes), generator=generator).tolist()
    order = sorted(range(len(sizes)), key=lambda place: (math.floor(quotas[place]) - quotas[place], lots[place]))
    # The last sample of a class stays for training, unless nearly every class has only one.
    for kept in (1, 0):
        for place in order:
            if missing > 0 and seats[place] < min(quotas[place], room[place] - kept):
                seats[place] += 1
                missing -= 1
    return seats
