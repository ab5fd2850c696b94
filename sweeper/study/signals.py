"""Signals of one worker: Ctrl-C once finishes the epoch; twice, SIGTERM or SIGHUP leave at once."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

from sweeper.errors import InterruptedNow

HANDLED = ("SIGINT", "SIGTERM", "SIGHUP")
FIRST_CTRL_C = b"\nFinishing this epoch, then leaving. Ctrl-C again leaves at once.\n"


class StopSwitch:
    """A context manager for the main thread. `leaving` becomes True at the first Ctrl-C.

    The other signals raise `InterruptedNow` where the main thread stands; from then on all are ignored, so that the
    trial is released in good order.
    """

    def __init__(self) -> None:
        self.leaving = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSwitch:
        for name in HANDLED:
            if hasattr(signal, name):
                number = getattr(signal, name)
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and not self.leaving:
            self.leaving = True
            os.write(2, FIRST_CTRL_C)  # not through `sys.stderr`, which is the trial's log just now
            return
        self.leaving = True
        for other in self._before:
            signal.signal(other, signal.SIG_IGN)
        raise InterruptedNow(signal.Signals(number).name)
