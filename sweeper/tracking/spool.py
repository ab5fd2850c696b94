"""The worker's side of tracking: append and go on. Nothing here waits for MLflow or imports it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

from sweeper.records import EpochRecord
from sweeper.tracking.folder import SpoolFolder, read_values, spool_folders
from sweeper.tracking.settings import TrackingSettings
from sweeper.tracking.texts import as_text

Status = Literal["FINISHED", "FAILED", "KILLED"]
Files = Sequence[tuple[Path, str]]

MAX_STARTS = 4
CLOSE_POLL_S = 0.2
EXIT_UNDELIVERED = 3
WRITER_DEFAULTS = {
    # The writer has its own patience; MLflow's would hold up a close for minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
WRITER_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class Tracker:
    """Between `start` and `close`, each method appends one event to the spool and returns at once.

    A file handed over as an artifact is read later: it must stay where it is. Passwords in URLs are struck out of
    params, tags and text files. A full disk or a dead writer never raises; `problems` tells.
    """

    def __init__(self, spool_dir: Path, settings: TrackingSettings) -> None:
        self.spool_dir = spool_dir.absolute()
        self._settings = settings
        self._folder = SpoolFolder(self.spool_dir / f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}")
        self._alive = self._folder.worker_lock()
        self._events: IO[bytes] | None = None
        self._writer: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._torn = False
        self._read_to = 0
        self._run_ids: dict[int, str] = {}
        self._parent: tuple[str | None, str | None] = (None, None)
        self._problems: list[str] = []

    def start(self) -> None:
        """Open the spool and start the writer, which first delivers what dead processes left in `spool_dir`."""
        self._folder.path.mkdir(parents=True)
        self._alive.acquire()
        self._events = self._folder.events.open("ab", buffering=0)
        self._keep_writer()

    def study_started(self, tags: Mapping[str, Any], artifacts: Files = ()) -> None:
        self._append("study_started", tags=_texts(tags))
        for path, name in artifacts:
            self._append("artifact", number=None, path=os.path.abspath(path), name=name)

    def trial_started(
        self,
        number: int,
        run_id: str | None,
        params: Mapping[str, Any],
        tags: Mapping[str, Any],
        dataset: Mapping[str, Any],
        artifacts: Files = (),
    ) -> None:
        """`run_id` is the trial's run, where an earlier attempt has one. `dataset` holds `name`, `digest`, `source`,
        `source_type` and anything else worth keeping with them."""
        self._append(
            "trial_started",
            number=number,
            run_id=run_id,
            params=_texts(params),
            tags=_texts(tags),
            dataset=json.loads(as_text(dict(dataset))),
        )
        for path, name in artifacts:
            self.trial_artifact(number, path, name)

    def trial_record(self, number: int, record: EpochRecord) -> None:
        self._append("trial_record", number=number, record=record.to_json())

    def trial_artifact(self, number: int, path: Path, name: str) -> None:
        """`name` may hold folders: `best/best.pt`."""
        self._append("artifact", number=number, path=os.path.abspath(path), name=name)

    def trial_finished(self, number: int, status: Status, tags: Mapping[str, Any]) -> None:
        """The last event of a trial is on the disk before its result is told to anybody: nobody would send it again."""
        self._append("trial_finished", number=number, status=status, tags=_texts(tags))
        assert self._events is not None
        with contextlib.suppress(OSError):
            os.fsync(self._events.fileno())

    def study_finished(
        self, status: Status, tags: Mapping[str, Any], metrics: Mapping[str, float], measured_ms: int = 0, step: int = 0
    ) -> None:
        """`metrics` were measured at `measured_ms` by trial `step`: then a repeat adds nothing."""
        self._append(
            "study_finished",
            status=status,
            tags=_texts(tags),
            metrics=dict(metrics),
            measured_ms=measured_ms,
            step=step,
        )

    def leaves_last(self) -> bool:
        """Say that this worker is about to close; whether no other worker of this spool goes on. Two must not ask at
        the same time."""
        self._folder.leaving.touch()
        others = [folder for folder in spool_folders(self.spool_dir) if folder != self._folder]
        return not any(folder.is_alive() and not folder.leaving.exists() for folder in others)

    def new_run_ids(self) -> dict[int, str]:
        """Trial number -> run id, of the runs that the writer opened or found since the last call."""
        self._read_report()
        new, self._run_ids = self._run_ids, {}
        return new

    def parent_ids(self) -> tuple[str | None, str | None]:
        """(experiment id, parent run id), None as long as MLflow has not answered."""
        self._read_report()
        return self._parent

    def problems(self) -> list[str]:
        """Everything that went wrong so far, as sentences, each once."""
        self._read_report()
        return list(self._problems)

    def close(self, patience_s: Callable[[], float] = lambda: 60.0) -> bool:
        """Wait until MLflow has got everything; False when it has not, which leaves the spool for the next start.

        `patience_s` is asked again and again how long the wait may be in all: a signal may shorten it.
        """
        assert self._events is not None, "close() before start()"
        self._events.close()
        began = time.monotonic()
        code = None
        while code not in (0, EXIT_UNDELIVERED) and self._keep_writer():
            code = self._end_writer(lambda: began + patience_s() - time.monotonic())
        self._read_report()
        self._alive.release()
        if code == 0:
            self._folder.remove()
        return code == 0

    def _append(self, event: str, **values: Any) -> None:
        assert self._events is not None, f"{event} before start()"
        line = json.dumps({"event": event, "at_ms": time.time_ns() // 1_000_000, **values}).encode() + b"\n"
        if self._torn:
            line = b"\n" + line
        try:
            self._torn = self._events.write(line) != len(line)
        except OSError as error:
            self._torn = True
            self._add_problem(f"MLflow misses values, because {self._folder.events} cannot be written: {error}.")
        self._keep_writer()

    def _keep_writer(self) -> bool:
        """Start the writer, or start it again if it died. False when it has died too often."""
        if self._writer is not None and self._writer.poll() is None:
            return True
        if self._starts == MAX_STARTS:
            self._add_problem(f"What writes to MLflow died {MAX_STARTS} times; see {self._folder.log}.")
            return False
        self._starts += 1
        try:
            self._writer = self._start_writer()
        except OSError as error:
            self._add_problem(f"What writes to MLflow cannot be started: {error}.")
            return False
        # Through the pipe, because every user of the machine can read a command line, and the URI may hold a password.
        self._tell_writer(json.dumps(self._settings.to_json()).encode() + b"\n")
        return True

    def _start_writer(self) -> subprocess.Popen[bytes]:
        with self._folder.log.open("ab") as log:
            return subprocess.Popen(
                # -P: a file `queue.py` in the user's working directory must not replace Python's own.
                [sys.executable, "-P", "-m", "sweeper.tracking.writer", self._folder.path],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                # MLflow puts its working directory into SQL as it stands, and breaks on a quote in its name.
                cwd="/" if "'" in os.getcwd() else None,
                env={**WRITER_DEFAULTS, **os.environ, **WRITER_ENVIRONMENT},
                start_new_session=True,  # Ctrl-C in the terminal must not reach it
            )

    def _tell_writer(self, line: bytes) -> None:
        assert self._writer is not None
        assert self._writer.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died; the next look starts it again
            self._writer.stdin.write(line)
            self._writer.stdin.flush()

    def _end_writer(self, time_left_s: Callable[[], float]) -> int | None:
        """Its exit code; it is stopped when no time is left.

        The end is said, not only shown by closing the pipe: loader workers forked from this process may hold it open.
        """
        assert self._writer is not None
        self._tell_writer(b"end\n")
        while (left_s := time_left_s()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._writer.wait(min(left_s, CLOSE_POLL_S))
        self._writer.kill()
        self._writer.wait()
        return EXIT_UNDELIVERED

    def _read_report(self) -> None:
        for said, end in read_values(self._folder.report, self._read_to):
            self._read_to = end
            if said is None:
                continue  # torn by a kill or a full disk
            if "run" in said:
                self._run_ids[said["number"]] = said["run"]
            elif "parent" in said:
                self._parent = (said["experiment"], said["parent"])
            else:
                self._add_problem(said["problem"])

    def _add_problem(self, sentence: str) -> None:
        if sentence not in self._problems:
            self._problems.append(sentence)


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: as_text(value) for name, value in values.items()}
