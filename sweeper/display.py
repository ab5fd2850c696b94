"""What `sweep run` shows: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sweeper.records import ENDINGS, EpochRecord, TrialOutcome
from sweeper.spec import StudySpec, TrialConfig

BEST_SHOWN = 5
# How often a trial says where it is when nobody watches a terminal.
PLAIN_EVERY_S = 5.0


@dataclass(frozen=True)
class Ended:
    """A complete trial."""

    value: float
    number: int
    reason: str
    params: Mapping[str, Any]


@dataclass
class _Running:
    config: TrialConfig
    started: float = field(default_factory=time.monotonic)
    first_validation: int = 0
    line: str = ""
    last_plain: float = 0.0


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Whoever read along (`| head`) is gone: go on in silence. rich would end the process and its trial."""
        self.quiet = True
        self.file = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (for the rest of the process)


class RunDisplay:
    """A context manager; `on_record` and `on_end` are called by the trial."""

    def __init__(self, spec: StudySpec, stream: IO[str], finished: int = 0, ended: Sequence[Ended] = ()) -> None:
        """`finished` trials of earlier runs count already, `ended` are the best of them."""
        self.spec = spec
        self.console = _Console(file=stream, highlight=False)
        self.finished = finished
        self.running: dict[int, _Running] = {}
        self.ended = list(ended)
        self.note = ""
        self._live: Live | None = None
        if self.console.is_terminal:
            self._live = Live(console=self.console, redirect_stdout=False, redirect_stderr=False, transient=True)

    def __enter__(self) -> RunDisplay:
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)

    def on_record(self, config: TrialConfig, record: EpochRecord, best: float | None) -> None:
        running = self.running.get(config.number)
        if running is None:
            running = self.running[config.number] = _Running(config, first_validation=record.validation)
            running.started -= record.metrics.get("speed/train_s", 0.0) + record.metrics.get("speed/val_s", 0.0)
        monitor = self.spec.objective.monitor
        done = record.validation + 1 - running.first_validation
        per_validation = (time.monotonic() - running.started) / done
        eta = per_validation * (config.num_validations - record.validation - 1)
        running.line = (
            f"trial {config.number:>4}  epoch {record.epoch + 1:>3}/{config.train.max_epochs}  "
            f"{monitor} {record.metrics[monitor]:.4f}  best {_number(best)}  at most {_duration(eta)} left"
        )
        self._show(running)

    def on_leaving(self, text: str) -> None:
        """Not through `sys.stderr`, which is the trial's log just now."""
        if self._live is None:
            os.write(2, f"\n{text}\n".encode())
        self.note = text
        self._refresh()

    def on_end(self, number: int, outcome: TrialOutcome) -> None:
        running = self.running.pop(number, None)
        ending = ENDINGS[outcome.stop_reason]
        self.finished += ending.counts
        epoch = "" if outcome.best_epoch is None else f" at epoch {outcome.best_epoch}"
        line = f"trial {number:>4}  {outcome.stop_reason:<14} best {_number(outcome.value)}{epoch}"
        if outcome.stop_reason in ("failed", "outside_limits") and outcome.error:
            line += f"  {outcome.summary}"
        if outcome.value is not None and ending.state == "COMPLETE":
            params = running.config.params if running is not None else {}
            self.ended.append(Ended(outcome.value, number, outcome.stop_reason, params))
        if outcome.note is not None:
            line += f"  {outcome.note}"
        if self._live is None or outcome.stop_reason == "failed" or outcome.note is not None:
            self._print(f"[{self.finished}/{self.spec.budget.trials}] {line}")
        self._refresh()

    def _show(self, running: _Running) -> None:
        if self._live is not None:
            self._refresh()
        elif time.monotonic() - max(running.last_plain, running.started) >= PLAIN_EVERY_S:
            running.last_plain = time.monotonic()
            self._print(running.line)

    def _print(self, line: str) -> None:
        self.console.print(Text(line), soft_wrap=True)  # one line each, for whoever greps

    def _refresh(self) -> None:
        if self._live is None:
            return
        table = Table(box=None, padding=(0, 2), show_header=bool(self.ended))
        names = list(self.spec.search_space)
        for name in ("best so far", "trial", "ended by", *names):
            table.add_column(name)
        sign = -1 if self.spec.objective.direction == "maximize" else 1
        for ended in sorted(self.ended, key=lambda e: (sign * e.value, e.number))[:BEST_SHOWN]:
            values = [_cell(ended.params.get(name, "")) for name in names]
            table.add_row(f"{ended.value:.4f}", str(ended.number), ended.reason, *values)
        head = Text(f"{self.spec.study}: {self.finished} of {self.spec.budget.trials} trials", style="bold")
        note = [Text(self.note, style="yellow")] if self.note else []
        self._live.update(Group(head, *(Text(r.line) for r in self.running.values()), table, *note), refresh=True)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s" if minutes else f"{rest}s"
