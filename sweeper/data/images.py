"""One image file: is it whole, and what are its pixels."""

from __future__ import annotations

import hashlib
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sweeper.errors import DataError

SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"))
GREY_MODES = frozenset(("1", "L", "LA", "La", "I", "I;16", "I;16L", "I;16B", "I;16N"))


@dataclass(frozen=True)
class Inspection:
    """What a file holds. `fault` says why it cannot be used; the rest is then empty. `size` is (height, width)."""

    num_bytes: int = 0
    sha256: str = ""
    grey: bool = False
    size: tuple[int, int] = (0, 0)
    fault: str | None = None


def inspect(path: Path) -> Inspection:
    """Read, check and decode one file. PIL decodes some files that were cut short, so its `verify` runs as well."""
    from PIL import Image

    try:
        content = path.read_bytes()
        if not content:
            return Inspection(fault="it is empty")
        with Image.open(io.BytesIO(content)) as image:
            image.verify()
        with Image.open(io.BytesIO(content)) as image:
            grey, size = image.mode in GREY_MODES, (image.height, image.width)
            to_channels(image, 1 if grey else 3)
    except Exception as error:  # PIL's decoders raise whatever their format library does
        words = re.sub(r" ?<_io\.BytesIO[^>]*>", "", str(error))  # its address tells nobody anything
        return Inspection(fault=f"{type(error).__name__}: {words}")
    return Inspection(len(content), hashlib.sha256(content).hexdigest(), grey, size)


def to_channels(image: Any, channels: int) -> Any:
    """A PIL image as `L` (1 channel) or `RGB` (3), 8 bits each. Transparency is dropped, 16 bits lose the lower 8.

    Raises `ValueError` for 32-bit values: they have no range that everybody agrees on.
    """
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):  # a 16-bit PNG in older PIL
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(f"its pixels are 32-bit values (mode {image.mode}); save it with 8 or 16 bits")
    elif "transparency" in image.info or image.mode == "PA":
        image = image.convert("RGBA")
    return image.convert("L" if channels == 1 else "RGB")


def read_pixels(path: Path, channels: int, size: tuple[int, int]) -> Tensor:
    """The file as bytes (channels, height, width), resized to `size` = (height, width), without keeping its aspect.

    Raises `DataError` when it can no longer be read.
    """
    from PIL import Image

    try:
        with Image.open(path) as opened:
            image = to_channels(opened, channels)
    except Exception as error:  # as in `inspect`
        raise DataError(f"{path} was readable when the data was loaded, and is not any more: {error}") from error
    height, width = size
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(image)).reshape(height, width, channels).permute(2, 0, 1).contiguous()
