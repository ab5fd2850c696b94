"""Losses and metrics: against torch in float64, and the same however the samples are split into batches."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import r2_score
from torch import Tensor
from torch.nn import functional as F

from sweeper.errors import DataError, SpecError
from sweeper.imports import add_import_folder
from sweeper.records import DataInfo
from sweeper.spec import TaskSpec
from sweeper.tasks import build_task, metric_names
from sweeper.tasks.base import Metric, Task

CLASSES = DataInfo(
    name="toy",
    input_shape=(4,),
    num_outputs=3,
    sizes={"train": 10},
    class_names=("a", "b", "c"),
    class_counts=(5, 1, 4),
)
LABELS = dataclasses.replace(CLASSES, target_dtype="uint8", target_shape=(3,), class_counts=())
NUMBERS = DataInfo(name="prices", input_shape=(4,), num_outputs=1, sizes={"train": 10}, target_dtype="float32")
PARTITIONS = [
    pytest.param([11], id="whole"),
    pytest.param([1] * 11, id="one by one"),
    pytest.param([4, 4, 3], id="ragged"),
    pytest.param([10, 1], id="lone last"),
]


def split_loss(task: Task, output: Tensor, target: Tensor, sizes: list[int]) -> Tensor:
    """The loss as the loop has it: sums over the batches, then one quotient."""
    parts = zip(output.split(sizes), target.split(sizes), strict=True)
    sums = [task.loss(piece, (piece, labels)) for piece, labels in parts]
    assert all(total.ndim == weight.ndim == 0 for total, weight in sums)
    return torch.stack([total for total, _ in sums]).sum() / torch.stack([weight for _, weight in sums]).sum()


def split_metric(metric: Metric, output: Tensor, target: Tensor, sizes: list[int]) -> float:
    metric.reset()
    for piece, labels in zip(output.split(sizes), target.split(sizes), strict=True):
        metric.update(piece, labels)
    return metric.compute().item()


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("sizes", PARTITIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1], ids=["plain", "smoothed"])
@pytest.mark.parametrize("weights", ["none", "balanced", [0.5, 2.0, 1.25]], ids=["none", "balanced", "list"])
def test_cross_entropy_is_torchs_weighted_mean_for_every_partition(
    weights: Any, smoothing: float, sizes: list[int]
) -> None:
    output, target = draw(11, 3), torch.tensor([0, 1, 2, 2, 1, 0, 0, 0, 2, 1, 0])
    task = build_task(TaskSpec(class_weights=weights, label_smoothing=smoothing), CLASSES)
    by_class = {"none": [1.0, 1.0, 1.0], "balanced": [10 / 15, 10 / 3, 10 / 12]}.get(str(weights), weights)
    expected = F.cross_entropy(
        output, target, weight=torch.tensor(by_class, dtype=torch.float64), label_smoothing=smoothing
    )
    assert split_loss(task, output, target, sizes).item() == pytest.approx(expected.item(), rel=1e-7)


def test_gradients_of_batches_add_up_to_the_gradient_of_the_whole() -> None:
    output, target = draw(11, 3).requires_grad_(), torch.tensor([0, 1, 2, 2, 1, 0, 0, 0, 2, 1, 0])
    task = build_task(TaskSpec(class_weights=[0.5, 2.0, 1.25], label_smoothing=0.1), CLASSES)
    split_loss(task, output, target, [4, 4, 3]).backward()
    assert output.grad is not None
    again = output.detach().clone().requires_grad_()
    F.cross_entropy(
        again, target, weight=torch.tensor([0.5, 2.0, 1.25], dtype=torch.float64), label_smoothing=0.1
    ).backward()
    torch.testing.assert_close(output.grad, again.grad, rtol=1e-12, atol=1e-15)


def test_classes_may_come_as_any_integer() -> None:
    output, target = draw(3, 3), torch.tensor([2, 0, 1], dtype=torch.uint8)
    total, weight = build_task(TaskSpec(), CLASSES).loss(output, (output, target))
    assert (total / weight).item() == pytest.approx(F.cross_entropy(output, target.long()).item(), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("task_name", ["classification", "multilabel", "regression"])
def test_half_precision_outputs_have_the_loss_of_the_same_numbers_in_float64(
    task_name: str, dtype: torch.dtype
) -> None:
    # Eighths up to 8 are exact in both half types, so that only the loss's own arithmetic could differ.
    output = (draw(64, 3) * 16).round().clamp(-64, 64) / 8
    info = {"classification": CLASSES, "multilabel": LABELS}.get(
        task_name, dataclasses.replace(NUMBERS, target_shape=(3,))
    )
    target = torch.arange(64) % 3 if task_name == "classification" else (draw(64, 3, seed=1) > 0).long()
    task = build_task(TaskSpec(name=task_name), info)
    expected = {
        "classification": lambda: F.cross_entropy(output, target),
        "multilabel": lambda: F.binary_cross_entropy_with_logits(output, target.double()),
        "regression": lambda: F.mse_loss(output, target.double()),
    }[task_name]()
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            total, weight = task.loss(output.to(dtype), (output, target))
        assert total.dtype == torch.float32
        assert (total / weight).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("logit", [-80.0, 80.0], ids=["surely not", "surely"])
def test_multilabel_stays_finite_for_sure_logits(logit: float) -> None:
    output = torch.full((2, 3), logit, dtype=torch.float16, requires_grad=True)
    total, weight = build_task(TaskSpec(name="multilabel"), LABELS).loss(output, (output, torch.zeros(2, 3)))
    total.backward()
    assert (total / weight).item() == pytest.approx(max(logit, 0.0), abs=1e-6)
    assert output.grad is not None
    assert bool(output.grad.isfinite().all())


@pytest.mark.parametrize("sizes", PARTITIONS)
def test_multilabel_loss_and_accuracy_are_means_over_all_labels(sizes: list[int]) -> None:
    output, target = draw(11, 3), (draw(11, 3, seed=1) > 0).to(torch.uint8)
    task = build_task(TaskSpec(name="multilabel"), LABELS)
    expected = F.binary_cross_entropy_with_logits(output, target.double())
    right = ((output > 0) == (target == 1)).double().mean().item()
    assert task.info.num_outputs == 3
    assert split_loss(task, output, target, sizes).item() == pytest.approx(expected.item(), rel=1e-12)
    assert split_metric(task.metrics()["accuracy"], output, target, sizes) == pytest.approx(right, rel=1e-7)


@pytest.mark.parametrize("sizes", PARTITIONS)
@pytest.mark.parametrize(
    ("target_shape", "output_shape"),
    [
        pytest.param((), (11, 1), id="numbers"),
        pytest.param((), (11,), id="numbers from a flat output"),
        pytest.param((1,), (11, 1), id="rows of one"),
        pytest.param((4,), (11, 4), id="vectors"),
    ],
)
def test_regression_pairs_outputs_with_targets(
    target_shape: tuple[int, ...], output_shape: tuple[int, ...], sizes: list[int]
) -> None:
    output, target = draw(*output_shape), draw(11, *target_shape, seed=1)
    task = build_task(TaskSpec(name="regression"), dataclasses.replace(NUMBERS, target_shape=target_shape))
    error = output.reshape(11, -1) - target.reshape(11, -1)
    metrics = task.metrics()
    values = {name: split_metric(metric, output, target, sizes) for name, metric in metrics.items()}
    assert task.info.num_outputs == math.prod(target_shape)
    assert split_loss(task, output, target, sizes).item() == pytest.approx(error.square().mean().item(), rel=1e-12)
    assert values == {
        "mae": pytest.approx(error.abs().mean().item(), rel=1e-12),
        "rmse": pytest.approx(error.square().mean().sqrt().item(), rel=1e-12),
        "r2": pytest.approx(r2_score(target.reshape(11, -1), output.reshape(11, -1)), rel=1e-12),
    }


def test_regression_takes_whole_numbers() -> None:
    info = dataclasses.replace(NUMBERS, target_dtype="int64")
    output = torch.tensor([[1.0], [2.5], [7.0]])
    total, weight = build_task(TaskSpec(name="regression"), info).loss(output, (output, torch.tensor([1, 2, 9])))
    assert (total.item(), weight.item()) == (4.25, 3.0)


@pytest.mark.parametrize("task_name", ["regression", "multilabel"])
def test_shapes_that_do_not_pair_up_are_named(task_name: str) -> None:
    info = dataclasses.replace(LABELS, target_shape=(4,))
    task = build_task(TaskSpec(name=task_name), info)
    with pytest.raises(SpecError, match=r"the shape \(4, 1\) where the targets have \(4, 4\)"):
        task.loss(torch.zeros(4, 1), (torch.zeros(4, 1), torch.zeros(4, 4)))


def test_integers_that_are_no_class_indices_are_refused_before_training() -> None:
    info = dataclasses.replace(CLASSES, class_counts=())
    with pytest.raises(DataError, match="targets of toy are integers, but no class indices: some are negative"):
        build_task(TaskSpec(), info)


@pytest.mark.parametrize("bounds", [(0.0, 255.0), (-1.0, 1.0)])
def test_labels_other_than_0_and_1_are_refused(bounds: tuple[float, float]) -> None:
    info = dataclasses.replace(LABELS, target_range=bounds)
    with pytest.raises(DataError, match=rf"targets from 0 to 1, .* from {bounds[0]:g} to {bounds[1]:g}"):
        build_task(TaskSpec(name="multilabel"), info)
    build_task(TaskSpec(name="multilabel"), dataclasses.replace(LABELS, target_range=(0.0, 1.0)))


def test_one_sample_has_no_r2() -> None:
    metric = build_task(TaskSpec(name="regression"), NUMBERS).metrics()["r2"]
    assert math.isnan(split_metric(metric, torch.tensor([[1.0]]), torch.tensor([1.5]), [1]))


def test_r2_keeps_the_spread_of_targets_far_from_zero() -> None:
    target = draw(1000, seed=2) + 1e9
    output = target + 0.1 * draw(1000, seed=3)
    metric = build_task(TaskSpec(name="regression"), NUMBERS).metrics()["r2"]
    found = split_metric(metric, output[:, None], target, [7] * 142 + [6])
    assert found == pytest.approx(r2_score(target, output), rel=1e-9)


@pytest.mark.parametrize(("output", "expected"), [([2.0, 2.0], 1.0), ([2.0, 3.0], 0.0)], ids=["met exactly", "missed"])
def test_r2_of_a_constant_target_is_scikit_learns(output: list[float], expected: float) -> None:
    metric = build_task(TaskSpec(name="regression"), NUMBERS).metrics()["r2"]
    target = torch.tensor([2.0, 2.0])
    assert split_metric(metric, torch.tensor(output)[:, None], target, [1, 1]) == expected == r2_score(target, output)


def test_losses_10_10_9_in_batches_of_two_have_the_mean_9_6667() -> None:
    output, target = torch.tensor([10.0, 10.0, 9.0], dtype=torch.float64).sqrt()[:, None], torch.zeros(3)
    task = build_task(TaskSpec(name="regression"), NUMBERS)
    assert split_loss(task, output, target, [2, 1]).item() == pytest.approx(29 / 3, rel=1e-12)


@pytest.mark.parametrize("size", [1, 7, 256, 522], ids=str)
def test_accuracy_counts_samples_and_not_batches(size: int) -> None:
    """Batches of 256, 256 and 10 with 0.7, 0.8 and 0.9 of each right: the shares are taken to whole samples."""
    hits = [round(0.7 * 256), round(0.8 * 256), 9]
    target = torch.zeros(522, dtype=torch.int64)
    predicted = torch.cat([(torch.arange(n) >= hit).long() for n, hit in zip([256, 256, 10], hits, strict=True)])
    metric = build_task(TaskSpec(), CLASSES).metrics()["accuracy"]
    sizes = [size] * (522 // size) + [522 % size] * (522 % size > 0)
    assert split_metric(metric, F.one_hot(predicted, 3).half(), target, sizes) == sum(hits) / 522


def test_accuracies_7_8_9_weigh_by_their_samples() -> None:
    metric = build_task(TaskSpec(name="regression"), NUMBERS).metrics()["mae"]
    share = torch.cat([torch.full((256,), 0.7), torch.full((256,), 0.8), torch.full((10,), 0.9)]).double()
    assert split_metric(metric, share[:, None], torch.zeros(522), [256, 256, 10]) == pytest.approx(0.752874, abs=5e-7)


@pytest.mark.parametrize("name", ["classification", "multilabel", "regression"])
def test_metrics_have_the_names_known_beforehand_and_begin_empty(name: str) -> None:
    info = {"classification": CLASSES, "multilabel": LABELS}.get(name, NUMBERS)
    spec = TaskSpec(name=name)
    metrics = build_task(spec, info).metrics()
    assert tuple(metrics) == metric_names(spec)
    assert all(math.isnan(metric.compute().item()) for metric in metrics.values())


def test_a_metric_begins_anew_after_reset_and_keeps_no_graph() -> None:
    metric = build_task(TaskSpec(), CLASSES).metrics()["accuracy"].to(torch.device("cpu"))
    with torch.inference_mode():
        metric.update(torch.eye(3), torch.tensor([0, 0, 0]))
    assert metric.compute().item() == pytest.approx(1 / 3)
    metric.reset()
    metric.update(torch.eye(3, requires_grad=True), torch.tensor([0, 1, 2]))
    assert metric.compute().item() == 1.0
    assert not metric.compute().requires_grad


@pytest.mark.parametrize(
    ("task", "info", "path", "what"),
    [
        pytest.param(
            {}, NUMBERS, ("task", "name"),
            "classification needs one class index for each sample, but the targets of prices are float32 values",
            id="fractions as classes",
        ),
        pytest.param(
            {}, LABELS, ("task", "name"),
            "classification needs one class index for each sample, but the targets of toy are uint8 values of the"
            " shape (3,)",
            id="rows as classes",
        ),
        pytest.param(
            {"name": "multilabel"}, CLASSES, ("task", "name"),
            "multilabel needs a row of 0 and 1 for each sample, but the targets of toy have the shape ()",
            id="classes as labels",
        ),
        pytest.param(
            {"name": "regression"}, dataclasses.replace(NUMBERS, target_shape=(4, 4)), ("task", "name"),
            "regression needs a number or a row of numbers for each sample, but the targets of prices have the shape"
            " (4, 4)",
            id="matrices as numbers",
        ),
        pytest.param(
            {"class_weights": [1.0, 2.0]}, CLASSES, ("task", "class_weights"),
            "there are 2 weights for the 3 classes of toy", id="too few weights",
        ),
        pytest.param(
            {"name": "multilabel", "class_weights": "balanced"}, LABELS, ("task", "class_weights"),
            "class_weights (balanced) is a setting of classification, not of multilabel", id="weights for labels",
        ),
        pytest.param(
            {"name": "regression", "label_smoothing": 0.1}, NUMBERS, ("task", "label_smoothing"),
            "label_smoothing (0.1) is a setting of classification, not of regression", id="smoothed numbers",
        ),
        pytest.param({"name": "ranking"}, CLASSES, ("task", "name"), "there is no task 'ranking'", id="unknown"),
    ],
)  # fmt: skip
def test_a_task_and_data_that_do_not_fit_are_named(
    task: dict[str, Any], info: DataInfo, path: tuple[str, ...], what: str
) -> None:
    with pytest.raises(SpecError) as caught:
        build_task(TaskSpec(**task), info)
    assert (caught.value.fault.path, caught.value.fault.what) == (path, what)


@pytest.mark.parametrize(
    ("weights", "info", "message"),
    [
        pytest.param(
            "none", dataclasses.replace(CLASSES, num_outputs=1, class_names=("cat",), class_counts=(5,)),
            r"toy has 1 class \(cat\); classification needs at least 2", id="one class",
        ),
        pytest.param(
            "balanced", dataclasses.replace(CLASSES, class_counts=(5, 0, 4)),
            "Class b of toy has no training sample", id="empty class",
        ),
    ],
)  # fmt: skip
def test_data_without_enough_classes_is_refused(weights: Any, info: DataInfo, message: str) -> None:
    with pytest.raises(DataError, match=message):
        build_task(TaskSpec(class_weights=weights), info)


USER_MODULE = """
import dataclasses
import torch

