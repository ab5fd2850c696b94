"""The log of a trial: everything that the user's code prints, warns or logs while it runs."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO


@contextlib.contextmanager
def captured(path: Path) -> Iterator[None]:
    """Append to `path` what goes to stdout, stderr, `warnings` and `logging`. A full disk stops nothing."""
    log = _opened(path)
    handler = logging.StreamHandler(log)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log), warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.showwarning = _show_in(log)
            yield
    finally:
        root.removeHandler(handler)
        log.really_close()


def _show_in(log: TextIO) -> Callable[..., None]:
    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object) -> None:
        log.write(f"{filename}:{lineno}: {category.__name__}: {message}\n")

    return show


class _Log(io.TextIOWrapper):
    """A text file that loses what does not fit on the disk, instead of failing the trial that prints.

    A user's `sys.stdout.close()` does not close it, and a handler of theirs that keeps it writes into nothing once the
    trial is over.
    """

    def write(self, text: str) -> int:
        if not self.closed:
            with contextlib.suppress(OSError):
                super().write(text)
        return len(text)

    def flush(self) -> None:
        if not self.closed:
            super().flush()

    def close(self) -> None:
        pass

    def really_close(self) -> None:
        super().close()


def _opened(path: Path) -> _Log:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = io.FileIO(path, "a")
    except OSError as error:
        warnings.warn(f"{path} cannot be written ({error.strerror}): the trial has no log", stacklevel=3)
        raw = io.FileIO(os.devnull, "a")
    return _Log(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
