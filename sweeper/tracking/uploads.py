"""What an artifact is called and what it may not show."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sweeper.tracking.texts import redact

TEXT_SUFFIXES = {".cfg", ".csv", ".ini", ".json", ".log", ".md", ".py", ".toml", ".txt", ".yaml", ".yml"}


@contextlib.contextmanager
def as_named(path: Path, name: str) -> Iterator[Path]:
    """The file under this name and, if it is a text, without passwords: itself where both hold, else a copy for the
    moment. Raises `OSError`."""
    text = path.read_bytes() if path.suffix in TEXT_SUFFIXES else b""
    clean = redact(text.decode("latin-1")).encode("latin-1")  # Latin-1 gives every byte back as it was
    if clean == text and path.name == name:
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, name)
        if clean == text:
            shutil.copyfile(path, copy)
        else:
            copy.write_bytes(clean)
        yield copy
