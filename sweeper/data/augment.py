"""`data.augment`: random changes to the training pictures, by the names of `torchvision.transforms.v2`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from sweeper.data.pixels import Pictures, normalise
from sweeper.data.samples import read_samples
from sweeper.data.seeding import kept_random_state, one_thread, seed_global
from sweeper.errors import SpecError
from sweeper.spec import derive_seed

DEFAULTS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "color_jitter": lambda height, width: {},
    "random_affine": lambda height, width: {},
    "random_crop": lambda height, width: {
        "size": [height, width],
        "padding": [max(1, width // 8), max(1, height // 8)],
    },
    "random_erasing": lambda height, width: {},
    "random_horizontal_flip": lambda height, width: {},
    "random_resized_crop": lambda height, width: {"size": [height, width]},
    "random_rotation": lambda height, width: {},
    "random_vertical_flip": lambda height, width: {},
}
"""What the file may leave out, for pictures of that height and width; the rest are torchvision's defaults."""

TRIED_DRAWS = 8


class Augmented(Dataset[tuple[Tensor, Any]]):
    """`dataset` with `transform` applied to each picture on its own, before it is normalised where that is ours."""

    def __init__(self, dataset: Any, transform: Callable[[Tensor], Tensor]) -> None:
        self.dataset = dataset
        self.transform = transform

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        picture, target = _picture(self.dataset, index)
        picture = self.transform(picture)
        return (normalise(picture) if isinstance(self.dataset, Pictures) else picture), target


def build_augment(augment: list[str | dict[str, Any]], dataset: Any) -> Callable[[Tensor], Tensor] | None:
    """One transform for a picture (channels, height, width), tried on the first one; None for an empty list.

    Raises `SpecError` for a name, an argument or a result that cannot be used.
    """
    if not augment:
        return None
    sample = read_samples(_Unit(dataset), [(0, 0)], seed=0)[0][0]
    if not isinstance(sample, Tensor) or sample.dim() != 3:
        shape = f" of the shape {tuple(sample.shape)}" if isinstance(sample, Tensor) else ""
        raise SpecError(
            ("data", "augment"),
            f"works on pictures (channels, height, width), but a sample is a {type(sample).__name__}{shape}",
            "Remove it, or augment in your own dataset.",
        )
    transforms = [_build(place, entry, sample) for place, entry in enumerate(augment)]
    if len(transforms) == 1:
        return transforms[0]
    from torchvision.transforms import v2

    return v2.Compose(transforms)


class _Unit(Dataset[tuple[Any, Any]]):
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return _picture(self.dataset, index)


def _picture(dataset: Any, index: int) -> tuple[Any, Any]:
    if isinstance(dataset, Pictures):
        return dataset.unit_sample(index)
    picture, target = dataset[index]
    # torchvision leaves arrays untouched without a word
    return (torch.as_tensor(picture) if hasattr(picture, "__array__") else picture), target


def _build(place: int, entry: str | dict[str, Any], sample: Tensor) -> Callable[[Tensor], Tensor]:
    from torchvision.transforms import v2

    key = ("data", "augment", place)
    name, arguments = _read(key, entry)
    make = getattr(v2, "".join(word.capitalize() for word in name.split("_")))
    height, width = sample.shape[-2:]
    known = list(inspect.signature(make).parameters)
    for argument in arguments:
        if argument not in known:
            close = difflib.get_close_matches(str(argument), known, n=1)
            todo = (f"Did you mean {close[0]}? " if close else "") + f"It has: {', '.join(known)}."
            raise SpecError(key, f"{name} has no argument {argument!r}", todo)
    if name == "color_jitter":
        _check_colours(key, arguments, sample)
    try:
        transform = make(**{**DEFAULTS[name](height, width), **arguments})
        changed = _try(transform, sample)
    except Exception as error:  # torchvision checks arguments when made or when used, with errors of many types
        todo = f"torchvision says: {error}. Mend its arguments ({', '.join(known)})."
        raise SpecError(key, f"{name} cannot be used like this", todo) from error
    if changed is not None:
        todo = "Training and validation pictures must have one shape: leave `size` out, and do not expand."
        raise SpecError(key, f"{name} makes {tuple(changed)} of pictures {tuple(sample.shape)}", todo)
    return transform


def _check_colours(key: tuple[str | int, ...], arguments: dict[str, Any], sample: Tensor) -> None:
    if not arguments:
        todo = "Write, say, `- {color_jitter: {brightness: 0.2, contrast: 0.2}}`."
        raise SpecError(key, "color_jitter changes nothing without an argument", todo)
    if sample.is_floating_point() and not (sample.min() >= 0 and sample.max() <= 1):
        what = f"color_jitter takes colours from 0 to 1, but a picture goes from {sample.min():g} to {sample.max():g}"
        raise SpecError(key, what, "It would cut them off. Change colours in your own dataset, before it normalises.")


def _read(key: tuple[str | int, ...], entry: str | dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and arguments of `random_crop` or `{random_crop: {padding: 4}}`."""
    name, arguments = (entry, {}) if isinstance(entry, str) else next(iter(entry.items()), ("", {}))
    if not isinstance(entry, str) and (len(entry) != 1 or not isinstance(arguments, dict | None)):
        raise SpecError(
            key, f"{entry!r} is not one augmentation", "Write `- random_crop` or `- {random_crop: {padding: 4}}`."
        )
    if name not in DEFAULTS:
        close = difflib.get_close_matches(str(name), DEFAULTS, n=1)
        todo = (f"Did you mean {close[0]}? " if close else "") + f"There are {', '.join(DEFAULTS)}."
        raise SpecError(key, f"there is no augmentation {name!r}", todo)
    return name, arguments or {}


def _try(transform: Callable[[Tensor], Tensor], sample: Tensor) -> torch.Size | None:
    """A shape that `transform` makes other than the sample's, in some draws; None when it keeps the shape."""
    with kept_random_state(), one_thread():
        seed_global(derive_seed(0))
        shapes = [transform(sample.clone()).shape for _ in range(TRIED_DRAWS)]
    return next((shape for shape in shapes if shape != sample.shape), None)
