from __future__ import annotations

import gzip
import hashlib
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision import datasets

from sweeper.data import load_data, targets_of
from sweeper.errors import DataError
from sweeper.spec import DataSpec


def spec(root: Path, dataset: str, **values: Any) -> DataSpec:
    return DataSpec.model_validate({"source": "torchvision", "dataset": dataset, "root": str(root), **values})


def idx(values: np.ndarray) -> bytes:
    """The IDX format of MNIST: two zero bytes, type 8 (unsigned byte), rank, sizes as big-endian ints, the bytes."""
    return struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.astype(np.uint8).tobytes()


def mnist_files() -> dict[str, bytes]:
    """20 training and 4 test pictures of 28x28; each is filled with its own number, labels go round 0 to 9."""
    files = {}
    for part, count in (("train", 20), ("t10k", 4)):
        pictures = np.arange(count, dtype=np.uint8)[:, None, None] * np.ones((1, 28, 28), np.uint8)
        files[f"{part}-images-idx3-ubyte"] = idx(pictures)
        files[f"{part}-labels-idx1-ubyte"] = idx(np.arange(count) % 10)
    return files


def write_cifar(root: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """2 pictures in each batch file, byte i of a picture being i * place mod 256; torchvision's table of checksums
    then holds those of the small files, so that the check itself still runs."""
    small: Any = getattr(datasets, name)
    labels, key = ("labels", "label_names") if name == "CIFAR10" else ("fine_labels", "fine_label_names")
    classes = [f"class {place}" for place in range(10 if name == "CIFAR10" else 100)]
    folder = root / small.base_folder
    folder.mkdir(parents=True)
    place = 0

    def write(file_name: str, content: dict[str, Any]) -> str:
        dumped = pickle.dumps(content, protocol=2)
        (folder / file_name).write_bytes(dumped)
        return hashlib.md5(dumped).hexdigest()

    tables: dict[str, list[list[str]]] = {"train_list": [], "test_list": []}
    for table, entries in tables.items():
        for file_name, _ in getattr(small, table):
            rows = np.arange(3072)[None, :] * np.array([[place], [place + 1]]) % 256
            entries.append([file_name, write(file_name, {"data": rows.astype(np.uint8), labels: [place, place + 1]})])
            place += 2
        monkeypatch.setattr(small, table, entries)
    monkeypatch.setattr(small, "meta", {**small.meta, "md5": write(small.meta["filename"], {key: classes})})


@pytest.mark.parametrize("name", ["MNIST", "FashionMNIST"])
@pytest.mark.filterwarnings("ignore:the val data has no sample")
def test_idx_files_are_read_as_they_are(tmp_path: Path, name: str) -> None:
    raw = tmp_path / name / "raw"
    raw.mkdir(parents=True)
    for file_name, content in mnist_files().items():
        (raw / file_name).write_bytes(content)
    data = load_data(spec(tmp_path, name, val_fraction=0.5))
    info = data.info
    assert (info.name, info.input_shape, info.input_dtype, info.num_outputs) == (name, (1, 28, 28), "float32", 10)
    assert info.sizes == {"train": 10, "val": 10, "test": 4}
    assert info.class_counts == (1,) * 10
    assert info.class_names[0] == ("0 - zero" if name == "MNIST" else "T-shirt/top")
    assert targets_of(data.splits.test).tolist() == [0, 1, 2, 3]
    pictures = data.splits.test.__getitems__([3, 1])[0]  # type: ignore[union-attr]
    assert pictures[:, 0, 5, 5].tolist() == pytest.approx([(3 / 255 - 0.5) / 0.5, (1 / 255 - 0.5) / 0.5])


@pytest.mark.parametrize(("name", "train", "test"), [("CIFAR10", 10, [10, 11]), ("CIFAR100", 2, [2, 3])])
@pytest.mark.filterwarnings("ignore:the (train|val) data has no sample")
def test_cifar_pickles_are_read_and_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, train: int, test: list[int]
) -> None:
    write_cifar(tmp_path, monkeypatch, name)
    if name == "CIFAR10":  # its labels 10 and 11 of the test file have no name
        with pytest.raises(DataError, match="names 10 classes, but its labels go up to 11"):
            load_data(spec(tmp_path, name))
        return
    data = load_data(spec(tmp_path, name, val_fraction=0.5))
    assert data.info.input_shape == (3, 32, 32)
    assert data.info.num_outputs == 100
    assert data.info.class_names[99] == "class 99"
    assert data.info.sizes == {"train": 1, "val": 1, "test": 2}
    assert targets_of(data.splits.test).tolist() == test
    picture, _ = data.splits.test[1]  # type: ignore[index]
    # Files hold channel after channel, row after row: place 1024 * channel + 32 * row + column.
    byte = (1024 * 2 + 32 * 5 + 7) * 3 % 256
    assert float(picture[2, 5, 7]) == pytest.approx((byte / 255 - 0.5) / 0.5)


