"""Read a study file: every fault of it at once, each with its line and what to do."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sweeper.errors import Fault, SpecError, SpecErrors, StudyFileError
from sweeper.faultwords import merge_alternatives, to_fault
from sweeper.searchspace_rules import SpaceReader
from sweeper.space import derived_bounds
from sweeper.spec import LIMITED, SCHEDULER_KEYS, ChoicesSpec, Domain, SchedulerSpec, StudySpec
from sweeper.yamlfile import KeyPath, YamlFile

OVERRIDES = {"SWEEPER_STORAGE": ("storage",), "SWEEPER_TRACKING_URI": ("tracking", "uri")}


@dataclass
class StudyFile:
    """A study file that was read without a fault. `notices` are things worth saying that stop nothing.

    `path` is the file as it was named; `folder`, where the user's code stands, is absolute: that code may change the
    working directory.
    """

    spec: StudySpec
    yaml: YamlFile
    folder: Path
    notices: list[str] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.yaml.path

    def explain(self, error: SpecError | SpecErrors) -> StudyFileError:
        """The faults that parts found later, with the lines they stand on."""
        return fault_report(self.yaml, error.faults if isinstance(error, SpecErrors) else [error.fault])


def read_study_file(path: Path) -> StudyFile:
    """Raises `StudyFileError` with every fault, or `SweeperError` when the file cannot be read at all."""
    file = YamlFile(path)
    values = _with_overrides(file.values)
    space = SpaceReader(values)
    faults = list(space.faults)
    spec, model_faults = _validate({**values, "search_space": space.domains} if "search_space" in values else values)
    faults += model_faults
    faults += _scheduler_faults(values, space.domains)
    if spec is not None:
        faults += _cross_faults(spec)
    if faults or spec is None:
        raise fault_report(file, faults)
    notices = [f"{path}:{file.line(at)}: {text}" for at, text in space.notices]
    notices += [f"{path}:{file.line(at)}: {text}" for at, text in _notices(spec)]
    return StudyFile(spec, file, path.absolute().parent, notices)


def fault_report(file: YamlFile, faults: list[Fault]) -> StudyFileError:
    """All faults in the order of their lines."""
    ordered = sorted(faults, key=lambda fault: file.line(fault.path))
    return StudyFileError("\n".join(_fault_text(file, fault) for fault in ordered), ordered)


def _fault_text(file: YamlFile, fault: Fault) -> str:
    where = f"{file.path}:{file.line(fault.path)}: "
    for variable, path in OVERRIDES.items():
        if fault.path == path and os.environ.get(variable):
            where = f"{variable} in the environment: "
    return f"{where}{key_text(fault.path)}: {fault.what}\n  {fault.todo}"


def key_text(path: KeyPath) -> str:
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else str(key)
    return text or "the file"


def _with_overrides(values: dict[str, Any]) -> dict[str, Any]:
    """The environment's databases in place of the file's, so that passwords stay out of files."""
    values = dict(values)
    for variable, path in OVERRIDES.items():
        text = os.environ.get(variable)
        if not text:
            continue
        if len(path) == 1:
            values[path[0]] = text
        elif isinstance(values.get(path[0], {}), dict):
            values[path[0]] = {**values.get(path[0], {}), path[1]: text}
    return values


def _validate(values: dict[str, Any]) -> tuple[StudySpec | None, list[Fault]]:
    try:
        return StudySpec.model_validate(values), []
    except ValidationError as error:
        return None, merge_alternatives([to_fault(detail, values) for detail in error.errors()])


def _cross_faults(spec: StudySpec) -> list[Fault]:
    """What only shows when sections are looked at together."""
    return [*_limit_faults(spec), *_monitor_faults(spec), *_storage_faults(spec)]


def _limit_faults(spec: StudySpec) -> list[Fault]:
    faults = []
    for name, limit in spec.limits.items():
        if name not in LIMITED:
            near = difflib.get_close_matches(name, LIMITED, n=1)
            todo = f"Did you mean {near[0]}?" if near else f"Limits are for {' and '.join(LIMITED)}."
            faults.append(Fault(("limits", name), "there is no derived value of this name", todo))
        elif limit.min is not None and limit.max is not None and limit.min > limit.max:
            what = f"min ({limit.min:g}) is above max ({limit.max:g})"
            faults.append(Fault(("limits", name), what, "Swap them."))
        else:
            low, high = derived_bounds(spec, name)
            if (limit.max is not None and low > limit.max) or (limit.min is not None and high < limit.min):
                what = f"no draw can be inside: {name} goes from {low:g} to {high:g}"
                faults.append(Fault(("limits", name), what, "Widen the limit, or change the ranges it derives from."))
    return faults


def _monitor_faults(spec: StudySpec) -> list[Fault]:
    monitor = spec.objective.monitor
    if monitor == "train_loss" or monitor.startswith("val_"):
        return []
    return [
        Fault(
            ("objective", "monitor"),
            f"{monitor!r} is not measured",
            "Write train_loss, val_loss, or val_ and a metric's name, such as val_accuracy.",
        )
    ]


def _storage_faults(spec: StudySpec) -> list[Fault]:
    if not spec.storage.startswith("sqlite:///"):
        what = f"{spec.storage.split('://')[0]!r} databases are not supported yet"
        return [Fault(("storage",), what, "Write `sqlite:///mlruns/optuna.db`.")]
    name = spec.storage.removeprefix("sqlite:///")
    if name in ("", ":memory:") or name.startswith("file:") or "?" in name or Path(name).is_dir():
        return [Fault(("storage",), f"{spec.storage!r} names no file", "Write `sqlite:///mlruns/optuna.db`.")]
    if _file(spec.storage) == _file(spec.tracking.uri):
        what = "the study and MLflow share one database, and both own a table alembic_version"
        return [Fault(("storage",), what, "Give each a file of its own.")]
    return []


def _file(uri: str) -> Path:
    return Path(uri.removeprefix("sqlite:///")).absolute().resolve()


def _notices(spec: StudySpec) -> Iterator[tuple[KeyPath, str]]:
    """What is allowed and rarely meant."""
    sees = spec.sampler.name not in ("gp", "cmaes", "nsga") or spec.sampler.params.get("consider_pruned_trials")
    if not sees and spec.pruner.name != "none":
        text = (
            f"sampler.name: {spec.sampler.name} does not look at pruned trials, and pruner {spec.pruner.name} may "
            "leave it few others; tpe and qmc do"
        )
        yield ("sampler", "name"), text
    monitor, direction = spec.objective.monitor, spec.objective.direction
    usual = USUAL_DIRECTIONS.get(monitor.rpartition("_")[2])
    if usual is not None and direction != usual:
        yield ("objective", "direction"), f"objective.direction: {direction} looks for the worst {monitor}"
    for index, point in enumerate(spec.enqueue):
        missing = [name for name in spec.search_space if name in LIMITING and name not in point]
        if spec.limits and missing:
            text = f"enqueue[{index}]: {', '.join(missing)} will be drawn, and the point may then be outside `limits`"
            yield ("enqueue", index), text


USUAL_DIRECTIONS: dict[str, str] = {
    **dict.fromkeys(("accuracy", "r2"), "maximize"),
    **dict.fromkeys(("loss", "mae", "rmse"), "minimize"),
}
# The parameters that `limits` derive from.
LIMITING = ("lr", "batch_size", "accumulation_steps", "lr_scaling", "lr_base_batch")


def _scheduler_faults(values: dict[str, Any], domains: dict[str, Domain]) -> list[Fault]:
    """A key of another scheduler would be ignored in silence, and an ignored key is a wrong answer.

    Looks at the raw values, so that it is said together with the faults of other keys.
    """
    train = values.get("train")
    scheduler = train.get("scheduler") if isinstance(train, dict) else None
    section = scheduler if isinstance(scheduler, dict) else {}
    names: set[Any] = {str(section.get("name", "constant"))}
    searched = domains.get("scheduler.name")
    if isinstance(searched, ChoicesSpec):
        names |= set(searched.choices)
    if not names <= SCHEDULER_KEYS.keys():
        return []  # said of the name itself
    allowed = {"name", "warmup_epochs", "warmup_steps", *(key for name in names for key in SCHEDULER_KEYS[name])}
    written: list[tuple[KeyPath, str]] = [(("train", "scheduler", key), key) for key in section]
    written += [(("search_space", name), name.split(".")[1]) for name in domains if name.startswith("scheduler.")]
    return [
        Fault(
            path,
            f"the scheduler {' or '.join(sorted(names))} has no {key!r}",
            f"It takes: {', '.join(sorted(allowed - {'name'}))}.",
        )
        for path, key in written
        if key in SchedulerSpec.model_fields and key not in allowed
    ]
