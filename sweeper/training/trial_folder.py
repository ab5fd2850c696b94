"""One trial's folder: its records, its last checkpoints and its best one.

    records.jsonl                  one `EpochRecord` a line, in the order of training
    last-0003.pt, last-0004.pt     everything needed to go on after that epoch
    best.pt                        the weights of the best validation, apart: nothing that is cleaned up removes it
    older-best.pt                  what was the best before, where the best itself could not be saved
    .last-0005.pt.1234.tmp         being written, or left behind by a kill

A checkpoint is written beside its final name, flushed to the disk and then renamed: whatever kills the process or the
machine, a final name holds a whole file, and the one before it is still there.
"""

from __future__ import annotations

import json
import os
import re
import threading
import warnings
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from sweeper.errors import CheckpointError, StorageError
from sweeper.records import EpochRecord
from sweeper.training.plain import to_plain

BEST_NAME = "best.pt"
OLDER_BEST_NAME = "older-best.pt"
SAVED_NAME = "checkpoints-saved"
_LAST_NAME = re.compile(r"last-(\d{4,})\.pt")


class TrialFolder:
    """`path` is created by the first write. `keep_last` is the number of `last` checkpoints left after the trial's
    end, 0 meaning the best one only; while the trial runs at least one is kept, to go on from.

    Every write raises `StorageError` when the disk is full or read-only; what was there before is then untouched.
    """

    def __init__(self, path: Path, keep_last: int) -> None:
        self.path = path
        self.keep_last = keep_last

    @property
    def best_path(self) -> Path:
        return self.path / BEST_NAME

    @property
    def records_path(self) -> Path:
        return self.path / "records.jsonl"

    def append_record(self, record: EpochRecord) -> None:
        """Add `record` to the file, and to the disk. A torn last line, left by a kill, is cut off first."""
        line = json.dumps(record.to_json()).encode() + b"\n"  # NaN and Infinity, as Python's json reads them back
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            is_new = not self.records_path.exists()
            with open(self.records_path, "ab+") as file:
                file.seek(0)
                file.truncate(len(_whole_lines(file.read())))
                file.write(line)
                _to_disk(file)
            if is_new:
                _folder_to_disk(self.path)
        except OSError as error:
            raise _storage_error(
                f"The record of validation {record.validation}", self.path, len(line), error
            ) from error

    def records(self) -> list[EpochRecord]:
        """All whole records, oldest first; each validation once.

        Raises `StorageError` for a broken line before the last one: that is no kill, but damage.
        """
        try:
            content = _whole_lines(self.records_path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise StorageError(f"{self.records_path} cannot be read: {error.strerror}") from error
        records = []
        for number, line in enumerate(content.splitlines(), start=1):
            if (record := _parse(line)) is None:
                raise StorageError(
                    f"{self.records_path}:{number}: not a record of a validation: {line[:60]!r}\n"
                    "  The file was damaged or edited. Move the trial's folder away; the trial then counts as failed."
                )
            records.append(record)
        return records

    def save_last(self, state: dict[str, Any], epoch: int) -> Path:
        """Save what is needed to go on after `epoch`, then drop the older ones beyond `max(1, keep_last)`.

        Later ones go too: training went on from an earlier epoch because they could not be used.
        """
        saved = self._save(state, f"last-{epoch:04d}.pt")
        with suppress(OSError):  # the checkpoint is there, and that is what matters
            (self.path / SAVED_NAME).touch()
        epochs = self._last_epochs()
        kept = [other for other in epochs if other <= epoch][-max(1, self.keep_last) :]
        self._drop([other for other in epochs if other not in kept])
        return saved

    def load_last(self) -> dict[str, Any] | None:
        """The newest usable state, on the CPU; None if the trial never saved one.

        A damaged file is warned about and the one before it tried. Raises `CheckpointError` if none is usable.
        """
        faults = []
        for epoch in reversed(self._last_epochs()):
            try:
                return open_checkpoint(self._last_path(epoch))
            except CheckpointError as error:
                warnings.warn(f"{error}\n  Looking for an older one.", stacklevel=2)
                faults.append(str(error))
        if not faults:
            return None
        raise CheckpointError("The trial has no usable checkpoint to go on from:\n  " + "\n  ".join(faults))

    def has_saved(self) -> bool:
        """Whether a `last` checkpoint was ever saved: then there must be one."""
        return (self.path / SAVED_NAME).exists()

    def last_epoch(self) -> int | None:
        """The epoch of the newest `last` checkpoint, unopened; None if there is none."""
        return max(self._last_epochs(), default=None)

    def save_best(self, payload: dict[str, Any]) -> Path:
        """Save `payload`, a result of `best_payload`, in place of the best one so far.

        When that fails no `best.pt` is left: what stood there is no longer the best.
        """
        older = self.path / OLDER_BEST_NAME
        try:
            saved = self._save(payload, BEST_NAME)
        except StorageError:
            with suppress(OSError):
                os.replace(self.best_path, older)
            raise
        with suppress(OSError):
            older.unlink(missing_ok=True)
        return saved

    def finish(self) -> None:
        """After the trial's end: keep the best and `keep_last` of the last ones, and nothing half-written."""
        epochs = self._last_epochs()
        self._drop(epochs[: max(0, len(epochs) - self.keep_last)])
        self.sweep_temporaries()

    def only_to_go_on(self) -> list[Path]:
        """The files that a trial which has ended does not need: all but its best weights."""
        return [
            *map(self._last_path, self._last_epochs()),
            *self.path.glob(".*.pt.*.tmp"),
            *self.path.glob(OLDER_BEST_NAME),
        ]

    def sweep_temporaries(self) -> None:
        """Remove what kills left half-written. Only for the owner of the trial: another might be writing."""
        for temporary in self.path.glob(".*.pt.*.tmp"):
            with suppress(OSError):  # a disk that is read-only now
                temporary.unlink(missing_ok=True)

    def _last_path(self, epoch: int) -> Path:
        return self.path / f"last-{epoch:04d}.pt"

    def _last_epochs(self) -> list[int]:
        """The epochs that have a `last` checkpoint, oldest first."""
        names = (_LAST_NAME.fullmatch(path.name) for path in self.path.glob("last-*.pt"))
        return sorted(int(name[1]) for name in names if name)

    def _drop(self, epochs: list[int]) -> None:
        for epoch in epochs:
            with suppress(OSError):
                self._last_path(epoch).unlink(missing_ok=True)

    def _save(self, state: dict[str, Any], name: str) -> Path:
        final = self.path / name
        temporary = self.path / f".{name}.{os.getpid()}.tmp"
        num_bytes = 0
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with open(temporary, "wb") as file:
                sink = _Sink(file)
                _torch_save(to_plain(state), sink)
                num_bytes = sink.num_bytes
                if sink.error is not None:
                    raise sink.error
                _to_disk(file)
            os.replace(temporary, final)
            _folder_to_disk(self.path)
        except OSError as error:
            raise _storage_error(f"The checkpoint {name}", self.path, num_bytes, error) from error
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        return final


def open_checkpoint(path: Path) -> dict[str, Any]:
    """The dictionary saved at `path`, on the CPU. Raises `CheckpointError`, which names it, if it is damaged.

    The checksums are tested first: a flipped bit among the weights loads without any error.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise CheckpointError(f"{path}: damaged, the checksum of {damaged} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # torch raises at least five types for damaged files
        reason = next(iter(str(error).splitlines()), "")
        raise CheckpointError(f"{path}: not a usable checkpoint ({type(error).__name__}: {reason})") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: not a checkpoint of a trial, but a {type(state).__name__}")
    return state


class _Sink:
    """The file as `torch.save` sees it. After a failed write it only counts on, and keeps the error.

    An exception inside torch's writer would come out as a `RuntimeError` about positions; and a count to the end is
    what a full disk's message needs.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.num_bytes = 0
        self.error: OSError | None = None
        self._is_given_up = False

    def give_up(self) -> None:
        """Write nothing from here on: what is saved will not be wanted."""
        self._is_given_up = True

    def write(self, chunk: memoryview) -> int:
        self.num_bytes += len(chunk)
        if self.error is None and not self._is_given_up:
            try:
                self.file.write(chunk)
            except OSError as error:
                self.error = error
        return len(chunk)

    def flush(self) -> None:
        """Called by `torch.save`; the file is flushed by `_to_disk`."""


def _torch_save(state: Any, sink: _Sink) -> None:
    """`torch.save` in a thread of its own. A signal's exception, which only the main thread raises, would come up
    between the frames of torch's writer, and there it can abort the process.
    """
    done = threading.Event()
    errors: list[BaseException] = []

    def save() -> None:
        try:
            torch.save(state, sink)  # type: ignore[arg-type]
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=save, name="sweeper-save", daemon=True).start()
    try:
        done.wait()
    except BaseException:
        sink.give_up()
        done.wait()  # the file must not be closed under it
        raise
    try:
        for error in errors:
            raise error
    finally:
        errors.clear()  # its traceback holds this frame, and that the state


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _folder_to_disk(folder: Path) -> None:
    """Make a new name in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _storage_error(what: str, folder: Path, num_bytes: int, error: OSError) -> StorageError:
    size = f" It needs {num_bytes:,} bytes ({num_bytes / 2**20:.1f} MiB)." if num_bytes else ""
    return StorageError(
        f"{what} cannot be saved in {folder.absolute()}: {error.strerror or error}.{size}\n"
        "  Free some space there, or let checkpoints.dir name a folder that can be written to."
    )


def _whole_lines(content: bytes) -> bytes:
    """`content` without a torn end: an unfinished last line, or a last line that is no record."""
    whole = content[: content.rfind(b"\n") + 1]
    last = whole[whole.rfind(b"\n", 0, -1) + 1 :]
    return whole if not last or _parse(last) is not None else whole[: -len(last)]


def _parse(line: bytes) -> EpochRecord | None:
    try:
        return EpochRecord.from_json(json.loads(line))
    except (ValueError, TypeError):
        return None
