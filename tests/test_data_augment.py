from __future__ import annotations

from typing import Any

import pytest
import torch

from sweeper.data.augment import Augmented, build_augment
from sweeper.data.loader import EpochLoader
from sweeper.data.memory import InMemory, InMemoryPictures
from sweeper.errors import SpecError
from user_data import Named

PICTURES = InMemory(torch.rand(4, 3, 16, 8, generator=torch.Generator().manual_seed(0)), torch.arange(4))


@pytest.mark.parametrize(
    "name",
    [
        "random_crop",
        "random_horizontal_flip",
        "random_vertical_flip",
        {"random_rotation": {"degrees": 10}},
        {"color_jitter": {"brightness": 0.4, "hue": 0.1}},
        "random_erasing",
        {"random_affine": {"degrees": 5, "translate": [0.1, 0.1]}},
        "random_resized_crop",
        {"random_crop": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("channels", [1, 3])
def test_every_augmentation_keeps_the_shape(name: str | dict[str, Any], channels: int) -> None:
    dataset = InMemory(PICTURES.inputs[:, :channels], PICTURES.targets)
    transform = build_augment([name], dataset)
    assert transform is not None
    assert transform(dataset[0][0]).shape == (channels, 16, 8)


@pytest.mark.parametrize(
    ("entry", "rows", "columns"),
    [
        pytest.param("random_crop", 2, 1, id="an eighth of the size"),
        pytest.param({"random_crop": {"padding": 3}}, 3, 3, id="what the file says"),
    ],
)
def test_a_crop_moves_the_picture_by_its_padding_at_most(entry: Any, rows: int, columns: int) -> None:
    ones = InMemory(torch.ones(1, 1, 16, 8), torch.zeros(1))
    transform = build_augment([entry], ones)
    assert transform is not None
    torch.manual_seed(0)
    draws = [transform(ones[0][0])[0] for _ in range(200)]
    assert max(int((draw.sum(1) == 0).sum()) for draw in draws) == rows
    assert max(int((draw.sum(0) == 0).sum()) for draw in draws) == columns


def test_augmentations_run_in_the_order_of_the_file() -> None:
    transform = build_augment([{"random_horizontal_flip": {"p": 1.0}}, {"random_vertical_flip": {"p": 1.0}}], PICTURES)
    picture = PICTURES[0][0]
    assert transform is not None
    assert torch.equal(transform(picture), picture.flip(-1, -2))


def test_pictures_are_changed_before_they_are_normalised() -> None:
    white = InMemoryPictures(torch.full((1, 1, 8, 8), 255, dtype=torch.uint8), torch.zeros(1))
    transform = build_augment([{"random_erasing": {"p": 1.0, "scale": [0.2, 0.3]}}], white)
    assert transform is not None
    assert sorted(Augmented(white, transform)[0][0].unique().tolist()) == [-1.0, 1.0]  # erased pixels are black
    assert white.inputs.unique().tolist() == [255]


def test_arrays_are_augmented_too() -> None:
    array = PICTURES.inputs[0].numpy()
    dataset = Named([(array, 0)])
    transform = build_augment([{"random_horizontal_flip": {"p": 1.0}}], dataset)
    assert transform is not None
    assert torch.equal(Augmented(dataset, transform)[0][0], PICTURES.inputs[0].flip(-1))


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        pytest.param("random_crops", "Did you mean random_crop?", id="name"),
        pytest.param("cut_mix", "There are color_jitter, random_affine", id="unknown name"),
        pytest.param(
            {"random_crop": {"pading": 2}}, "has no argument 'pading'\n  Did you mean padding?", id="argument"
        ),
        pytest.param({"random_rotation": {}}, "missing 1 required positional argument: 'degrees'", id="missing"),
        pytest.param({"random_horizontal_flip": {"p": 2}}, "random_horizontal_flip cannot be used like this", id="p"),
        pytest.param({"random_erasing": {"p": 1.0, "value": [1, 2]}}, "cannot be used like this", id="when used"),
        pytest.param({"random_crop": {"size": 4}}, "makes (3, 4, 4) of pictures (3, 16, 8)", id="other size"),
        pytest.param(
            {"random_rotation": {"degrees": 45, "expand": True}}, "do not expand", id="size that depends on the draw"
        ),
        pytest.param({"random_crop": {}, "random_erasing": {}}, "is not one augmentation", id="two in one"),
        pytest.param({"random_crop": 4}, "is not one augmentation", id="no section"),
        pytest.param({}, "is not one augmentation", id="nothing"),
        pytest.param("color_jitter", "changes nothing without an argument", id="no colour change"),
    ],
)
def test_an_entry_that_cannot_be_used_is_named_by_its_place(entry: Any, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        build_augment(["random_vertical_flip", entry], PICTURES)
    assert caught.value.fault.path == ("data", "augment", 1)
    assert words in str(caught.value)


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (0.0, 255.0)])
def test_colours_of_normalised_pictures_are_not_changed(low: float, high: float) -> None:
    """torchvision would cut them off at 0 and 1."""
    scaled = InMemory(torch.rand(4, 3, 8, 8) * (high - low) + low, torch.zeros(4))
    with pytest.raises(SpecError, match="color_jitter takes colours from 0 to 1, but a picture goes from"):
        build_augment([{"color_jitter": {"brightness": 0.2}}], scaled)
    assert build_augment([{"color_jitter": {"brightness": 0.2}}], InMemory(torch.rand(4, 3, 8, 8), torch.zeros(4)))


@pytest.mark.parametrize("inputs", [torch.zeros(3, 5), torch.zeros(3, 2, 2, 2, 2)], ids=["rows", "volumes"])
def test_only_pictures_are_augmented(inputs: torch.Tensor) -> None:
    with pytest.raises(SpecError, match="works on pictures"):
        build_augment(["random_crop"], InMemory(inputs, torch.zeros(3)))


def test_every_sample_of_a_batch_is_drawn_on_its_own() -> None:
    same = InMemory(PICTURES.inputs[:1].repeat(64, 1, 1, 1), torch.zeros(64))
    loader = EpochLoader(
        same,
        seed=0,
        augment=["random_horizontal_flip"],
        num_workers=0,
        pin_memory=False,
        prefetch_factor=2,
        persistent_workers=False,
    )
    ((batch, _),) = loader.epoch(0, [list(range(64))])
    flipped = sum(torch.equal(picture, PICTURES.inputs[0].flip(-1)) for picture in batch)
    straight = sum(torch.equal(picture, PICTURES.inputs[0]) for picture in batch)
    assert flipped + straight == 64
    assert 16 < flipped < 48
