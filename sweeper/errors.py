"""The error tree. A `SweeperError` is a fault its reader can mend: it is printed without a traceback.

Everything else that escapes is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

from dataclasses import dataclass


class SweeperError(Exception):
    """A fault the user can mend. The message says where, what with its value, and what to do. Exit code 1."""

    exit_code = 1


@dataclass(frozen=True)
class Fault:
    """One thing wrong at one key of the study file.

    `path` is the key path, for instance `("search_space", "lr", "low")`; an integer is a place in a list.
    `what` continues the sentence "search_space.lr.low: ..."; `todo` is a sentence of its own.
    """

    path: tuple[str | int, ...]
    what: str
    todo: str


class StudyFileError(SweeperError):
    """Everything that is wrong with a study file, all at once; the text carries `file:line` for each fault."""

    def __init__(self, text: str, faults: list[Fault]) -> None:
        super().__init__(text)
        self.faults = faults


class SpecError(SweeperError):
    """A value that a part (a model, a data source, an optimizer) cannot use, known only once that part looked.

    Raised by the parts with the key path of the study file; whoever knows the file adds `file:line`.
    """

    def __init__(self, path: tuple[str | int, ...], what: str, todo: str) -> None:
        self.fault = Fault(path, what, todo)
        super().__init__(f"{'.'.join(map(str, path))}: {what}\n  {todo}")


class SpecErrors(SweeperError):
    """Several values that parts cannot use, found in one look."""

    def __init__(self, errors: list[SpecError]) -> None:
        super().__init__("\n".join(map(str, errors)))
        self.faults = [error.fault for error in errors]


class DataError(SweeperError):
    """The data cannot be used: a file, a class or a label is named."""


class StorageError(SweeperError):
    """A database, folder or checkpoint cannot be read or written, or holds something else than expected."""


class DatabaseError(StorageError):
    """The study's database does not answer. The trial in hand is not at fault: it is released, and continues later."""


class StudyChangedError(SweeperError):
    """The study file differs from the stored study in a section that must not change."""


class TooManyFailuresError(SweeperError):
    """More trials failed than `budget.max_failures` allows."""

    exit_code = 3


class CheckpointError(SweeperError):
    """No usable checkpoint. `trial.py` ends the trial as FAIL and enqueues its parameters again."""


class LostTrialError(Exception):
    """This worker no longer owns its trial: it writes nothing more and takes new work. Never shown to a user."""


class DivergedError(Exception):
    """Training cannot go on: a non-finite loss, weight or buffer, or 20 skipped steps in a row. Ends the trial."""


class StalledError(Exception):
    """Nothing moved for `train.stall_timeout_s`. Ends the trial as failed, with the place where it hung."""


class InterruptedNow(BaseException):
    """SIGTERM, SIGHUP or a second Ctrl-C: release the trial and leave. Passes through `except Exception`."""

    def __init__(self, signal_name: str) -> None:
        super().__init__(signal_name)
        self.signal_name = signal_name