class Least:
    def loss(self, output, batch):
        return (output - batch["y"]).abs().sum(), len(output)
    def metrics(self):
        return {}

class Most(Least):
    def __init__(self):
        self.scale = torch.tensor(2.0)
    def prepare(self, info):
        return dataclasses.replace(info, num_outputs=17)
    def forward(self, model, batch):
        return self.scale * model(batch["x"])
    def to(self, device):
        self.scale = self.scale.to(device)

class Half:
    def loss(self, output, batch):
        return output.mean()

class Unprepared(Least):
    def prepare(self, info):
        pass

class OneSum(Half):
    def metrics(self):
        return {}

class Nothing(Least):
    def metrics(self):
        return None

class NamedLoss(Least):
    def metrics(self):
        return {"loss": torch.nn.Identity()}

class OddName(Least):
    def metrics(self):
        return {"acc@1": torch.nn.Identity()}

class NoMetric(Least):
    def metrics(self):
        return {"acc": torch.nn.Identity()}

class Vector(OneSum):
    def loss(self, output, batch):
        return output, len(output)

NUMBER = 3
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "tasks_of_a_user.py").write_text(USER_MODULE)
    add_import_folder(tmp_path)
    yield "tasks_of_a_user"
    sys.modules.pop("tasks_of_a_user", None)


