"""The door: parse, call, print, exit codes. Heavy imports stay inside the commands, so that `--help` is instant.

Exit codes: 0 done, 1 a fault the user can mend, 2 usage, 3 stopped because trials kept failing, 130 interrupted.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from sweeper import __version__
from sweeper.errors import InterruptedNow, SpecError, SpecErrors, SweeperError

if TYPE_CHECKING:
    from sweeper.display import Ended
    from sweeper.studyfile import StudyFile
    from sweeper.views.reading import StoredStudy

STUDY = click.argument("study_file", metavar="STUDY.yaml", type=click.Path(path_type=Path))
TRIAL = click.argument("trial", metavar="TRIAL", type=click.IntRange(min=0))
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


class _Commands(click.Group):
    """Keeps the order of definition in `--help`, and turns our errors into sentences."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        from sweeper.study.signals import leaving_at_once

        try:
            with leaving_at_once():
                return super().invoke(ctx)
        except SweeperError as error:
            _leave(str(error), error.exit_code)
        except InterruptedNow as signal:
            _leave(f"Interrupted by {signal.signal_name}.", 130)
        except KeyboardInterrupt:
            _leave("Interrupted.", 130)


def _leave(text: str, code: int) -> NoReturn:
    click.echo(text, err=True)
    sys.exit(code)


@click.group(cls=_Commands)
@click.version_option(__version__, prog_name="sweep")
def main() -> None:
    """Sweep hyperparameters of PyTorch models: write a study file, run it, read the answer."""


@main.command()
@STUDY
def run(study_file: Path) -> None:
    """Run the study, or go on with it: what is missing to its budget, interrupted trials first."""
    file = _read(study_file)
    from sweeper.display import RunDisplay
    from sweeper.room import Progress
    from sweeper.study.running import run_study
    from sweeper.views.preflight import preflight

    data = _with_lines(file, lambda: preflight(file.spec, file.folder))
    click.echo(_summary(file, data.info.sizes))
    finished, ended, interrupted = _so_far(file)
    if finished or interrupted:
        continuing = f"; trial {', '.join(map(str, interrupted))} was interrupted and continues" if interrupted else ""
        click.echo(f"  going on: {finished} of {file.spec.budget.trials} trials are done{continuing}")
    with RunDisplay(file.spec, sys.stdout, finished, ended) as display:
        progress = Progress(
            lambda config, record, judged: display.on_record(config, record, judged.best_value),
            display.on_end,
            display.on_leaving,
        )
        result = _with_lines(file, lambda: run_study(file, data, progress))
    for problem in result.problems:
        click.echo(problem, err=True)
    if result.undelivered is not None:
        click.echo(
            f"MLflow could not be reached; what it has not got lies in {result.undelivered.absolute()}", err=True
        )
        click.echo("  The next `sweep run` delivers it.", err=True)
    try:
        _print_result(file, result.why_over, nothing_run=not result.num_run)
    except SweeperError:  # a database that does not answer; that is said below
        if result.error is None:
            raise
    if result.error is not None:
        _leave(str(result.error).replace("STUDY.yaml", str(study_file)), result.error.exit_code)
    if result.interrupted:
        _leave(f"Interrupted. `sweep run {study_file}` goes on where it stopped.", 130)


@main.command()
@STUDY
def check(study_file: Path) -> None:
    """Validate the study file, the data and the extremes of the search space, without training."""
    file = _read(study_file)
    from sweeper.views.preflight import preflight

    data = _with_lines(file, lambda: preflight(file.spec, file.folder))
    click.echo(_summary(file, data.info.sizes))
    click.echo("The study file is sound.")


@main.command()
@STUDY
@AS_JSON
def status(study_file: Path, as_json: bool) -> None:
    """How far the study is, and its best trials."""
    stored = _stored(study_file)
    from sweeper.views.status import ranking, states_text, status_json

    values = status_json(stored)
    if as_json:
        _print_json(values)
        return
    click.echo(
        f"{values['study']}: {values['direction']} {values['monitor']}, {values['budget']['trials']} trials wanted"
    )
    click.echo(f"  {states_text(stored)}")
    if values["last_activity"]:
        click.echo(f"  last activity {values['last_activity']}")
    best = ranking(stored, 10)
    if not best:
        click.echo("No trial is complete yet.")
        return
    names = list(dict.fromkeys(name for trial in best for name in trial.params))
    rows = [
        [str(t.number), f"{t.value:.6g}", str(t.user_attrs.get("best_epoch", "")), *_cells(t.params, names)]
        for t in best
    ]
    click.echo(_table(["trial", values["monitor"], "epoch", *names], rows))


@main.command()
@STUDY
@AS_JSON
def best(study_file: Path, as_json: bool) -> None:
    """The best trial: sections to paste into the study file, and its checkpoint."""
    stored = _stored(study_file)
    from sweeper.views.best import best_as_json, best_of, sections_to_paste, where_to_load

    values = best_as_json(stored)
    if as_json:
        _print_json(values)
        return
    monitor = stored.spec.objective.monitor
    click.echo(
        f"# {stored.spec.study}: trial {values['trial']}, {monitor} {values['value']:.6g} at epoch {values['epoch']}"
    )
    click.echo(sections_to_paste(stored, best_of(stored)), nl=False)
    for line in where_to_load(stored, best_of(stored)):
        click.echo(f"# {line}")


