"""Signals: Ctrl-C once finishes the epoch; twice, SIGTERM or SIGHUP leave at once, with a word and exit code 130."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

from sweeper.errors import InterruptedNow

HANDLED = ("SIGINT", "SIGTERM", "SIGHUP")
FIRST_CTRL_C = "Finishing this epoch, then leaving. Ctrl-C again leaves at once."


@contextlib.contextmanager
def leaving_at_once() -> Iterator[None]:
    """SIGTERM and SIGHUP raise `InterruptedNow` in the main thread, as Ctrl-C raises KeyboardInterrupt."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise InterruptedNow(signal.Signals(number).name)

    before = _install(("SIGTERM", "SIGHUP"), leave)
    try:
        yield
    finally:
        _restore(before)


def _install(names: Iterable[str], handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """The handlers that stood before. An ignored SIGHUP stays ignored: that is what `nohup` is for."""
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    ignored = [n for n in numbers if n != signal.SIGINT and signal.getsignal(n) == signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in numbers if number not in ignored}


def _restore(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


class StopSwitch:
    """A context manager for the main thread. `leaving` becomes True at the first Ctrl-C.

    The other signals raise `InterruptedNow` where the main thread stands; from then on all are ignored, so that the
    trial is released in good order.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        """`tell` shows a line to whoever pressed Ctrl-C."""
        self.tell = tell
        self.leaving = False
        self._closing = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSwitch:
        self._before = _install(HANDLED, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        _restore(self._before)

    def close(self) -> None:
        """The work is over: from now on a signal raises nothing, and is seen as `leaving` only."""
        self._closing = True

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._closing:
            self.leaving = True
            return
        if number == signal.SIGINT and not self.leaving:
            self.leaving = True
            self.tell(FIRST_CTRL_C)
            return
        self.leaving = True
        for other in self._before:
            signal.signal(other, signal.SIG_IGN)
        if hasattr(signal, "SIGCHLD"):
            # torch raises in it when a loader worker dies, as it does of a signal to the whole group.
            self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        raise InterruptedNow(signal.Signals(number).name)
