from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pictures import folder_spec, write, write_d2, write_noise
from sweeper.data import LoadedData, load_data, targets_of
from sweeper.data.loader import EpochLoader
from sweeper.errors import DataError, SpecError
from sweeper.spec import TaskSpec
from sweeper.tasks import build_task


def normalised(byte: int) -> float:
    return (byte / 255 - 0.5) / 0.5


def first_batch(data: LoadedData, batch_size: int, split: str = "train") -> tuple[torch.Tensor, torch.Tensor]:
    dataset = getattr(data.splits, split)
    loader = EpochLoader(
        dataset, seed=0, augment=[], num_workers=0, pin_memory=False, prefetch_factor=2, persistent_workers=False
    )
    return next(loader.epoch(0, [list(range(batch_size))]))


def test_folders_of_splits_are_taken_as_they_are(tmp_path: Path) -> None:
    data = load_data(folder_spec(write_d2(tmp_path / "pets")))
    info = data.info
    assert (info.name, info.input_shape, info.num_outputs) == ("pets", (3, 8, 8), 3)
    assert (info.class_names, info.class_counts, info.sizes) == (("a", "b", "c"), (4, 4, 4), {"train": 12, "val": 6})
    assert (info.target_dtype, info.input_dtype) == ("int64", "float32")
    expected = np.asarray(Image.open(tmp_path / "pets/train/b/1.png"), dtype=np.float32) / 255
    picture, target = data.splits.train[5]
    assert target == 1
    assert torch.allclose(picture, torch.from_numpy((expected - 0.5) / 0.5).permute(2, 0, 1))


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_a_validation_folder_may_have_three_names(tmp_path: Path, name: str) -> None:
    write_d2(tmp_path)
    (tmp_path / "val").rename(tmp_path / name)
    assert load_data(folder_spec(tmp_path)).info.sizes == {"train": 12, "val": 6}


def test_two_validation_folders_are_refused(tmp_path: Path) -> None:
    write(write_d2(tmp_path) / "valid" / "a" / "1.png", 0)
    with pytest.raises(DataError, match="both look like the val data"):
        load_data(folder_spec(tmp_path))


def test_class_folders_alone_are_split_by_class(tmp_path: Path) -> None:
    write_d2(tmp_path)
    data = load_data(folder_spec(tmp_path / "train", val_fraction=0.25, test_fraction=0.25))
    assert data.info.sizes == {"train": 6, "val": 3, "test": 3}
    assert all(targets_of(part).bincount().tolist() == [1, 1, 1] for part in (data.splits.val, data.splits.test))


def test_a_test_folder_is_the_test_set(tmp_path: Path) -> None:
    write_d2(tmp_path)
    (tmp_path / "val").rename(tmp_path / "test")
    data = load_data(folder_spec(tmp_path, val_fraction=0.25))
    assert data.info.sizes == {"train": 9, "val": 3, "test": 6}


def test_classes_may_be_named_like_splits(tmp_path: Path) -> None:
    for name in ("plane", "train"):
        for place in range(4):
            write_noise(tmp_path / name / f"{place}.png", place)
    assert load_data(folder_spec(tmp_path, val_fraction=0.25)).info.class_names == ("plane", "train")


def test_a_class_keeps_its_training_index_when_validation_lacks_another(tmp_path: Path) -> None:
    write_d2(tmp_path, val_classes="bc")
    with pytest.warns(UserWarning, match=r"the val data has no sample of 1 of 3 classes \(a\)"):
        data = load_data(folder_spec(tmp_path))
    assert targets_of(data.splits.val).tolist() == [1, 1, 2, 2]
    inputs, targets = first_batch(data, 4, "val")
    assert targets.tolist() == [1, 1, 2, 2]
    accuracy = build_task(TaskSpec(), data.info).metrics()["accuracy"]
    accuracy.update(torch.eye(3)[torch.tensor([1, 1, 2, 2])], targets)  # a model that knows the answers
    assert float(accuracy.compute()) == 1.0
    assert inputs.shape == (4, 3, 8, 8)


