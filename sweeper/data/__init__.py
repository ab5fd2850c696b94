"""Data by name: `digits`, `image_folder`, `torchvision`, or the user's `pkg.module:function`.

`check_data` looks at the study file's section alone, `load_data` reads the data and splits it.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

from sweeper.data import builtin, image_folder, user
from sweeper.data.augment import build_augment
from sweeper.data.describe import describe
from sweeper.data.samples import targets_of
from sweeper.data.seeding import kept_random_state, seed_global
from sweeper.data.splits import Splits, complete
from sweeper.errors import SpecError
from sweeper.imports import is_import_path
from sweeper.records import DataInfo
from sweeper.spec import DataSpec, derive_seed

__all__ = ["DataInfo", "LoadedData", "Splits", "check_data", "load_data", "targets_of"]

COMMON_KEYS = ("source", "val_fraction", "test_fraction", "split_seed", "augment")
SOURCE_KEYS: dict[str, tuple[str, ...]] = {
    "digits": (),
    "image_folder": ("root", "channels", "image_size", "on_bad_file"),
    "torchvision": ("dataset", "root", "download"),
}
PICTURES = "pixels from 0 to 255, as (x / 255 - 0.5) / 0.5"
INPUT_SCALES = {"digits": "ink from 0 to 16, as x / 16", "image_folder": PICTURES, "torchvision": PICTURES}
REQUIRED_KEYS = {"image_folder": ("root",), "torchvision": ("dataset", "root")}


@dataclass(frozen=True)
class LoadedData:
    """`splits.val` is never None. `splits.test` was set aside first and is for `sweep confirm` alone."""

    splits: Splits
    info: DataInfo


def check_data(spec: DataSpec) -> None:
    """Raises `SpecError` for an unknown source, a key the source lacks or does not have. Reads no data."""
    if is_import_path(spec.source):
        user.find(spec.source)
        allowed: tuple[str, ...] = ("params",)
    elif spec.source in SOURCE_KEYS:
        allowed = SOURCE_KEYS[spec.source]
    else:
        close = difflib.get_close_matches(spec.source, SOURCE_KEYS, n=1)
        raise SpecError(
            ("data", "source"),
            f"there is no data source {spec.source!r}",
            (f"Did you mean {close[0]}? " if close else "")
            + f"There are {', '.join(f'`{name}`' for name in SOURCE_KEYS)} and your own `pkg.module:function`.",
        )
    for key in REQUIRED_KEYS.get(spec.source, ()):
        if getattr(spec, key) is None:
            raise SpecError(("data", key), f"is missing, and {spec.source} needs it", "Add it.")
    for key, field in DataSpec.model_fields.items():
        if key not in COMMON_KEYS + allowed and getattr(spec, key) != field.default:
            raise SpecError(("data", key), f"means nothing to the source {spec.source}", "Remove it.")
    if spec.source == "torchvision":
        builtin.check_torchvision(spec)


def load_data(spec: DataSpec) -> LoadedData:
    """Read, check and split the data. The same file and content give the same splits, on every machine.

    The global random states are seeded from `split_seed` while the user's function runs, and put back afterwards.
    Raises `SpecError` or `DataError`.
    """
    check_data(spec)
    with kept_random_state():
        seed_global(derive_seed(spec.split_seed))
        if spec.source == "digits":
            name, (splits, digest, class_names) = "digits", builtin.load_digits()
        elif spec.source == "torchvision":
            name, (splits, digest, class_names) = str(spec.dataset), builtin.load_torchvision(spec)
        elif spec.source == "image_folder":
            name, (splits, digest, class_names) = image_folder.name_of(spec), image_folder.load(spec)
        else:
            name, (splits, digest, class_names) = spec.source, user.load(spec)
        splits = complete(splits, spec)
        info = replace(describe(splits, name, digest, class_names), input_scale=INPUT_SCALES.get(spec.source, ""))
        build_augment(spec.augment, splits.train)
    return LoadedData(splits, info)
