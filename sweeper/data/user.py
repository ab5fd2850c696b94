"""`pkg.module:function`: data of the user's, made by `load(params: dict, split_seed: int) -> Splits`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset

from sweeper.data.describe import digest_of
from sweeper.data.memory import into_memory
from sweeper.data.samples import collate, read_samples
from sweeper.data.splits import Splits
from sweeper.errors import DataError, SpecError
from sweeper.imports import import_object
from sweeper.spec import DataSpec

SOURCE = ("data", "source")
WANTED = "Write `def load(params: dict, split_seed: int) -> sweeper.Splits`, as in `return Splits(train, val)`."
PAIRS = "Let `__getitem__` return (input, target): a tensor, array, number or dict of them, and the target."


def find(import_path: str) -> Callable[[dict[str, Any], int], Any]:
    """The user's function. Raises `SpecError` when it cannot be imported or called."""
    function = import_object(import_path, SOURCE)
    if not callable(function):
        raise SpecError(SOURCE, f"{import_path} is a {type(function).__name__}, not a function", WANTED)
    return function


def load(spec: DataSpec) -> tuple[Splits, str, tuple[str, ...]]:
    """Splits as the function returns them, digest and, from `train.classes` where it has them, class names.

    The function's own exceptions pass through; `SpecError` or `DataError` says what is wrong with its result.
    """
    returned = find(spec.source)(dict(spec.params), spec.split_seed)
    if not isinstance(returned, Splits):
        raise SpecError(SOURCE, f"{spec.source} returned a {type(returned).__name__}, not Splits", WANTED)
    given = {"train": returned.train, "val": returned.val, "test": returned.test}
    for name, dataset in given.items():
        if dataset is not None or name == "train":
            _check(spec.source, name, dataset)
    splits = Splits(**{name: into_memory(dataset) for name, dataset in given.items()})
    present = [dataset for dataset in (splits.train, splits.val, splits.test) if dataset is not None]
    return splits, digest_of(*present), tuple(str(name) for name in getattr(returned.train, "classes", ()))


def _check(source: str, name: str, dataset: Any) -> None:
    described = f"{source} returned a {type(dataset).__name__} for {name}"
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise SpecError(
            SOURCE,
            f"{described}, which is no map-style dataset",
            "Samples are shuffled by number: return a torch dataset with `__len__` and `__getitem__`.",
        )
    if not len(dataset):
        raise DataError(f"{described} without any sample.\n  Check the paths and filters in that function.")
    sample = read_samples(dataset, [(0, 0)], seed=0)[0]
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        parts = f" of {len(sample)}" if isinstance(sample, tuple | list | dict) else ""
        raise SpecError(SOURCE, f"{described} whose samples are a {type(sample).__name__}{parts}, not a pair", PAIRS)
    try:
        target = collate([sample])[1]
    except DataError as error:
        raise SpecError(
            SOURCE, f"{described} whose samples cannot go into a batch ({error.__cause__})", PAIRS
        ) from error
    if not isinstance(target, Tensor):
        what = f"{described} whose targets are a {type(sample[1]).__name__}"
        raise SpecError(
            SOURCE, what, "A target is a number, an array or a tensor; what else a loss needs goes into the input."
        )