def test_a_class_that_training_does_not_know_is_an_error(tmp_path: Path) -> None:
    write_d2(tmp_path, val_classes="bcd")
    with pytest.raises(DataError, match="has the classes d, which the training data does not: a, b, c"):
        load_data(folder_spec(tmp_path))


def damage(root: Path) -> tuple[Path, Path]:
    cut, empty = root / "train/a/1.png", root / "train/c/3.png"
    cut.write_bytes(cut.read_bytes()[:-20])
    empty.write_bytes(b"")
    return cut, empty


def test_every_bad_file_is_named(tmp_path: Path) -> None:
    cut, empty = damage(write_d2(tmp_path))
    with pytest.raises(DataError) as caught:
        load_data(folder_spec(tmp_path))
    text = str(caught.value)
    assert text.startswith("2 of 18 images cannot be used:")
    assert str(cut) in text
    assert f"{empty}: it is empty" in text
    assert "on_bad_file: skip" in text


def test_bad_files_are_skipped_on_request_and_counted(tmp_path: Path) -> None:
    cut, empty = damage(write_d2(tmp_path))
    with pytest.warns(UserWarning, match="images that cannot be used are left out") as caught:
        data = load_data(folder_spec(tmp_path, on_bad_file="skip"))
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "(train: 2 skipped, 10 used)" in text
    assert str(cut) in text
    assert str(empty) in text
    assert data.info.sizes == {"train": 10, "val": 6}
    assert first_batch(data, 10)[1].tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]


@pytest.mark.filterwarnings("ignore:images that cannot be used are left out")
def test_a_class_without_a_good_file_is_an_error(tmp_path: Path) -> None:
    write_d2(tmp_path)
    for path in (tmp_path / "train" / "b").iterdir():
        path.write_bytes(b"not a picture")
    with pytest.raises(DataError, match="Class b has no readable image left"):
        load_data(folder_spec(tmp_path, on_bad_file="skip"))


MIXED: list[tuple[str, str, Any, tuple[int, int, int]]] = [
    ("grey.png", "L", 100, (100, 100, 100)),
    ("colour.png", "RGB", (10, 20, 30), (10, 20, 30)),
    ("alpha.png", "RGBA", (10, 20, 30, 0), (10, 20, 30)),
    ("grey_alpha.png", "LA", (70, 128), (70, 70, 70)),
    ("print.tif", "CMYK", (255, 0, 0, 0), (0, 255, 255)),
    ("palette.gif", "P", 0, (200, 100, 50)),
    ("two.png", "1", 1, (255, 255, 255)),
    ("deep.png", "I;16", 100 * 256 + 77, (100, 100, 100)),
]


