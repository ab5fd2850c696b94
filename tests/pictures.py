"""Writes small folders of real image files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from sweeper.spec import DataSpec


def write(path: Path, colour: int | tuple[int, ...], mode: str = "RGB", size: tuple[int, int] = (8, 8)) -> Path:
    """One file of one colour; `size` is (width, height)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)
    return path


def write_noise(path: Path, seed: int, size: tuple[int, int] = (8, 8)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def write_d2(root: Path, classes: str = "abc", val_classes: str = "abc") -> Path:
    """Toy set D2: 8x8 PNGs, 4 training images a class under `train`, 2 under `val`."""
    for split, names, count in (("train", classes, 4), ("val", val_classes, 2)):
        for name in names:
            for place in range(count):
                seed = 100 * len(split) + 10 * ord(name) + place
                write_noise(root / split / name / f"{place}.png", seed)
    return root


def folder_spec(root: Path, **values: object) -> DataSpec:
    return DataSpec.model_validate({"source": "image_folder", "root": str(root), **values})
