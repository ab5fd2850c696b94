"""Data sets by name: scikit-learn's digits, and four of torchvision's. All are held in memory."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from sweeper.data.describe import digest_of
from sweeper.data.memory import InMemory, InMemoryPictures
from sweeper.data.splits import Splits
from sweeper.errors import DataError, SpecError
from sweeper.spec import DataSpec

TORCHVISION_SETS = ("MNIST", "FashionMNIST", "CIFAR10", "CIFAR100")


def load_digits() -> tuple[Splits, str, tuple[str, ...]]:
    """1,797 handwritten digits (1, 8, 8) in [0, 1]; nothing is downloaded. Splits, digest and class names."""
    from sklearn.datasets import load_digits as load

    bunch = load()
    inputs = torch.from_numpy(bunch.images).to(torch.float32).div_(16).unsqueeze(1)  # ink from 0 to 16
    digits = InMemory(inputs, torch.from_numpy(bunch.target).to(torch.int64))
    return Splits(digits), digest_of(digits), tuple(str(name) for name in bunch.target_names)


def check_torchvision(spec: DataSpec) -> None:
    """Raises `SpecError` unless `dataset` is one of the four."""
    if spec.dataset not in TORCHVISION_SETS:
        close = difflib.get_close_matches(str(spec.dataset).upper(), [name.upper() for name in TORCHVISION_SETS], n=1)
        meant = [name for name in TORCHVISION_SETS if name.upper() in close]
        raise SpecError(
            ("data", "dataset"),
            f"there is no data set {spec.dataset!r}",
            (f"Did you mean {meant[0]}? " if meant else "") + f"There are {', '.join(TORCHVISION_SETS)}.",
        )


def load_torchvision(spec: DataSpec) -> tuple[Splits, str, tuple[str, ...]]:
    """The set's own training and test splits, without `val`. Splits, digest and class names.

    Files are looked for under `root` as torchvision lays them out, and their checksums are torchvision's. Raises
    `DataError` when files are missing, damaged or cannot be downloaded.
    """
    check_torchvision(spec)
    from torchvision import datasets

    make = getattr(datasets, str(spec.dataset))
    root = Path(str(spec.root)).expanduser().absolute()
    train, test = (_read(make, root, is_train, spec.download) for is_train in (True, False))
    pictures = [InMemoryPictures(_pixels(part.data), torch.as_tensor(part.targets)) for part in (train, test)]
    return Splits(train=pictures[0], test=pictures[1]), digest_of(*pictures), tuple(train.classes)


def _read(make: Callable[..., Any], root: Path, is_train: bool, download: bool) -> Any:
    if download:
        root.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(root / f".{make.__name__}.lock"):  # two workers would unpack into the same files
                return make(root, train=is_train, download=True)
        except (OSError, RuntimeError) as error:
            raise DataError(
                f"{make.__name__} cannot be downloaded to {root}: {error}\n"
                "  Check the network and the folder, or copy the files there and write `download: false`."
            ) from error
    try:
        part = make(root, train=is_train)
        if len(part.data) != len(part.targets):
            raise ValueError(f"{len(part.data)} pictures and {len(part.targets)} labels")
        return part
    except Exception as error:  # torchvision reads the files with asserts, struct and pickle
        there = "" if os.path.isdir(root) else " (there is no such folder)"
        raise DataError(
            f"{make.__name__} is not under {root}{there}, or its files are incomplete or damaged.\n"
            "  Write `download: true` under `data`, or set `root` to the folder that holds it."
        ) from error


def _pixels(data: Any) -> torch.Tensor:
    """(N, channels, height, width) from MNIST's (N, height, width) or CIFAR's (N, height, width, channels)."""
    pixels = torch.as_tensor(data)
    return pixels.unsqueeze(1) if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2).contiguous()
