"""A trial in which nothing moves any more is ended: a step that never comes back must not hold up the study."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from sweeper.errors import StalledError


class StallWatch:
    """A context manager for the main thread: raises `StalledError` there when `moved` was not called for `timeout_s`.

    It is raised where the main thread stands, so that the traceback names what hangs; code that waits inside a C
    library which never returns to Python cannot be reached that way. `pause` stops the clock until the next `moved`.
    Does nothing in other threads, on systems without interval timers, and without a `timeout_s`.
    """

    def __init__(self, timeout_s: float | None) -> None:
        works = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
        self._timeout_s = timeout_s if works else None
        self._before: Any = None

    def __enter__(self) -> StallWatch:
        if self._timeout_s is not None:
            self._before = signal.signal(signal.SIGALRM, self._raise)
            self.moved()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._timeout_s is not None:
            self.pause()
            signal.signal(signal.SIGALRM, self._before)

    def moved(self) -> None:
        if self._timeout_s is not None:
            # Again and again, because the user's code may have swallowed the first one.
            signal.setitimer(signal.ITIMER_REAL, self._timeout_s, self._timeout_s)

    def pause(self) -> None:
        if self._timeout_s is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _raise(self, _number: int, _frame: FrameType | None) -> None:
        raise StalledError(f"nothing moved for {self._timeout_s:g} s (train.stall_timeout_s); it hung here")
