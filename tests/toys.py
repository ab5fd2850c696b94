"""Small models and data sets with known answers. Named in study files as `toys:NAME`."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset, get_worker_info

from sweeper import DataInfo, Splits
from sweeper.data.memory import InMemory


def line_data(params: dict[str, Any], split_seed: int) -> Splits:
    """D1: x = first..last, y = 2x. Validation is the same data."""
    x = torch.arange(params.get("first", 1), params.get("last", 10) + 1, dtype=torch.float32).view(-1, 1)
    return Splits(InMemory(x, 2 * x[:, 0]), InMemory(x, 2 * x[:, 0]))


def line_model(params: dict[str, Any], data: DataInfo) -> nn.Module:
    """One weight, starting at 0, no bias."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def constant_data(params: dict[str, Any], split_seed: int) -> Splits:
    """`count` samples of one value each; the targets are `target`."""
    x = torch.full((params["count"], 1), float(params["value"]))
    y = torch.full((params["count"],), float(params.get("target", 0.0)))
    return Splits(InMemory(x, y), InMemory(x[:2], y[:2]))


class Steered(nn.Module):
    """Two weights whose gradient is the mean input, so that a test chooses every gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight


def steered_model(params: dict[str, Any], data: DataInfo) -> nn.Module:
    return Steered()


def steered_data(params: dict[str, Any], split_seed: int) -> Splits:
    """Each sample is one gradient for `Steered` under `LinearTask`."""
    x = torch.tensor(params["gradients"], dtype=torch.float32)
    y = torch.zeros(len(x))
    return Splits(InMemory(x, y), InMemory(torch.ones(2, 2), torch.zeros(2)))


class LinearTask:
    """The loss is the output itself: the gradient of the mean is the mean input."""

    def loss(self, output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        output = output.float()
        return output.sum(), torch.tensor(float(len(output)), device=output.device)

    def metrics(self) -> dict[str, Any]:
        return {}


def nine_digits(params: dict[str, Any], split_seed: int) -> Splits:
    """Nine images of three classes for training, four for validation."""
    inputs = torch.rand(13, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(13) % 3
    return Splits(InMemory(inputs[:9], targets[:9]), InMemory(inputs[9:], targets[9:]))


class Listed(nn.Module):
    """A model whose validation loss is read from a list: validation k gives `values[k]`.

    How many validations there were is a buffer, so that it is saved and restored with the weights.
    """

    seen: Tensor

    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.values = values
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            return self.weight.expand(len(inputs))
        value = self.values[int(self.seen)]
        self.seen += 1
        return torch.full((len(inputs),), value, dtype=torch.float64)


def listed_model(params: dict[str, Any], data: DataInfo) -> nn.Module:
    """`series` holds one list of values per trial; `row` says which one."""
    return Listed(params["series"][params["row"]])


def listed_data(params: dict[str, Any], split_seed: int) -> Splits:
    """Ten samples to train on, one batch to validate on."""
    return Splits(InMemory(torch.zeros(10, 1), torch.zeros(10)), InMemory(torch.zeros(2, 1), torch.zeros(2)))


class ListedTask:
    """The output is the loss."""

    def loss(self, output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        return output.sum(), torch.tensor(float(len(output)))

    def metrics(self) -> dict[str, Any]:
        return {}


class Flat(nn.Module):
    """A linear model on flattened images."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs.flatten(1))


def flat_model(params: dict[str, Any], data: DataInfo) -> nn.Module:
    return Flat(64, data.num_outputs)


def poisoned_model(params: dict[str, Any], data: DataInfo) -> nn.Module:
    """Every output is NaN."""
    model = Flat(64, data.num_outputs)
    nn.init.constant_(model.linear.bias, float("nan"))
    return model


