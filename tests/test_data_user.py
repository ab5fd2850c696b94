from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from sweeper.data import LoadedData, Splits, load_data, targets_of
from sweeper.data.memory import InMemory
from sweeper.data.samples import COMPARED
from sweeper.errors import DataError, SpecError
from sweeper.spec import DataSpec
from user_data import Drawing, Named, Stream, rows


def load(result: Any = None, **values: Any) -> LoadedData:
    return load_data(DataSpec.model_validate({"source": "user_data:given", "params": {"result": result}, **values}))


def load_named(function: str, **values: Any) -> LoadedData:
    return load_data(DataSpec.model_validate({"source": f"user_data:{function}", **values}))


def test_train_alone_is_split_by_the_fractions() -> None:
    with pytest.warns(UserWarning, match=r"the (train|val) data has no sample of 1 of 3 classes \(1\)"):
        data = load_named("every_second", val_fraction=0.2)
    # Every second of the labels 0 1 2 3 0 1 2 3 ... : five of 0, five of 2.
    assert data.info.sizes == {"train": 8, "val": 2}
    assert data.info.class_counts == (4, 0, 4)
    assert sorted(targets_of(data.splits.val).tolist()) == [0, 2]


def test_the_range_of_all_targets_is_told() -> None:
    splits = Splits(TensorDataset(torch.zeros(4, 2), torch.tensor([[0.0, 1.0]] * 3 + [[0.5, 255.0]])), rows(4))
    assert load(Splits(splits.train)).info.target_range == (0.0, 255.0)


def test_given_splits_are_kept() -> None:
    info = load(Splits(rows(8), rows(4), rows(6))).info
    assert info.sizes == {"train": 8, "val": 4, "test": 6}
    assert info.name == "user_data:given"
    assert (info.input_shape, info.input_dtype, info.class_counts) == ((2,), "float32", (4, 4))


def test_tensors_are_recognised_as_data_in_memory() -> None:
    splits = load(Splits(rows(8), Subset(rows(8), [1, 4]))).splits
    assert isinstance(splits.train, InMemory)
    assert isinstance(splits.val, InMemory)
    assert splits.val.inputs.tolist() == [[2.0, 3.0], [8.0, 9.0]]


@pytest.mark.parametrize(
    ("targets", "num_outputs", "dtype", "shape", "counts"),
    [
        pytest.param(torch.tensor([0, 1, 2, 1]), 3, "int64", (), (1, 2, 1), id="classes"),
        pytest.param(torch.tensor([0, 1, 1, 1], dtype=torch.uint8), 2, "uint8", (), (1, 3), id="bytes"),
        pytest.param(torch.tensor([0.5, 1.0, 2.0, 3.0]), 1, "float32", (), (), id="a number"),
        pytest.param(torch.zeros(4, 5), 5, "float32", (5,), (), id="a row of numbers"),
        pytest.param(torch.zeros(4, 6, dtype=torch.int64), 6, "int64", (6,), (), id="a row of labels"),
        pytest.param(torch.full((4, 2, 2), 3), 4, "int64", (2, 2), (), id="a mask of classes"),
        pytest.param(torch.tensor([100, 2000, 3, 9]), 2001, "int64", (), (), id="counts"),
    ],
)
def test_outputs_follow_the_targets(
    targets: torch.Tensor, num_outputs: int, dtype: str, shape: tuple[int, ...], counts: tuple[int, ...]
) -> None:
    dataset = TensorDataset(torch.zeros(len(targets), 3), targets)
    info = load(Splits(dataset, dataset)).info
    assert (info.num_outputs, info.target_dtype, info.target_shape) == (num_outputs, dtype, shape)
    assert info.class_counts == counts


def test_a_class_of_validation_alone_has_an_output_and_is_warned_about() -> None:
    train, val = rows(8, 2), TensorDataset(torch.zeros(3, 2), torch.tensor([0, 1, 2]))
    with pytest.warns(UserWarning, match=r"the train data has no sample of 1 of 3 classes \(2\)"):
        info = load(Splits(train, val)).info
    assert (info.num_outputs, info.class_counts) == (3, (4, 4, 0))


def test_class_names_are_taken_from_the_training_data() -> None:
    items = [(torch.zeros(2), place % 2) for place in range(4)]
    with pytest.warns(UserWarning, match=r"has no sample of 1 of 3 classes \(owl\)"):
        info = load(Splits(Named(items, classes=["cat", "dog", "owl"]), Named(items))).info
    assert (info.class_names, info.num_outputs) == (("cat", "dog", "owl"), 3)


