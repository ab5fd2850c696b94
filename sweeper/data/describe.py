"""`DataInfo`: what models and tasks must know of the data, read off the splits; and the hash of its content."""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

import torch
from torch import Tensor

from sweeper.data.memory import InMemory
from sweeper.data.samples import collate, read_samples, targets_of
from sweeper.data.splits import Splits, are_classes
from sweeper.errors import DataError
from sweeper.records import DataInfo

DIGEST_LENGTH = 16
HASHED_SAMPLES = 16
NAMED_AT_MOST = 10


def describe(splits: Splits, name: str, digest: str, class_names: tuple[str, ...] = ()) -> DataInfo:
    """Reads all targets and the first training sample. Warns of classes that a split does not show."""
    datasets = {"train": splits.train, "val": splits.val, "test": splits.test}
    present = {split: dataset for split, dataset in datasets.items() if dataset is not None}
    targets = {split: targets_of(dataset) for split, dataset in present.items()}
    firsts = {split: collate(read_samples(dataset, [(0, 0)], seed=0)) for split, dataset in present.items()}
    _check_alike(firsts)
    inputs, first_target = firsts["train"]
    num_outputs = max(_num_outputs(values) for values in targets.values())
    everything = torch.cat(list(targets.values()))
    counts: tuple[int, ...] = ()
    if are_classes(everything, named=bool(class_names)):
        num_outputs = _with_names(num_outputs, class_names)
        counts = _counts(targets["train"], num_outputs)
        _warn_of_missing(targets, num_outputs, class_names)
    is_tensor = isinstance(inputs, Tensor)
    return DataInfo(
        name=name,
        input_shape=tuple(inputs.shape[1:]) if is_tensor else (),
        num_outputs=num_outputs,
        sizes={split: len(values) for split, values in targets.items()},
        input_dtype=_dtype(inputs) if is_tensor else type(inputs).__name__,
        target_dtype=_dtype(first_target),
        target_shape=tuple(first_target.shape[1:]),
        class_names=class_names,
        class_counts=counts,
        target_range=(float(everything.min()), float(everything.max())),
        digest=digest,
    )


def _check_alike(firsts: dict[str, tuple[Any, Any]]) -> None:
    """Raises `DataError` when a split's first sample has another shape or type than the first training sample."""
    for part, name in ((0, "input"), (1, "target")):
        train = firsts["train"][part]
        for split, sample in firsts.items():
            if _form(sample[part]) != _form(train):
                raise DataError(
                    f"A sample's {name} is {_form(sample[part])} in the {split} data and {_form(train)} in the train "
                    "data.\n  Give all splits the same shape and type."
                )


def _form(batch: Any) -> str:
    return f"{_dtype(batch)} {tuple(batch.shape[1:])}" if isinstance(batch, Tensor) else f"a {type(batch).__name__}"


def _with_names(num_outputs: int, class_names: tuple[str, ...]) -> int:
    if class_names and len(class_names) < num_outputs:
        raise DataError(
            f"The data names {len(class_names)} classes, but its labels go up to {num_outputs - 1}.\n"
            "  Name every class in `train.classes`, or mend the labels."
        )
    return max(num_outputs, len(class_names))


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _num_outputs(targets: Tensor) -> int:
    """Classes for integers, 1 for a float, the width of a row; of anything larger its classes or its values."""
    if targets.dim() == 2:
        return targets.shape[1]
    if targets.is_floating_point():
        return targets[0].numel()
    return max(1, int(targets.max()) + 1)


def _counts(targets: Tensor, num_classes: int) -> tuple[int, ...]:
    return tuple(torch.bincount(targets.long(), minlength=num_classes).tolist())


def _warn_of_missing(targets: dict[str, Tensor], num_classes: int, class_names: tuple[str, ...]) -> None:
    consequence = {"train": "the model cannot learn them", "val": "the validation metric says nothing about them"}
    for split, what_follows in consequence.items():
        absent = [label for label, count in enumerate(_counts(targets[split], num_classes)) if not count]
        if absent:
            names = [class_names[label] if class_names else str(label) for label in absent]
            more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
            warnings.warn(
                f"the {split} data has no sample of {len(names)} of {num_classes} classes "
                f"({', '.join(names[:NAMED_AT_MOST])}{more}): {what_follows}",
                stacklevel=5,
            )


def digest_of(*datasets: Any) -> str:
    """A hash of the content, 16 hex digits of SHA-256.

    Tensors in memory count whole. Of another dataset its length, its targets and its first 16 samples count: reading
    every sample could take hours.
    """
    sha = hashlib.sha256()
    for dataset in datasets:
        sha.update(f"{len(dataset)} samples".encode())
        if isinstance(dataset, InMemory):
            _add(sha, (dataset.inputs, dataset.targets))
        else:
            keys = [(0, index) for index in range(min(HASHED_SAMPLES, len(dataset)))]
            _add(sha, (targets_of(dataset), read_samples(dataset, keys, seed=0)))
    return sha.hexdigest()[:DIGEST_LENGTH]


def _add(sha: Any, value: Any) -> None:
    if hasattr(value, "__array__"):
        value = torch.as_tensor(value)
    if isinstance(value, Tensor):
        sha.update(f"{value.dtype}{tuple(value.shape)}".encode())
        sha.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    elif isinstance(value, dict):
        _add(sha, list(value.items()))
    elif isinstance(value, tuple | list):
        sha.update(f"{len(value)} parts".encode())
        for part in value:
            _add(sha, part)
    else:
        sha.update(repr(value).encode())