LIVING: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Counted(Flat):
    """Is in `LIVING` as long as anything holds it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        LIVING.add(self)


class Failing(Counted):
    def forward(self, inputs: Tensor) -> Tensor:
        print("this model cannot be trained")
        raise ZeroDivisionError("by design")


def failing_model(params: dict[str, Any], data: DataInfo) -> nn.Module:
    """Trains in row 0 and raises in row 1."""
    return (Failing if params["row"] == 1 else Counted)(64, data.num_outputs)


AUTOCAST: set[tuple[str, torch.dtype | None]] = set()


class Watched(Flat):
    """Notes in `AUTOCAST` the precision of each forward."""

    def forward(self, inputs: Tensor) -> Tensor:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        AUTOCAST.add(("train" if self.training else "eval", dtype))
        return super().forward(inputs)


def watched_model(params: dict[str, Any], data: DataInfo) -> nn.Module:
    return Watched(64, data.num_outputs)


class Meddling(Flat):
    """Turns torch's global switches when its epoch is validated, and leaves them so."""

    def forward(self, inputs: Tensor) -> Tensor:
        output = super().forward(inputs)
        if not self.training:
            torch.set_default_dtype(torch.float64)
            torch.set_grad_enabled(False)
        return output


def meddling_model(params: dict[str, Any], data: DataInfo) -> nn.Module:
    return Meddling(64, data.num_outputs)


def many_rows(params: dict[str, Any], split_seed: int) -> Splits:
    """1,000 rows to train on."""
    inputs, targets = torch.randn(1100, 4), torch.arange(1100) % 3
    return Splits(InMemory(inputs[:1000], targets[:1000]), InMemory(inputs[1000:], targets[1000:]))


class Slow(Flat):
    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(0.05)
        return super().forward(inputs)


def slow_model(params: dict[str, Any], data: DataInfo) -> nn.Module:
    """Takes 50 ms a batch."""
    return Slow(64, data.num_outputs)


