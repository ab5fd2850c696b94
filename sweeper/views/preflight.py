"""Everything that can be known to be wrong before the first trial, found by building the parts once."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sweeper.data import LoadedData, check_data, load_data
from sweeper.data.samples import first_batch
from sweeper.errors import DataError, SpecError, SpecErrors, SweeperError
from sweeper.imports import add_import_folder, is_import_path
from sweeper.models import build_model, check_model
from sweeper.space import field_path, highest, is_active, suggestion_order, trial_config
from sweeper.spec import ChoicesSpec, Scalar, StudySpec, TrialConfig
from sweeper.study.samplers import rehearse
from sweeper.tasks import build_task, metric_names
from sweeper.tracking import check_tracking
from sweeper.training.memory import check_weights_fit
from sweeper.training.optimizer import build_optimizer, can_mask, optimizer_class, takes_momentum
from sweeper.training.precision import resolve_device, resolve_precision
from sweeper.training.rehearsal import NUM_SAMPLES, rehearse_batch
from sweeper.training.session import check_monitor, on_no_device
from sweeper.training.windows import Windows, validation_steps


def preflight(spec: StudySpec, import_folder: Path) -> LoadedData:
    """Load the data and build what the extremes of the search space ask for. Creates nothing on disk.

    Raises `SpecErrors` for all names and arguments that no part knows, else `SpecError` for the first thing that a
    trial could not use.
    """
    add_import_folder(import_folder)
    _check_names(spec)
    with _user_code(("data", "source"), spec.data.source), _data_fault():
        data = load_data(spec.data)
    corners = list(corner_configs(spec))
    _check_momentum(spec, [config for config, _ in corners])
    batch = first_batch(data.splits.train, NUM_SAMPLES)
    for config, news in corners:
        with _blamed_on_draw(news), _data_fault():
            _build_parts(config, data, batch)
    return data


def _check_names(spec: StudySpec) -> None:
    """What can be said without data, all of it at once."""
    checks: list[tuple[tuple[str, ...], str, Callable[[], object]]] = [
        (("tracking", "uri"), "", lambda: check_tracking(spec.tracking.uri)),
        (("data", "source"), spec.data.source, lambda: check_data(spec.data)),
        (("model", "name"), spec.model.name, lambda: check_model(spec.model)),
        (("task", "name"), spec.task.name, lambda: metric_names(spec.task)),
        (("train", "optimizer"), "", lambda: optimizer_class(spec.train.optimizer)),
        (("train", "device"), "", lambda: resolve_device(spec.train.device)),
        (("sampler",), "", lambda: rehearse(spec)),
    ]
    errors = []
    for key, name, check in checks:
        try:
            with _user_code(key, name):  # a user's module is imported here
                check()
        except SpecError as error:
            errors.append(error)
    if errors:
        raise SpecErrors(errors)


@contextlib.contextmanager
def _data_fault() -> Iterator[None]:
    """What is wrong with the data is said at `data`."""
    try:
        yield
    except DataError as error:
        what, _, todo = str(error).partition("\n  ")
        raise SpecError(("data",), what, todo) from error


@contextlib.contextmanager
def _blamed_on_draw(news: dict[str, Scalar]) -> Iterator[None]:
    """A fault at the place of a drawn value is said where the value stands: in the search space."""
    try:
        yield
    except SpecError as error:
        for name, value in news.items():
            path = field_path(name)
            if path is not None and error.fault.path[: len(path)] == path:
                what = f"{value!r} cannot be used: {error.fault.what}"
                raise SpecError(("search_space", name), what, error.fault.todo) from error
        raise


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
            rehearse_batch(model, task, batch, device if for_real else None, not is_import_path(config.model.name))


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
        place = _their_line(error)
        notes: list[str] = getattr(error, "__notes__", [])
        words = traceback.format_exception_only(error)[-1 - len(notes)].strip()
        what = " ".join([f"{name!r} raised {words}", *notes])
        raise SpecError(key, what, f"It happened in {place.filename}:{place.lineno}: {place.line}") from error


def _their_line(error: BaseException) -> traceback.FrameSummary:
    """The last line before the error that is neither a library's nor ours."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parent.parent)
    theirs = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith(ours)]
    return (theirs or frames)[-1]


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


def corner_configs(spec: StudySpec) -> Iterator[tuple[TrialConfig, dict[str, Scalar]]]:
    """One config at each end of each parameter, the others at their first value; and what of its point is new."""
    order = suggestion_order(spec.search_space)
    ends = {name: _ends(spec, name) for name in order}
    base = {name: values[0] for name, values in ends.items()}
    first = _active_part(spec, order, base)
    yield _checked_config(spec, first, first), first
    seen = [first]
    for name in order:
        for value in ends[name]:
            point = _active_part(spec, order, {**base, name: value})
            if point not in seen:
                seen.append(point)
                yield _checked_config(spec, point, {name: value}), {name: value}


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
