from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from sweeper.data import Splits, load_data, targets_of
from sweeper.data.describe import describe
from sweeper.data.memory import InMemory
from sweeper.data.splits import complete, stratified
from sweeper.errors import DataError, SpecError
from sweeper.spec import DataSpec


def spec(**values: Any) -> DataSpec:
    return DataSpec.model_validate({"source": "digits", **values})


def test_digits_are_whole_and_split_by_class() -> None:
    data = load_data(spec())
    info = data.info
    assert (info.name, info.input_shape, info.input_dtype) == ("digits", (1, 8, 8), "float32")
    assert (info.num_outputs, info.target_dtype, info.target_shape) == (10, "int64", ())
    assert info.class_names == tuple("0123456789")
    assert info.sizes == {"train": 1438, "val": 359}
    # The whole set has 178 182 177 183 181 182 181 179 174 180; a fifth of each, 359 in all.
    assert info.class_counts == (142, 146, 142, 146, 145, 146, 145, 143, 139, 144)
    assert torch.bincount(targets_of(data.splits.val)).tolist() == [36, 36, 35, 37, 36, 36, 36, 36, 35, 36]
    first, label = data.splits.train[0]
    assert label == 0
    assert (first[0, 0] * 16).tolist() == [0, 0, 5, 13, 9, 1, 0, 0]


def test_the_digest_is_of_the_content_and_not_of_the_split() -> None:
    digests = {load_data(spec(**values)).info.digest for values in ({}, {"split_seed": 9}, {"val_fraction": 0.5})}
    assert digests == {"f956c53d55613b15"}


def test_every_sample_is_in_one_part() -> None:
    targets = torch.tensor([0] * 50 + [1] * 30 + [2] * 20)
    parts = stratified(targets, (0.1, 0.2), seed=0)
    assert [torch.bincount(targets[list(part)]).tolist() for part in parts] == [
        [35, 21, 14],
        [5, 3, 2],
        [10, 6, 4],
    ]
    assert sorted(index for part in parts for index in part) == list(range(100))
    assert all(list(part) == sorted(part) for part in parts)


@pytest.mark.parametrize(
    ("targets", "fraction", "counts"),
    [
        pytest.param([0] * 7 + [1] * 3, 0.2, [1, 1], id="total rounded, largest remainder first"),
        pytest.param([0] * 9 + [1], 0.5, [5, 0], id="the last sample of a class stays for training"),
        pytest.param([0] * 4 + [2] * 4, 0.25, [1, 0, 1], id="a class without samples"),
        pytest.param([0.5] * 10, 0.3, 3, id="floats are one class"),
        pytest.param([-1] * 5 + [1] * 5, 0.3, 3, id="negative numbers are no classes"),
        pytest.param([7, 900, 3, 5000, 12], 0.4, 2, id="large numbers are no classes"),
        pytest.param([0, 1, 2, 3, 4], 0.4, 2, id="one sample a class: the total holds"),
    ],
)
def test_a_part_has_its_share_of_each_class(targets: list[Any], fraction: float, counts: list[int] | int) -> None:
    rest, part = stratified(torch.tensor(targets), (fraction,), seed=1)
    assert len(rest) + len(part) == len(targets)
    if isinstance(counts, int):
        assert len(part) == counts
    else:
        assert torch.bincount(torch.tensor(targets)[part], minlength=len(counts)).tolist() == counts


def test_the_split_depends_on_its_seed_alone() -> None:
    targets = torch.arange(100) % 4
    torch.manual_seed(1)
    first = stratified(targets, (0.2,), seed=5)
    torch.manual_seed(2)
    assert stratified(targets, (0.2,), seed=5) == first
    assert stratified(targets, (0.2,), seed=6) != first


def test_the_test_set_is_the_same_for_every_val_fraction() -> None:
    targets = torch.arange(100) % 4
    assert stratified(targets, (0.2, 0.1), seed=0)[1] == stratified(targets, (0.2, 0.3), seed=0)[1]


def test_both_fractions_are_of_the_whole() -> None:
    data = load_data(spec(test_fraction=0.5, val_fraction=0.25))
    assert data.info.sizes == {"train": 449, "val": 449, "test": 899}


def test_fractions_beside_own_splits_are_named_as_unused() -> None:
    dataset = InMemory(torch.zeros(4, 1), torch.arange(4) % 2)
    with pytest.warns(UserWarning, match=r"data\.test_fraction \(0\.1\) is not used: the data has its own test set"):
        splits = complete(Splits(dataset, dataset, dataset), spec(test_fraction=0.1))
    assert splits == Splits(dataset, dataset, dataset)


@pytest.mark.parametrize(
    ("size", "values", "message"),
    [
        pytest.param(2, {"val_fraction": 0.2}, "val_fraction (0.2) of 2 samples leaves no val sample", id="val"),
        pytest.param(4, {"test_fraction": 0.1}, "test_fraction (0.1) of 4 samples leaves no test", id="test"),
        pytest.param(2, {"val_fraction": 0.9}, "leave no sample to train on", id="train"),
    ],
)
def test_too_few_samples_are_refused(size: int, values: dict[str, float], message: str) -> None:
    dataset = InMemory(torch.zeros(size, 1), torch.zeros(size))
    with pytest.raises(DataError) as caught:
        complete(Splits(dataset), spec(**values))
    assert message in str(caught.value)


def test_a_class_that_validation_does_not_show_is_named() -> None:
    dataset = InMemory(torch.zeros(21, 1), torch.tensor([0] * 10 + [1] * 10 + [2]))
    splits = complete(Splits(dataset), spec())  # class 2 has one sample, which stays for training
    with pytest.warns(UserWarning, match=r"the val data has no sample of 1 of 3 classes \(2\)"):
        info = describe(splits, "toy", "")
    assert info.class_counts == (8, 8, 1)


@pytest.mark.parametrize(
    ("values", "path", "words"),
    [
        pytest.param({"source": "digit"}, ("data", "source"), "Did you mean digits?", id="near"),
        pytest.param({"source": "parquet"}, ("data", "source"), "There are `digits`, `image_folder`", id="far"),
        pytest.param({"root": "x"}, ("data", "root"), "means nothing to the source digits", id="foreign key"),
        pytest.param({"source": "image_folder"}, ("data", "root"), "image_folder needs it", id="missing root"),
        pytest.param({"source": "torchvision", "root": "x"}, ("data", "dataset"), "needs it", id="missing set"),
        pytest.param(
            {"source": "torchvision", "root": "x", "dataset": "mnist"},
            ("data", "dataset"),
            "Did you mean MNIST?",
            id="case of the set",
        ),
        pytest.param({"source": "no_such_module:load"}, ("data", "source"), "cannot be imported", id="import"),
    ],
)
def test_a_section_that_cannot_be_used_is_refused(values: dict[str, Any], path: tuple[str, ...], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_data(spec(**values))
    assert caught.value.fault.path == path
    assert words in str(caught.value)


def test_loading_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_data(spec(augment=["random_crop"]))
    assert torch.equal(torch.get_rng_state(), before)
