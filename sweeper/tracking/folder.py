"""One worker's spool on disk: what the worker and the writer agree on.

    events.jsonl   appended by the worker, one event a line; a last line without its end was torn by a kill
    cursor         how many bytes of it MLflow has got; replaced by the writer
    report.jsonl   appended by the writer: ids of runs it opened, problems
    writer.log     whatever the writer prints
    leaving        made by the worker when it has no more trials to run
    worker.lock    held as long as the worker lives
    writer.lock    held by the one process that replays the events

The folder goes when everything is delivered and its worker is done.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout


@dataclass(frozen=True)
class SpoolFolder:
    path: Path

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def report(self) -> Path:
        return self.path / "report.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "writer.log"

    @property
    def leaving(self) -> Path:
        return self.path / "leaving"

    def worker_lock(self) -> FileLock:
        return FileLock(self.path / "worker.lock")

    def writer_lock(self) -> FileLock:
        return FileLock(self.path / "writer.lock")

    def is_alive(self) -> bool:
        """Whether its worker lives."""
        try:
            with self.worker_lock().acquire(timeout=0):
                return False
        except Timeout:
            return True

    def load_cursor(self) -> int:
        """0 when it is unreadable: every event may be sent again."""
        try:
            return int((self.path / "cursor").read_text(encoding="ascii"))
        except (OSError, ValueError):
            return 0

    def save_cursor(self, offset: int) -> None:
        beside = self.path / "cursor.new"
        beside.write_text(str(offset), encoding="ascii")
        os.replace(beside, self.path / "cursor")

    def remove(self) -> None:
        """`events` first: a folder without it is nobody's leftover."""
        with contextlib.suppress(OSError):
            self.events.unlink()
        shutil.rmtree(self.path, ignore_errors=True)


def spool_folders(spool_dir: Path) -> list[SpoolFolder]:
    """All that hold events, the oldest first."""
    found = []
    for events in spool_dir.glob("*/events.jsonl"):
        with contextlib.suppress(FileNotFoundError):  # delivered and removed meanwhile
            found.append((events.stat().st_mtime_ns, events.parent))
    return [SpoolFolder(path) for _, path in sorted(found)]


def read_values(path: Path, offset: int) -> list[tuple[dict[str, Any] | None, int]]:
    """The complete lines from byte `offset` on, each with the offset of its end; None for one that was torn."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    values: list[tuple[dict[str, Any] | None, int]] = []
    for line in lines:
        offset += len(line) + 1
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        values.append((value if isinstance(value, dict) else None, offset))
    return values


def append_value(path: Path, value: dict[str, Any]) -> None:
    with path.open("ab") as file:
        file.write(json.dumps(value).encode() + b"\n")