def test_a_damaged_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path, monkeypatch, "CIFAR100")
    with (tmp_path / "cifar-100-python" / "train").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match="its files are incomplete or damaged"):
        load_data(spec(tmp_path, "CIFAR100"))


@pytest.mark.filterwarnings("ignore:the val data has no sample")
def test_packed_files_that_are_there_are_not_downloaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    resources = []
    for file_name, content in mnist_files().items():
        packed = gzip.compress(content)
        (raw / f"{file_name}.gz").write_bytes(packed)
        resources.append((f"{file_name}.gz", hashlib.md5(packed).hexdigest()))
    monkeypatch.setattr(datasets.MNIST, "resources", resources)
    monkeypatch.setattr(datasets.MNIST, "mirrors", [])
    with pytest.raises(DataError, match="Write `download: true`"):
        load_data(spec(tmp_path, "MNIST"))
    monkeypatch.setattr(datasets.MNIST, "mirrors", [(tmp_path / "nowhere").as_uri() + "/"])
    assert load_data(spec(tmp_path, "MNIST", download=True)).info.sizes == {"train": 16, "val": 4, "test": 4}


@pytest.mark.parametrize("name", ["MNIST", "FashionMNIST", "CIFAR10", "CIFAR100"])
def test_missing_files_are_said_with_the_folder_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        load_data(spec(Path("data"), name))
    text = str(caught.value)
    assert text.startswith(f"{name} is not under {tmp_path}/data (there is no such folder)")
    assert "Write `download: true` under `data`" in text
    assert not (tmp_path / "data").exists()


def test_a_download_that_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.MNIST, "mirrors", [(tmp_path / "nowhere").as_uri() + "/"])
    with pytest.raises(DataError, match=rf"MNIST cannot be downloaded to {tmp_path}/data: .*train-images"):
        load_data(spec(tmp_path / "data", "MNIST", download=True))


@pytest.mark.filterwarnings("ignore:the val data has no sample")
def test_pictures_are_kept_as_bytes(tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for file_name, content in mnist_files().items():
        (raw / file_name).write_bytes(content)
    train: Any = load_data(spec(tmp_path, "MNIST")).splits.train
    assert train.inputs.dtype == torch.uint8
    assert train[0][0].dtype == torch.float32


@pytest.mark.parametrize(
    ("file", "content"),
    [
        pytest.param("train-images-idx3-ubyte", b"", id="empty"),
        pytest.param("train-images-idx3-ubyte", b"<html><body>404 Not Found</body></html>", id="a web page"),
        pytest.param("train-labels-idx1-ubyte", idx(np.arange(19) % 10), id="a label missing"),
        pytest.param("train-images-idx3-ubyte", idx(np.zeros((20, 28, 28)))[:-100], id="truncated"),
    ],
)
def test_files_that_are_damaged_in_any_way_are_said_so(tmp_path: Path, file: str, content: bytes) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, sound in mnist_files().items():
        (raw / name).write_bytes(content if name == file else sound)
    with pytest.raises(DataError, match=r"MNIST is not under .* or its files are incomplete or damaged"):
        load_data(spec(tmp_path, "MNIST"))