def few_digits(params: dict[str, Any], split_seed: int) -> Splits:
    """200 real digits to train on, 100 to validate on: enough for every window to be ragged."""
    pictures, targets = load_digits(return_X_y=True)
    inputs = torch.tensor(pictures, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(targets)
    return Splits(InMemory(inputs[:200], labels[:200]), InMemory(inputs[200:300], labels[200:300]))


def negative_labels(params: dict[str, Any], split_seed: int) -> Splits:
    """As one gets them from a file that writes -1 for "unknown"."""
    splits = few_digits(params, split_seed)
    return Splits(InMemory(splits.train.inputs, splits.train.targets - 1), splits.val)


def digits_in_binary(params: dict[str, Any], split_seed: int) -> Splits:
    """The pictures of `few_digits`; the labels are the four bits of the digit."""
    splits = few_digits(params, split_seed)

    def relabelled(part: InMemory) -> InMemory:
        return InMemory(part.inputs, (part.targets[:, None] >> torch.arange(4) & 1).to(torch.uint8))

    return Splits(relabelled(splits.train), relabelled(splits.val))


def double_digits(params: dict[str, Any], split_seed: int) -> Splits:
    """In float64, as NumPy gives numbers."""
    splits = few_digits(params, split_seed)
    return Splits(*(InMemory(part.inputs.double(), part.targets) for part in (splits.train, splits.val)))


def narrow_model(params: dict[str, Any], data: DataInfo) -> nn.Module:
    return Flat(64, params.get("outputs", 7))


def wide_model(params: dict[str, Any], data: DataInfo) -> nn.Module:
    return Flat(65, data.num_outputs)


class MeanLoss:
    def loss(self, output: Tensor, batch: Any) -> Any:
        return nn.functional.cross_entropy(output, batch[1])

    def metrics(self) -> dict[str, Any]:
        return {}


class AllClasses:
    """Not averaged."""

    def update(self, output: Tensor, target: Tensor) -> None:
        self.value = output.mean(0)

    def compute(self) -> Tensor:
        return self.value

    def reset(self) -> None:
        pass

    def to(self, device: torch.device) -> AllClasses:
        return self


class VectorMetric(MeanLoss):
    def loss(self, output: Tensor, batch: Any) -> Any:
        return nn.functional.cross_entropy(output, batch[1], reduction="sum"), len(output)

    def metrics(self) -> dict[str, Any]:
        return {"all": AllClasses()}


class NanWeight(VectorMetric):
    def loss(self, output: Tensor, batch: Any) -> Any:
        total, _ = super().loss(output, batch)
        return total, torch.tensor(float("nan"))

    def metrics(self) -> dict[str, Any]:
        return {}


class Closing(Flat):
    """Closes its output, prints, and fails."""

    def forward(self, inputs: Tensor) -> Tensor:
        sys.stdout.close()
        sys.stderr.close()
        print("still heard")
        raise ValueError("after the close")


def closing_model(params: dict[str, Any], data: DataInfo) -> nn.Module:
    return Closing(64, data.num_outputs)


class Forking(Flat):
    """Forks once in each forward; the child leaves as `way` says, or goes on as if it were the parent."""

    def __init__(self, inputs: int, outputs: int, way: str) -> None:
        super().__init__(inputs, outputs)
        self.way = way

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            child = os.fork()
            if child:
                os.waitpid(child, 0)
            elif self.way == "exit":
                sys.exit(0)
            elif self.way == "raise":
                raise ValueError("in the child")
        return super().forward(inputs)


def forking_model(params: dict[str, Any], data: DataInfo) -> nn.Module:
    return Forking(64, data.num_outputs, params["way"])


class Raising(Flat):
    def __init__(self, inputs: int, outputs: int, error: BaseException) -> None:
        super().__init__(inputs, outputs)
        self.error = error

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            raise self.error
        return super().forward(inputs)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


ERRORS: dict[str, BaseException] = {
    "exit": SystemExit(),
    "interrupt": KeyboardInterrupt(),
    "base": BaseException("below all"),
    "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "accelerator memory": torch.AcceleratorError("CUDA error: out of memory"),
    "host memory": MemoryError(),
    "surrogate": ValueError("a file named \ud800"),
    "unspeakable": Unspeakable(),
}


def raising_model(params: dict[str, Any], data: DataInfo) -> nn.Module:
    """Raises `ERRORS[params["error"]]` in training, or while it is built when `built` is set."""
    if params.get("built"):
        raise ERRORS[params["error"]]
    return Raising(64, data.num_outputs, ERRORS[params["error"]])


SIZES: list[int] = []
"""Of the micro-batches that `Hungry` was to train with."""


class Hungry(Flat):
    """Asks for far more memory than there is with more than `fits` samples; or once, in the `until`-th micro-batch of
    the process's training."""

    def __init__(self, inputs: int, outputs: int, fits: int, batch_norm: bool, until: int) -> None:
        super().__init__(inputs, outputs)
        self.fits, self.until = fits, until
        self.norm = nn.BatchNorm1d(outputs) if batch_norm else nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            SIZES.append(len(inputs))
        if self.training and (len(inputs) > self.fits or len(SIZES) == self.until):
            torch.empty(10**15)
        return self.norm(super().forward(inputs))


def hungry_model(params: dict[str, Any], data: DataInfo) -> nn.Module:
    return Hungry(64, data.num_outputs, params["fits"], params.get("batch_norm", False), params.get("until", 0))


class Sleeping(nn.Module):
    """Sleeps for ever where it is told to: in `training` or in `validation`; swallows what wakes it when `deaf`."""

    def __init__(self, outputs: int, where: str, deaf: bool) -> None:
        super().__init__()
        self.linear, self.where, self.deaf, self.trained = nn.Linear(64, outputs), where, deaf, 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.trained += self.training
        if self.trained > 3 and self.where == ("training" if self.training else "validation"):
            if self.deaf:
                with contextlib.suppress(Exception):
                    time.sleep(1000)
            time.sleep(1000)
        return self.linear(inputs.flatten(1))


def sleeping_model(params: dict[str, Any], data: DataInfo) -> nn.Module:
    if params["where"] == "build":
        time.sleep(1000)
    return Sleeping(data.num_outputs, params["where"], params.get("deaf", False))


class Hanging(Dataset[Any]):
    """Digits; a loader worker that comes to the third one while `mark` is missing makes it, and never comes back."""

    def __init__(self, mark: Path) -> None:
        digits = load_digits()
        self.mark = mark
        self.x, self.y = torch.tensor(digits.data[:100] / 16).float(), torch.tensor(digits.target[:100])

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 2 and get_worker_info() is not None and not self.mark.exists():
            self.mark.touch()
            time.sleep(1000)
        return self.x[index], self.y[index]


def hanging_data(params: dict[str, Any], split_seed: int) -> Splits:
    return Splits(Hanging(Path(params["mark"])))
