"""`image_folder`: `root/<class>/*`, or `root/train/<class>/*` with `root/val` and `root/test` beside it.

Files are checked once when the data is loaded, and decoded when a batch needs them.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from sweeper.data.describe import DIGEST_LENGTH
from sweeper.data.folders import Found, find_files
from sweeper.data.images import Inspection, inspect, read_pixels
from sweeper.data.pixels import normalise, to_unit
from sweeper.data.splits import Splits
from sweeper.errors import DataError
from sweeper.spec import DataSpec

NAMED_AT_MOST = 20


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Pictures (channels, height, width) from files, normalised, and their class indices `targets` (N,)."""

    def __init__(self, files: list[Path], targets: Tensor, channels: int, size: tuple[int, int]) -> None:
        self.files = files
        self.targets = targets
        self.channels = channels
        self.size = size

    def __len__(self) -> int:
        return len(self.files)

    def unit_sample(self, index: int) -> tuple[Tensor, int]:
        return to_unit(read_pixels(self.files[index], self.channels, self.size)), int(self.targets[index])

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture, target = self.unit_sample(index)
        return normalise(picture), target

    def take(self, indices: list[int]) -> ImageFolder:
        at = torch.as_tensor(indices, dtype=torch.int64)
        return ImageFolder([self.files[index] for index in indices], self.targets[at], self.channels, self.size)


@dataclass(frozen=True)
class _Checked:
    """A file that was found, and what it holds."""

    file: Found
    inspection: Inspection


def root_of(spec: DataSpec) -> Path:
    return Path(str(spec.root)).expanduser().absolute()


def name_of(spec: DataSpec) -> str:
    """The folder's own name: where it lies is no property of the data."""
    return root_of(spec).resolve().name


def load(spec: DataSpec) -> tuple[Splits, str, tuple[str, ...]]:
    """Splits as the folders give them, digest and class names. Raises `DataError`, which names folders and files.

    Pictures have `channels` channels, by default 1 if every training image is grey and else 3. They are resized to
    squares of `image_size`, which may be left out when all images have one size.
    """
    classes, found = find_files(root_of(spec))
    checked = _check(found, skip=spec.on_bad_file == "skip")
    for place, name in enumerate(classes):
        if not any(entry.file.split == "train" and entry.file.target == place for entry in checked):
            raise DataError(f"Class {name} has no readable image left to train on.\n  Mend its files or remove it.")
    grey = all(entry.inspection.grey for entry in checked if entry.file.split == "train")
    channels = spec.channels or (1 if grey else 3)
    size = (spec.image_size, spec.image_size) if spec.image_size else _common_size(checked)
    datasets = {}
    for split in ("train", "val", "test"):
        files = [entry.file for entry in checked if entry.file.split == split]
        if not files and any(file.split == split for file in found):
            raise DataError(f"No image of the {split} data can be read.\n  Mend its files, or remove the folder.")
        if files:
            targets = torch.tensor([file.target for file in files])
            datasets[split] = ImageFolder([file.path for file in files], targets, channels, size)
    return Splits(**datasets), _digest(checked), tuple(classes)


def _check(found: list[Found], *, skip: bool) -> list[_Checked]:
    """The files that can be used. Bad ones are named: as an error, or, with `skip`, as one warning."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:  # decoding leaves Python's lock alone
        inspections = list(threads.map(inspect, [file.path for file in found]))
    pairs = [_Checked(file, inspection) for file, inspection in zip(found, inspections, strict=True)]
    bad = [pair for pair in pairs if pair.inspection.fault]
    good = [pair for pair in pairs if not pair.inspection.fault]
    if bad and not skip:
        lines = "".join(f"\n  {pair.file.path}: {pair.inspection.fault}" for pair in bad)
        raise DataError(
            f"{len(bad)} of {len(found)} images cannot be used:{lines}\n"
            "  Replace or remove them, or write `on_bad_file: skip` under `data` to go on without them."
        )
    if bad:
        skipped, used = (Counter(pair.file.split for pair in some) for some in (bad, good))
        counts = "; ".join(f"{split}: {skipped[split]} skipped, {used[split]} used" for split in sorted(skipped))
        lines = "".join(f"\n  {pair.file.path}: {pair.inspection.fault}" for pair in bad[:NAMED_AT_MOST])
        more = f"\n  and {len(bad) - NAMED_AT_MOST} more" if len(bad) > NAMED_AT_MOST else ""
        warnings.warn(f"images that cannot be used are left out ({counts}):{lines}{more}", stacklevel=4)
    return good


def _common_size(checked: list[_Checked]) -> tuple[int, int]:
    first = checked[0]
    for other in checked:
        if other.inspection.size != first.inspection.size:
            shown = [
                f"{pair.file.path} is {pair.inspection.size[1]}x{pair.inspection.size[0]}" for pair in (first, other)
            ]
            raise DataError(
                f"The images have different sizes: {', '.join(shown)}.\n"
                "  Write `image_size` (pixels of a square) under `data`; every image is resized to it."
            )
    return first.inspection.size


def _digest(checked: list[_Checked]) -> str:
    """A hash over the relative names, sizes and bytes of all files that are used."""
    sha = hashlib.sha256()
    for pair in sorted(checked, key=lambda pair: pair.file.name):
        sha.update(f"{pair.file.name}\0{pair.inspection.num_bytes}\0{pair.inspection.sha256}\n".encode())
    return sha.hexdigest()[:DIGEST_LENGTH]