def test_a_users_task_needs_only_loss_and_metrics(user_module: str) -> None:
    spec = TaskSpec(name=f"{user_module}:Least")
    task = build_task(spec, NUMBERS).to(torch.device("cpu"))
    total, weight = task.loss(torch.tensor([1.0, 5.0]), {"y": torch.tensor([2.0, 2.0])})
    assert (total.item(), weight.item(), weight.shape) == (4.0, 2.0, ())
    assert (task.info, task.metrics(), metric_names(spec)) == (NUMBERS, {}, None)
    assert task.forward(torch.nn.Identity(), (torch.tensor(3.0), None)).item() == 3.0


def test_a_users_task_may_prepare_forward_and_move(user_module: str) -> None:
    task = build_task(TaskSpec(name=f"{user_module}:Most"), NUMBERS)
    assert task.info.num_outputs == 17
    assert task.forward(torch.nn.Identity(), {"x": torch.tensor(3.0)}).item() == 6.0
    assert task.to(torch.device("meta")).forward(torch.nn.Identity(), {"x": torch.tensor(3.0)}).is_meta


@pytest.mark.parametrize(
    ("attribute", "what"),
    [
        pytest.param("Half", "has no method `metrics`", id="half a task"),
        pytest.param("NUMBER", "is of type int, not a class", id="not a class"),
        pytest.param("Unprepared", "returned an object of type NoneType from `prepare`, not a sweeper.DataInfo",
                     id="prepares nothing"),
        pytest.param("Nothing", "returned an object of type NoneType from `metrics`", id="no metrics"),
        pytest.param("NamedLoss", "names a metric 'loss', which cannot be: val_loss is the loss's name", id="loss"),
        pytest.param("OddName", "names a metric 'acc@1', which cannot be: MLflow takes letters, digits and _ - . only",
                     id="a name that MLflow refuses"),
        pytest.param("NoMetric", "has a metric 'acc' without update, compute, reset; torchmetrics' have all",
                     id="no metric"),
    ],
)  # fmt: skip
def test_what_is_no_task_is_said_in_words(user_module: str, attribute: str, what: str) -> None:
    with pytest.raises(SpecError) as caught:
        build_task(TaskSpec(name=f"{user_module}:{attribute}"), NUMBERS)
    assert (caught.value.fault.path, caught.value.fault.what) == (("task", "name"), f"{user_module}:{attribute} {what}")


@pytest.mark.parametrize(
    ("attribute", "what"),
    [
        pytest.param("OneSum", "returned an object of type Tensor from `loss`, not two sums", id="a mean"),
        pytest.param("Vector", "returned something else than two scalars from `loss`", id="not summed"),
    ],
)
def test_a_loss_that_is_not_two_sums_is_said_in_words(user_module: str, attribute: str, what: str) -> None:
    task = build_task(TaskSpec(name=f"{user_module}:{attribute}"), NUMBERS)
    with pytest.raises(SpecError) as caught:
        task.loss(torch.ones(2), None)
    assert caught.value.fault.what == f"{user_module}:{attribute} {what}"
