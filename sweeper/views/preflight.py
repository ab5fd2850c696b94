"""Everything that can be known to be wrong before the first trial, found by building the parts once."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sweeper.data import LoadedData, load_data
from sweeper.errors import SpecError, SweeperError
from sweeper.imports import add_import_folder, is_import_path
from sweeper.models import build_model
from sweeper.space import highest, is_active, suggestion_order, trial_config
from sweeper.spec import ChoicesSpec, Scalar, StudySpec, TrialConfig
from sweeper.study.samplers import rehearse
from sweeper.tasks import build_task
from sweeper.tracking import check_tracking
from sweeper.training.memory import check_weights_fit
from sweeper.training.optimizer import build_optimizer, can_mask, takes_momentum
from sweeper.training.precision import resolve_device, resolve_precision
from sweeper.training.rehearsal import first_samples, rehearse_batch
from sweeper.training.session import check_monitor, on_no_device
from sweeper.training.windows import Windows, validation_steps


def preflight(spec: StudySpec, import_folder: Path) -> LoadedData:
    """Load the data and build what the extremes of the search space ask for. Creates nothing on disk.

    Raises `SpecError` or `DataError` for the first thing that a trial could not use.
    """
    add_import_folder(import_folder)
    check_tracking(spec.tracking.uri)
    rehearse(spec)
    with _user_code(("data", "source"), spec.data.source):
        data = load_data(spec.data)
    configs = list(corner_configs(spec))
    _check_momentum(spec, configs)
    batch = first_samples(data)
    for config in configs:
        _build_parts(config, data, batch)
    return data


def _build_parts(config: TrialConfig, data: LoadedData, batch: Any) -> None:
    """Everything that a trial would train with, and one small batch through it.

    Our own models and tasks need no memory for that; a user's code runs where it will run.
    """
    device = resolve_device(config.train.device)
    resolve_precision(config.train.precision, device)
    model_name, task_name = ("model", "name"), ("task", "name")
    with _user_code(task_name, config.task.name):
        task = build_task(config.task, data.info)
        check_monitor(config, task)
    _check_validations(config, len(data.splits.train))
    for_real = is_import_path(config.model.name) or is_import_path(config.task.name)
    with on_no_device(unless=for_real):
        with _user_code(model_name, config.model.name):
            model = build_model(config.model, task.info)
        check_weights_fit(model, device)
        build_optimizer(model, config.train, fused=config.speed.fused is not False and can_mask(config.train, device))
        with _user_code(model_name, config.model.name), _user_code(task_name, config.task.name):
            rehearse_batch(model, task, batch, device if for_real else None)


@contextlib.contextmanager
def _user_code(key: tuple[str, ...], name: str) -> Iterator[None]:
    """What the user's own function raises is a fault of theirs, said with its place; of ours it stays a traceback."""
    try:
        yield
    except (SweeperError, KeyboardInterrupt):
        raise
    except (Exception, SystemExit) as error:
        if not is_import_path(name):
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{name!r} raised {traceback.format_exception_only(error)[-1].strip()}"
        raise SpecError(key, what, f"It happened in {place.filename}:{place.lineno}: {place.line}") from error


def _check_momentum(spec: StudySpec, configs: list[TrialConfig]) -> None:
    """A momentum that the file asks for, of an optimizer that has none, would be ignored in silence."""
    asked = "momentum" in spec.train.model_fields_set or "momentum" in spec.search_space
    if asked and not any(takes_momentum(config.train.optimizer) for config in configs):
        path = ("search_space",) if "momentum" in spec.search_space else ("train",)
        what = f"the optimizer {spec.train.optimizer} has none"
        raise SpecError((*path, "momentum"), what, "Remove it, or give its own arguments as `optimizer_params`.")


def _check_validations(config: TrialConfig, num_samples: int) -> None:
    windows = Windows(num_samples, config.train.batch_size, config.train.accumulation_steps)
    try:
        validation_steps(windows.steps_per_epoch, config.train.validations_per_epoch)
    except ValueError as error:
        todo = f"That is with batch_size {config.train.batch_size} and {config.train.accumulation_steps} accumulated."
        raise SpecError(("train", "validations_per_epoch"), str(error), todo) from None


def corner_configs(spec: StudySpec) -> Iterator[TrialConfig]:
    """One config at each end of each parameter, the others at their first value."""
    order = suggestion_order(spec.search_space)
    ends = {name: _ends(spec, name) for name in order}
    base = {name: values[0] for name, values in ends.items()}
    first = _active_part(spec, order, base)
    yield _checked_config(spec, first, first)
    seen = [first]
    for name in order:
        for value in ends[name]:
            point = _active_part(spec, order, {**base, name: value})
            if point not in seen:
                seen.append(point)
                yield _checked_config(spec, point, {name: value})


def _ends(spec: StudySpec, name: str) -> list[Scalar]:
    domain = spec.search_space[name]
    if isinstance(domain, ChoicesSpec):
        return list(domain.choices)
    ends: list[Scalar] = [domain.low, highest(domain)]
    return [int(end) for end in ends if end is not None] if domain.kind == "int" else ends


def _active_part(spec: StudySpec, order: list[str], point: dict[str, Scalar]) -> dict[str, Scalar]:
    drawn: dict[str, Scalar] = {}
    for name in order:
        if is_active(spec.search_space[name], spec, drawn):
            drawn[name] = point[name]
    return drawn


def _checked_config(spec: StudySpec, point: dict[str, Scalar], news: dict[str, Scalar]) -> TrialConfig:
    """`news` is the part of the point that was not tried before, and so is to blame."""
    try:
        return trial_config(spec, 0, point)
    except ValidationError as error:
        what, _, todo = str(error.errors()[0]["msg"]).removeprefix("Value error, ").partition(" | ")
        values = ", ".join(f"{name} {value!r}" for name, value in news.items())
        where = ("search_space", *list(news)[:1]) if len(news) == 1 else ("search_space",)
        raise SpecError(where, f"{values} cannot be used: {what}", todo or "Remove it.") from None