def write_mixed(root: Path) -> None:
    """One class, `a`, with an image of every mode in it, in order of their names; and one more class."""
    for name, mode, colour, _ in MIXED:
        image = Image.new(mode, (8, 8), colour)
        if mode == "P":
            image.putpalette([200, 100, 50])
        (root / "train/a").mkdir(parents=True, exist_ok=True)
        image.save(root / "train/a" / name)
    write(root / "train/b/1.png", (0, 0, 0))
    write(root / "val/a/1.png", 9, "L")
    write(root / "val/b/1.png", 9, "L")


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_images_of_every_mode_go_into_one_batch(tmp_path: Path, channels: int, batch_size: int) -> None:
    write_mixed(tmp_path)
    data = load_data(folder_spec(tmp_path, channels=channels))
    assert data.info.input_shape == (channels, 8, 8)
    assert first_batch(data, batch_size)[0].shape == (batch_size, channels, 8, 8)
    pictures = first_batch(data, len(MIXED))[0]
    for picture, (name, _, _, (red, green, blue)) in zip(pictures, sorted(MIXED), strict=True):
        luma = (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16  # ITU-R 601, as PIL rounds it
        bytes_wanted = [red, green, blue] if channels == 3 else [luma]
        wanted = torch.tensor([normalised(byte) for byte in bytes_wanted])
        assert torch.allclose(picture, wanted[:, None, None].expand(channels, 8, 8), atol=1e-6), name


@pytest.mark.parametrize(
    ("last_mode", "channels"), [pytest.param("L", 1, id="all grey"), pytest.param("RGB", 3, id="one in colour")]
)
def test_channels_follow_the_training_images(tmp_path: Path, last_mode: str, channels: int) -> None:
    for name, mode in (("a", "L"), ("b", last_mode)):
        write(tmp_path / "train" / name / "1.png", 50 if mode == "L" else (50, 0, 0), mode)
        write(tmp_path / "val" / name / "1.png", (50, 0, 0))
    assert load_data(folder_spec(tmp_path)).info.input_shape == (channels, 8, 8)


def test_values_without_a_range_are_a_bad_file(tmp_path: Path) -> None:
    write_d2(tmp_path)
    write(tmp_path / "train/a/deep.tif", 3, "I")
    with pytest.raises(DataError, match=r"deep\.tif: ValueError: its pixels are 32-bit values \(mode I\)"):
        load_data(folder_spec(tmp_path))


def test_images_of_different_sizes_need_an_image_size(tmp_path: Path) -> None:
    write(write_d2(tmp_path) / "train/b/wide.png", (255, 0, 0), size=(12, 8))
    with pytest.raises(DataError, match=r"a/0\.png is 8x8, .*wide\.png is 12x8") as caught:
        load_data(folder_spec(tmp_path))
    assert "Write `image_size`" in str(caught.value)
    data = load_data(folder_spec(tmp_path, image_size=6))
    assert data.info.input_shape == (3, 6, 6)
    assert first_batch(data, 13)[0].shape == (13, 3, 6, 6)


def test_images_of_one_size_keep_it(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / "train" / name / "1.png", (1, 2, 3), size=(10, 6))
        write(tmp_path / "val" / name / "1.png", (1, 2, 3), size=(10, 6))
    assert load_data(folder_spec(tmp_path)).info.input_shape == (3, 6, 10)


def test_hidden_files_and_folders_are_not_looked_at(tmp_path: Path) -> None:
    write_d2(tmp_path)
    for name in ("train/.ipynb_checkpoints/1.png", "train/a/._1.png", ".cache/x/1.png", "train/a/.thumbs/1.png"):
        write(tmp_path / name, (0, 0, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_data(folder_spec(tmp_path)).info.sizes == {"train": 12, "val": 6}


def test_other_files_are_ignored_with_a_warning(tmp_path: Path) -> None:
    write_d2(tmp_path)
    (tmp_path / "train/a/notes.txt").write_text("")
    write(tmp_path / "train/stray.png", (0, 0, 0))
    with pytest.warns(UserWarning, match=r"2 files under .* are ignored, for instance"):
        assert load_data(folder_spec(tmp_path)).info.sizes["train"] == 12


def test_images_in_folders_of_a_class_belong_to_it(tmp_path: Path) -> None:
    write(write_d2(tmp_path) / "train/b/more/deep/1.png", (0, 0, 0))
    assert load_data(folder_spec(tmp_path)).info.class_counts == (4, 5, 4)


def test_empty_class_folders_are_named(tmp_path: Path) -> None:
    write_d2(tmp_path)
    for name in ("d", "e"):
        (tmp_path / "train" / name).mkdir()
    with pytest.raises(DataError, match=re.escape(f"No image lies in {tmp_path}/train/d, {tmp_path}/train/e")):
        load_data(folder_spec(tmp_path))


def test_a_missing_root_is_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        load_data(folder_spec(Path("photos")))
    assert str(caught.value).startswith(f"There is no folder {tmp_path}/photos.\n  Set `root` under `data`")


@pytest.mark.parametrize(
    ("folders", "words"),
    [
        pytest.param(["val/a", "test/a"], "has test, val, but no `train` folder", id="no train"),
        pytest.param([], "has no folder of a class", id="images without folders"),
    ],
)
def test_a_root_that_is_laid_out_otherwise_is_explained(tmp_path: Path, folders: list[str], words: str) -> None:
    write(tmp_path / "1.png", (0, 0, 0))
    for folder in folders:
        write(tmp_path / folder / "1.png", (0, 0, 0))
    with pytest.raises(DataError) as caught:
        load_data(folder_spec(tmp_path))
    assert words in str(caught.value)


def test_the_digest_follows_names_and_bytes_and_not_the_place(tmp_path: Path) -> None:
    digests = [load_data(folder_spec(write_d2(tmp_path / name))).info.digest for name in ("one", "two")]
    assert digests[0] == digests[1]
    assert len(digests[0]) == 16
    (tmp_path / "one/val/a/0.png").rename(tmp_path / "one/val/a/7.png")
    write_noise(tmp_path / "two/val/a/0.png", 1)
    digests += [load_data(folder_spec(tmp_path / name)).info.digest for name in ("one", "two")]
    assert len(set(digests)) == 3


def test_all_targets_are_known_without_reading_files(tmp_path: Path) -> None:
    data = load_data(folder_spec(write_d2(tmp_path)))
    for path in tmp_path.rglob("*.png"):
        path.unlink()
    assert targets_of(data.splits.train).tolist() == [0] * 4 + [1] * 4 + [2] * 4
    with pytest.raises(DataError, match=r"train/a/0\.png was readable when the data was loaded"):
        first_batch(data, 1)


def test_augmentation_is_checked_when_the_data_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_data(folder_spec(write_d2(tmp_path), augment=["random_crop", "random_flip"]))
    assert caught.value.fault.path == ("data", "augment", 1)


def test_a_link_to_a_folder_above_gives_no_file_twice(tmp_path: Path) -> None:
    write_d2(tmp_path)
    root = tmp_path / "train"
    (root / "a" / "again").symlink_to("..", target_is_directory=True)
    (root / "b" / "itself").symlink_to(".", target_is_directory=True)
    assert load_data(folder_spec(root, val_fraction=0.25)).info.sizes == {"train": 9, "val": 3}


@pytest.mark.parametrize(("train", "val"), [("Train", "Val"), ("TRAIN", "VALIDATION")])
def test_folders_of_splits_may_be_written_in_capitals(tmp_path: Path, train: str, val: str) -> None:
    write_d2(tmp_path)
    (tmp_path / "train").rename(tmp_path / train)
    (tmp_path / "val").rename(tmp_path / val)
    info = load_data(folder_spec(tmp_path)).info
    assert (info.class_names, info.sizes) == (("a", "b", "c"), {"train": 12, "val": 6})


def test_a_folder_beside_the_splits_is_named(tmp_path: Path) -> None:
    write_d2(tmp_path)
    write_noise(tmp_path / "cats" / "1.png", seed=0)
    with pytest.warns(UserWarning, match="cats beside .*/train is no split, and is not looked at"):
        assert load_data(folder_spec(tmp_path)).info.sizes == {"train": 12, "val": 6}


def test_validation_data_without_a_readable_image_is_an_error_even_with_skip(tmp_path: Path) -> None:
    write_d2(tmp_path)
    for path in (tmp_path / "val").rglob("*.png"):
        path.write_bytes(b"no picture")
    with pytest.warns(UserWarning, match="val: 6 skipped, 0 used"), pytest.raises(DataError, match="of the val data"):
        load_data(folder_spec(tmp_path, on_bad_file="skip"))


def test_an_unreadable_image_is_told_in_the_same_words_every_time(tmp_path: Path) -> None:
    write_d2(tmp_path)
    bad = tmp_path / "train" / "a" / "0.png"
    bad.write_bytes(b"no picture")
    with pytest.raises(DataError) as caught:
        load_data(folder_spec(tmp_path))
    assert f"\n  {bad}: UnidentifiedImageError: cannot identify image file\n" in str(caught.value)