@main.command()
@STUDY
@TRIAL
def logs(study_file: Path, trial: int) -> None:
    """What a trial printed and warned, and its traceback if it failed."""
    stored = _stored(study_file)
    from sweeper.views.show import log_text

    text = log_text(stored, trial)
    click.echo(text, nl=False)
    if not text:
        click.echo(f"Trial {trial} printed nothing.", err=True)


@main.command()
@STUDY
@TRIAL
@AS_JSON
def show(study_file: Path, trial: int, as_json: bool) -> None:
    """One trial: its values, how it ended, and every validation."""
    stored = _stored(study_file)
    from sweeper.views.show import show_json

    values = show_json(stored, trial)
    if as_json:
        _print_json(values)
        return
    reason = f" ({values['stop_reason']})" if values["stop_reason"] not in (None, values["state"]) else ""
    best = "no value yet" if values["value"] is None else f"best {values['value']:.6g} at epoch {values['best_epoch']}"
    click.echo(f"trial {trial}: {values['state']}{reason}, {best}")
    for name, value in values["params"].items():
        click.echo(f"  {name}: {value}")
    for said in (values["error"], values["note"]):
        if said:
            click.echo(said)
    names = [
        "train_loss",
        "val_loss",
        stored.spec.objective.monitor,
        "optim/lr",
        "optim/grad_norm",
        "speed/samples_per_s",
    ]
    names = list(dict.fromkeys(names))
    rows = [[str(r["epoch"]), *_cells(r["metrics"], names)] for r in values["validations"]]
    if rows:
        click.echo(_table(["epoch", *names], rows))


def _read(path: Path) -> StudyFile:
    from sweeper.studyfile import read_study_file

    file = read_study_file(path)
    file.spec = file.spec.with_absolute_paths()
    for notice in file.notices:
        click.echo(f"note: {notice}", err=True)
    return file


def _stored(path: Path) -> StoredStudy:
    from sweeper.studyfile import read_study_file
    from sweeper.views.reading import read_study

    return read_study(read_study_file(path).spec)


def _with_lines(file: StudyFile, call: Any) -> Any:
    """Run `call`; a fault that a part finds in the file gets its line. What it warns of is said as a note."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: click.echo(f"note: {message}", err=True)
            return call()
    except (SpecError, SpecErrors) as error:
        raise file.explain(error) from error


def _so_far(file: StudyFile) -> tuple[int, list[Ended], list[int]]:
    """How many trials of earlier runs count, the best of them, and the numbers of those that were interrupted."""
    from sweeper.display import BEST_SHOWN, Ended
    from sweeper.errors import StorageError
    from sweeper.study.worker import counts
    from sweeper.views.reading import read_study
    from sweeper.views.status import ranking

    try:
        stored = read_study(file.spec)
    except StorageError:
        return 0, [], []
    results = [
        Ended(t.value, t.number, t.user_attrs.get("stop_reason", ""), t.params)
        for t in ranking(stored, BEST_SHOWN)
        if t.value is not None
    ]
    return sum(map(counts, stored.trials)), results, sorted(stored.interrupted)


def _summary(file: StudyFile, sizes: dict[str, int]) -> str:
    from sweeper.space import largest

    spec = file.spec
    counts = ", ".join(f"{size} {name}" for name, size in sizes.items())
    return (
        f"{spec.study}: {spec.objective.direction} {spec.objective.monitor} over {_count(spec.budget.trials, 'trial')} "
        f"of up to {_count(largest(spec, 'max_epochs'), 'epoch')}\n  data {spec.data.source} ({counts}), "
        f"model {spec.model.name}, searching {', '.join(spec.search_space) or 'nothing'}"
    )


def _print_result(file: StudyFile, why_over: str | None, nothing_run: bool) -> None:
    """The result in words, why the study is over if it is, and where to look."""
    from sweeper.tracking import redact
    from sweeper.views.best import best_as_json
    from sweeper.views.reading import read_study
    from sweeper.views.status import states_text, status_json

    stored = read_study(file.spec)
    values = status_json(stored)
    click.echo(f"\n{file.spec.study}: {states_text(stored)}.")
    if why_over is not None:
        click.echo(f"{'Nothing to do' if nothing_run else 'Ended'}: {why_over}.")
    if values["best"] is None:
        click.echo("No trial is complete, so there is no best one yet.")
        if stored.trials:
            click.echo(f"  what happened:    sweep logs {file.path} {stored.trials[-1].number}")
        return
    best_values = best_as_json(stored)
    point = ", ".join(f"{name} {_cell(value)}" for name, value in best_values["params"].items())
    click.echo(
        f"The best {values['monitor']} is {best_values['value']:.6g}, by trial {best_values['trial']} at epoch "
        f"{best_values['epoch']}{': ' if point else ''}{point}."
    )
    click.echo(f"  values to paste:  sweep best {file.path}")
    click.echo(f"  the checkpoint:   {best_values['checkpoint'] or 'has been removed'}")
    uri = redact(file.spec.tracking.uri)
    click.echo(f"  all curves:       {uri if uri.startswith('http') else f'mlflow ui --backend-store-uri {uri}'}")


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _print_json(values: dict[str, Any]) -> None:
    click.echo(json.dumps(_without_nan(values), indent=2, allow_nan=False))


def _without_nan(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become the texts "nan", "inf" and "-inf"."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _cells(values: dict[str, Any], names: list[str]) -> list[str]:
    return [_cell(values.get(name, "")) for name in names]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(header: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *rows]
    )


if __name__ == "__main__":
    main()
