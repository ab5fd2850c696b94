"""The process beside the worker that replays its spool to MLflow: `python -m sweeper.tracking.writer FOLDER`.

Its standard input is the settings as one line, then nothing until the worker is done (a byte) or dead (the end).
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import IO, Any

from filelock import Timeout

from sweeper.tracking.delivery import Delivery, Refused
from sweeper.tracking.experiment import Unreachable
from sweeper.tracking.folder import SpoolFolder, append_value, read_values, spool_folders
from sweeper.tracking.settings import TrackingSettings
from sweeper.tracking.spool import EXIT_UNDELIVERED
from sweeper.tracking.texts import redact

LOOK_EVERY_S = 0.2
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
PATIENCE_S = 20.0  # without a worker and without an answer
OTHER_WRITER_S = 30.0  # a dead worker's writer needs no longer to end
ORPHANED = ".runs"  # a report without a worker, beside the folders of the spool
TRIES_BEFORE_WORDS = 3  # a short hiccup is not worth a sentence


class GaveUp(Exception):
    """The worker is gone and MLflow does not answer."""


class Worker:
    """The process that started this one. `gone` is set when it closes or dies; then `died` says which."""

    def __init__(self, standard_input: IO[bytes]) -> None:
        self.gone = threading.Event()
        self.died = False
        self._standard_input = standard_input
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        self.died = self._standard_input.read(1) == b""
        self.gone.set()


class Writer:
    """`own` is the spool of the worker that started this process."""

    def __init__(self, own: SpoolFolder, settings: TrackingSettings, worker: Worker) -> None:
        self.own, self.worker = own, worker
        self.delivery = Delivery(settings, own.path.parent, self._report_run, self._report_parent)
        self.said: set[str] = set()

    def run(self) -> None:
        """Raises `GaveUp` or `filelock.Timeout`; everything is delivered otherwise."""
        with self.own.writer_lock().acquire(timeout=OTHER_WRITER_S):
            for folder in self._others():
                self._finish_dead(folder)
            self._know_runs(self.own.report)
            for orphaned in self.own.path.parent.glob(f"*{ORPHANED}"):
                self._tell_runs(orphaned)
                orphaned.unlink(missing_ok=True)
            while True:
                gone = self.worker.gone.is_set()  # asked first: then nothing is appended after the look
                self._replay(self.own)
                if gone:
                    break
                self.worker.gone.wait(LOOK_EVERY_S)
        if self.worker.died:  # one that closes removes its spool itself
            self._finish_dead(self.own)

    def _others(self) -> list[SpoolFolder]:
        return [folder for folder in spool_folders(self.own.path.parent) if folder != self.own]

    def _finish_dead(self, folder: SpoolFolder) -> None:
        """Deliver what a dead worker left, close what it left open, and remove its spool. A living worker has a writer
        of its own and is let alone."""
        try:
            with folder.worker_lock().acquire(timeout=1), folder.writer_lock().acquire(timeout=OTHER_WRITER_S):
                if folder.events.exists():
                    self._know_runs(folder.report)
                    self._replay(folder)
                    others_run = folder != self.own or any(other.is_alive() for other in self._others())
                    for event in _left_open(folder, with_study=not others_run):
                        self._insist(event)
                    self._hand_on_runs(folder)
                    folder.events.unlink()
        except Timeout:
            return
        folder.remove()

    def _know_runs(self, report: Path) -> dict[int, str]:
        """Runs that a writer reported."""
        said = [value for value, _ in read_values(report, 0) if value is not None]
        runs = {value["number"]: value["run"] for value in said if "run" in value}
        self.delivery.runs.update(runs)
        return runs

    def _tell_runs(self, report: Path) -> None:
        for number, run_id in self._know_runs(report).items():
            self._report_run(number, run_id)

    def _hand_on_runs(self, folder: SpoolFolder) -> None:
        """A dead worker may not have heard of its runs: tell ours, or, if it was ours, leave it to the next writer."""
        if folder != self.own:
            self._tell_runs(folder.report)
        elif folder.report.exists():
            folder.report.replace(folder.path.with_name(folder.path.name + ORPHANED))

    def _replay(self, folder: SpoolFolder) -> None:
        for event, end in read_values(folder.events, folder.load_cursor()):
            if event is None:
                self._reject({}, f"A line of {folder.events} cannot be read.")
            else:
                self._insist(event)
            folder.save_cursor(end)

    def _insist(self, event: dict[str, Any]) -> None:
        """Deliver one event before any other, however long MLflow is away; without a worker only for a while."""
        pause_s, tries, gone_since = SHORTEST_PAUSE_S, 0, None
        while True:
            try:
                return self.delivery.deliver(event)
            except Refused as refusal:
                return self._reject(event, str(refusal))
            except Unreachable as outage:
                tries += 1
                print(redact(traceback.format_exc()), file=sys.stderr, flush=True)
                if tries == TRIES_BEFORE_WORDS or self.worker.gone.is_set():
                    self._say(str(outage))
            if self.worker.gone.is_set():
                gone_since = gone_since or time.monotonic()
                if time.monotonic() - gone_since > PATIENCE_S:
                    raise GaveUp
                time.sleep(SHORTEST_PAUSE_S)
            else:
                self.worker.gone.wait(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _reject(self, event: dict[str, Any], reason: str) -> None:
        append_value(self.own.path.parent / "rejected.jsonl", {"reason": reason, "event": event})
        self._say(reason)

    def _report_run(self, number: int, run_id: str) -> None:
        append_value(self.own.report, {"number": number, "run": run_id})

    def _report_parent(self, experiment_id: str, run_id: str) -> None:
        append_value(self.own.report, {"experiment": experiment_id, "parent": run_id})

    def _say(self, sentence: str) -> None:
        if sentence not in self.said:
            self.said.add(sentence)
            append_value(self.own.report, {"problem": sentence})


def _left_open(folder: SpoolFolder, with_study: bool) -> list[dict[str, Any]]:
    """Endings, as of its last event, for what a dead worker began and did not end: trials, perhaps the study."""
    trials: set[int] = set()
    study, at_ms = False, 0
    for event, _ in read_values(folder.events, 0):
        if event is None:
            continue
        at_ms = event["at_ms"]
        if event["event"] == "trial_started":
            trials.add(event["number"])
        elif event["event"] == "trial_finished":
            trials.discard(event["number"])
        elif event["event"] in ("study_started", "study_finished"):
            study = event["event"] == "study_started"
    tags = {"stop_reason": "interrupted"}
    killed = {"status": "KILLED", "at_ms": at_ms}
    endings = [{"event": "trial_finished", "number": number, "tags": tags, **killed} for number in sorted(trials)]
    if study and with_study:
        endings.append({"event": "study_finished", "tags": {}, "metrics": {}, **killed})
    return endings


def main() -> int:
    own = SpoolFolder(Path(sys.argv[1]))
    # Unbuffered, and not sys.stdin: a thread that waits in its buffer would hold up the end of the interpreter.
    standard_input = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115
    settings_line = standard_input.readline()
    if not settings_line.endswith(b"\n"):
        return EXIT_UNDELIVERED  # the worker died at once
    try:
        Writer(own, TrackingSettings.from_json(json.loads(settings_line)), Worker(standard_input)).run()
    except (GaveUp, Timeout):
        return EXIT_UNDELIVERED
    return 0


if __name__ == "__main__":
    sys.exit(main())
