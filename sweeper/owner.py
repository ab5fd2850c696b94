"""Who runs a trial: one process, told apart from every other, now and after a restart of the machine."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil


@dataclass(frozen=True)
class Owner:
    """One process that runs trials.

    `boot_id` and `pid_namespace` are empty where the system has none (only Linux has them). `start_time` is the
    process's start: clock ticks since boot on Linux, which no correction of the clock moves, else seconds since 1970.
    `token` tells two owners of one process apart.
    """

    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    start_time: str
    token: str

    @classmethod
    def current(cls) -> Owner:
        """This process, as a new owner each time."""
        start_time = _start_time(os.getpid())
        assert start_time is not None, "a process that runs has a start time"
        return cls(*_place(), os.getpid(), start_time, uuid.uuid4().hex)

    def to_text(self) -> str:
        """Canonical JSON: equal owners have equal texts, so that the database can compare them."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> Owner:
        return cls(**json.loads(text))

    def is_dead(self) -> bool | None:
        """Whether the process has ended; None when that cannot be known from here (another host or PID namespace)."""
        host, boot_id, pid_namespace = _place()
        if self.host != host:
            return None
        if self.boot_id != boot_id:
            return True  # the machine was restarted since
        if self.pid_namespace != pid_namespace:
            return None
        try:
            return _start_time(self.pid) != self.start_time
        except PermissionError:
            return None


@contextlib.contextmanager
def this_process_only() -> Iterator[None]:
    """A child that code inside forks, and that comes back here as if it were its parent, ends at once."""
    pid = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != pid:
            _end_child(error)
        raise
    if os.getpid() != pid:
        _end_child(None)


def _end_child(error: BaseException | None) -> NoReturn:
    code = error.code if isinstance(error, SystemExit) else 0 if error is None else 1
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _place() -> tuple[str, str, str]:
    """Host, boot id and PID namespace: where a process id means something."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/pid")
    return (
        socket.gethostname(),
        boot_id.read_text().strip() if boot_id.exists() else "",
        os.readlink(namespace) if namespace.is_symlink() else "",
    )


def _start_time(pid: int) -> str | None:
    """When the process `pid` started; None when there is none, or only a zombie.

    Raises PermissionError when the system hides the process from this user.
    """
    if sys.platform != "linux":
        try:
            process = psutil.Process(pid)
            return None if process.status() == psutil.STATUS_ZOMBIE else repr(process.create_time())
        except psutil.NoSuchProcess:
            return None
        except psutil.AccessDenied as error:
            raise PermissionError(f"process {pid} is hidden") from error
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        # With /proc mounted as `hidepid` a living process of another user has no folder either.
        if psutil.pid_exists(pid):
            raise PermissionError(f"process {pid} is hidden") from None
        return None
    # proc_pid_stat(5): the name in parentheses may hold anything; after it come state (field 3) ... starttime (22).
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else fields[19]