@pytest.mark.parametrize(
    ("item", "shape", "dtype"),
    [
        pytest.param((torch.zeros(3, 4), 0.5), (3, 4), "float32", id="tensor"),
        pytest.param((np.zeros((3, 4)), 0.5), (3, 4), "float64", id="array"),
        pytest.param([1.5, 0.5], (), "float64", id="number in a list"),
        pytest.param(({"a": torch.zeros(2), "b": 1}, 0.5), (), "dict", id="dict"),
    ],
)
def test_inputs_may_be_anything_that_batches(item: Any, shape: tuple[int, ...], dtype: str) -> None:
    dataset = Named([item, item])
    info = load(Splits(dataset, dataset)).info
    assert (info.input_shape, info.input_dtype) == (shape, dtype)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        pytest.param(
            (rows(4), rows(4)), "user_data:given returned a tuple, not Splits", id="a tuple in place of Splits"
        ),
        pytest.param(Splits(None), "returned a NoneType for train, which is no map-style", id="no train"),  # type: ignore[arg-type]
        pytest.param(Splits(rows(4), Stream()), "returned a Stream for val, which is no map-style", id="a stream"),  # type: ignore[arg-type]
        pytest.param(Splits(Named([torch.zeros(2)])), "samples are a Tensor, not a pair", id="no target"),
        pytest.param(Splits(Named([{"x": 1, "y": 2}])), "samples are a dict of 2, not a pair", id="a dict"),
        pytest.param(Splits(Named([(1, 2, 3)])), "samples are a tuple of 3, not a pair", id="three"),
        pytest.param(Splits(Named([(object(), 1)])), "samples cannot go into a batch", id="an object"),
    ],
)
def test_a_result_that_cannot_be_used_is_explained(result: Any, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        load(result)
    assert caught.value.fault.path == ("data", "source")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        pytest.param(Splits(Named([])), "returned a Named for train without any sample", id="empty"),
        pytest.param(
            Splits(rows(4), TensorDataset(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))),
            "input is float32 (3,) in the val data and float32 (2,) in the train data",
            id="another shape",
        ),
        pytest.param(
            Splits(rows(4), TensorDataset(torch.zeros(2, 2), torch.zeros(2))),
            "target is float32 () in the val data and int64 () in the train data",
            id="another kind of target",
        ),
        pytest.param(
            Splits(Named([(torch.zeros(2), 3)] * 4, classes=["cat"])),
            "names 1 classes, but its labels go up to 3",
            id="too few names",
        ),
        pytest.param(
            Splits(Named([(torch.zeros(2), torch.zeros(place + 1)) for place in range(4)])),
            "Samples cannot be put into one batch",
            id="targets of different lengths",
        ),
    ],
)
def test_data_that_does_not_fit_together_is_explained(result: Any, words: str) -> None:
    with pytest.raises(DataError) as caught:
        load(result)
    assert words in str(caught.value)


def test_a_source_that_is_no_function_is_refused() -> None:
    with pytest.raises(SpecError, match="user_data:NOT_A_FUNCTION is a int, not a function"):
        load_named("NOT_A_FUNCTION")


def test_a_split_drawn_from_the_global_state_is_the_same_every_time() -> None:
    targets = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        targets.append(load_named("carelessly_split").splits.val[0][0].tolist())  # type: ignore[index]
    assert targets[0] == targets[1]


def test_loading_leaves_every_global_random_state_alone() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    expected = (float(torch.rand(())), random.random(), float(np.random.rand()))
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    load_named("drawing")
    assert (float(torch.rand(())), random.random(), float(np.random.rand())) == expected


def test_the_digest_follows_the_content() -> None:
    same = [load(Splits(rows(40), rows(4))).info.digest for _ in range(2)]
    other = [load(Splits(rows(41), rows(4))).info.digest, load(Splits(rows(40), rows(5))).info.digest]
    drawing = [load_named("drawing").info.digest for _ in range(2)]
    assert same[0] == same[1]
    assert drawing[0] == drawing[1]
    assert len({*same, *other, *drawing}) == 4


def test_targets_kept_by_the_dataset_spare_reading_it() -> None:
    items = [(torch.zeros(2), place % 3) for place in range(1000)]
    dataset = Named(items, targets=[target for _, target in items])
    assert targets_of(Subset(dataset, [4, 29])).tolist() == [1, 2]
    assert dataset.reads <= 2 * COMPARED  # to see that `targets` is what the samples hold


def test_targets_that_only_later_samples_contradict_are_not_believed() -> None:
    """As with torchvision's `target_transform`: the first sample may be the same in both."""
    raw = [(7 * place) % 10 for place in range(50)]
    dataset = Named([(float(place), int(target >= 5)) for place, target in enumerate(raw)], targets=raw)
    assert targets_of(dataset).tolist() == [int(target >= 5) for target in raw]


def test_a_target_of_named_parts_is_refused_in_words() -> None:
    items = [(torch.zeros(2), {"label": 0}), (torch.ones(2), {"label": 1})]
    with pytest.raises(SpecError, match="returned a Named for train whose targets are a dict"):
        load(Splits(Named(items)))


def test_targets_that_the_samples_contradict_are_not_believed() -> None:
    items = [(torch.zeros(2), float(place)) for place in range(100)]
    dataset = Named(items, targets=list(range(100)))
    assert torch.equal(targets_of(dataset), torch.arange(100, dtype=torch.float32))


def test_targets_of_joined_data_are_joined() -> None:
    assert targets_of(ConcatDataset([InMemory(torch.zeros(2), torch.tensor([5, 6])), Drawing()])).tolist() == [
        5,
        6,
        *[0, 1] * 5,
    ]
