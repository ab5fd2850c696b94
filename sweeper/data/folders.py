"""Which files of a folder are which class of which split. Hidden files and folders are not looked at."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sweeper.data.images import SUFFIXES
from sweeper.errors import DataError

SPLIT_FOLDERS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}


@dataclass(frozen=True)
class Found:
    """One image file; `name` is its path relative to the root, with slashes; `target` its training class."""

    path: Path
    name: str
    split: str
    target: int


def find_files(root: Path) -> tuple[list[str], list[Found]]:
    """The training classes in order of their names, and all images, in order of their names within each split.

    A class has the same index in every split: its place among the training classes. Raises `DataError` for a
    missing folder, an empty class, or a validation or test class that training does not know.
    """
    if not root.is_dir():
        raise DataError(
            f"There is no folder {root}.\n"
            "  Set `root` under `data` to the folder of your images; it is relative to where the command is started."
        )
    folders = _split_folders(root)
    classes = [folder.name for folder in _class_folders(folders["train"])]
    if not classes:
        raise DataError(
            f"{folders['train']} has no folder of a class.\n"
            "  Put the images of each class into a folder of their own, as in `root/cat/1.png`."
        )
    ignored: list[Path] = []
    found = []
    for split, folder in folders.items():
        _refuse_unknown(split, folder, classes)
        found += _files_of_split(root, split, folder, classes, ignored)
    if ignored:
        warnings.warn(
            f"{len(ignored)} files under {root} lie outside the class folders or have no image suffix, and are "
            f"ignored, for instance {ignored[0].relative_to(root)}",
            stacklevel=4,
        )
    return classes, found


def _split_folders(root: Path) -> dict[str, Path]:
    """`train`, `val`, `test` to their folders; `train` is the root itself when nothing is split.

    A folder of a split holds class folders. So a class named `train`, of trains, is a class.
    """
    splits: dict[str, Path] = {}
    others: list[str] = []
    for folder in _visible(root):
        split = SPLIT_FOLDERS.get(folder.name.lower())
        if not folder.is_dir():
            continue
        if split is None or not _class_folders(folder):
            others.append(folder.name)
            continue
        if split in splits:
            raise DataError(f"{splits[split]} and {folder} both look like the {split} data.\n  Keep one of them.")
        splits[split] = folder
    if not splits:
        return {"train": root}
    if "train" not in splits:
        names = ", ".join(folder.name for folder in splits.values())
        raise DataError(f"{root} has {names}, but no `train` folder with class folders beside it.\n  Add it.")
    if others:
        warnings.warn(f"{', '.join(others)} beside {splits['train']} is no split, and is not looked at", stacklevel=5)
    return {split: splits[split] for split in ("train", "val", "test") if split in splits}


def _refuse_unknown(split: str, folder: Path, classes: list[str]) -> None:
    unknown = [name for name in (child.name for child in _class_folders(folder)) if name not in classes]
    if unknown:
        raise DataError(
            f"{folder} has the classes {', '.join(unknown)}, which the training data does not: {', '.join(classes)}.\n"
            f"  Add them to the training data, or remove them from the {split} data."
        )


def _files_of_split(root: Path, split: str, folder: Path, classes: list[str], ignored: list[Path]) -> list[Found]:
    found = []
    empty = []
    for child in _visible(folder):
        if not child.is_dir():
            ignored.append(child)
            continue
        files = list(_walk(child, above=(root.resolve(), folder.resolve())))
        images = [path for path in files if path.suffix.lower() in SUFFIXES]
        ignored += [path for path in files if path.suffix.lower() not in SUFFIXES]
        target = classes.index(child.name)
        found += [Found(path, path.relative_to(root).as_posix(), split, target) for path in images]
        if not images:
            empty.append(str(child))
    if empty:
        raise DataError(f"No image lies in {', '.join(empty)}.\n  Put images there, or remove the empty folders.")
    return found


def _visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _class_folders(folder: Path) -> list[Path]:
    return [path for path in _visible(folder) if path.is_dir()]


def _walk(folder: Path, above: tuple[Path, ...]) -> Iterator[Path]:
    """All files below. A link back to a folder `above` it is not followed: it would give the same files again."""
    real = folder.resolve()
    if real in above:
        return
    for path in _visible(folder):
        if path.is_dir():
            yield from _walk(path, (*above, real))
        else:
            yield path
