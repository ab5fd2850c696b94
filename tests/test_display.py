"""What `sweep run` shows, on a terminal and off one."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from builders import make_config, make_spec
from sweeper.display import Ended, RunDisplay
from sweeper.records import EpochRecord, TrialOutcome

SPACE = {"lr": {"low": 1e-4, "high": 1e-1, "log": True}}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def record(validation: int, value: float) -> EpochRecord:
    metrics = {"val_accuracy": value, "speed/train_s": 1.0, "speed/val_s": 0.5}
    return EpochRecord(validation, validation, 10, True, 1_700_000_000_000, metrics)


def shown(stream: io.StringIO, monkeypatch: Any) -> RunDisplay:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return RunDisplay(make_spec(search_space=SPACE, budget={"trials": 3}), stream)


def last_frame(display: RunDisplay) -> str:
    """What stands on the terminal now, as text."""
    assert display._live is not None
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(display._live.renderable)
    return console.export_text()


def test_the_terminal_shows_running_trials_and_the_best_with_their_values(monkeypatch: Any) -> None:
    display = shown(Terminal(), monkeypatch)
    with display:
        for number, value in ((0, 0.5), (1, 0.75)):
            config = make_config().model_copy(update={"number": number, "params": {"lr": 0.01 * (number + 1)}})
            display.on_record(config, record(0, value), value)
            assert f"trial {number:>4}  epoch   1/2  val_accuracy {value:.4f}" in last_frame(display)
            display.on_end(number, TrialOutcome("max_epochs", value, 0))
        lines = [line.split() for line in last_frame(display).splitlines()]
    assert lines[0] == ["toy:", "2", "of", "3", "trials"]
    assert lines[1:4] == [
        ["best", "so", "far", "trial", "ended", "by", "lr"],
        ["0.7500", "1", "max_epochs", "0.02"],
        ["0.5000", "0", "max_epochs", "0.01"],
    ]


def test_the_answer_to_ctrl_c_stays_on_the_terminal(monkeypatch: Any) -> None:
    display = shown(Terminal(), monkeypatch)
    with display:
        display.on_leaving("Finishing this epoch, then leaving.")
        display.on_record(make_config(), record(0, 0.5), 0.5)
        assert last_frame(display).splitlines()[-1].strip() == "Finishing this epoch, then leaving."


def test_off_a_terminal_each_trial_is_one_line(monkeypatch: Any) -> None:
    stream = io.StringIO()
    with shown(stream, monkeypatch) as display:
        display.on_end(0, TrialOutcome("failed", error="ValueError: " + "x" * 200))
        display.on_end(1, TrialOutcome("max_epochs", 0.5, 3))
    assert stream.getvalue().splitlines() == [
        f"[0/3] trial    0  failed         best -  ValueError: {'x' * 200}",
        "[1/3] trial    1  max_epochs     best 0.5000 at epoch 3",
    ]


def test_results_of_earlier_runs_are_shown_too(monkeypatch: Any) -> None:
    earlier = [Ended(0.9, 0, "max_epochs", {"lr": 0.05})]
    monkeypatch.setenv("TERM", "xterm")
    with RunDisplay(make_spec(search_space=SPACE, budget={"trials": 3}), Terminal(), 1, earlier) as display:
        display.on_end(1, TrialOutcome("pruned", 0.2, 0))
        assert ["0.9000", "0", "max_epochs", "0.05"] in [line.split() for line in last_frame(display).splitlines()]
