"""From the ranges in the file to one trial's values: field path -> `trial.suggest_*` -> `TrialConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from sweeper.errors import SpecError
from sweeper.spec import ChoicesSpec, Domain, RangeSpec, Scalar, StudySpec, TrainSpec, TrialConfig

if TYPE_CHECKING:
    import optuna

SEARCHED_SECTIONS = ("model", "task", "train")
NESTED = ("scheduler", "optimizer_params")
NOT_SEARCHED = ("seed", "device", "deterministic", "validations_per_epoch", "timeout_s", "groups")


def field_path(name: str) -> tuple[str, ...] | None:
    """Where the parameter `name` lives in the file: `lr` -> train.lr, `scheduler.gamma` -> train.scheduler.gamma,
    `model.params.width` as it stands. None when there is no such field, or when it may not be searched."""
    first, *rest = name.split(".")
    if first in ("model", "task") and rest:
        return (first, *rest)
    if first in TrainSpec.model_fields and first not in NOT_SEARCHED and (not rest or first in NESTED):
        return ("train", first, *rest)
    return None


def field_names() -> list[str]:
    """Names that a search space may use, for "did you mean"."""
    from sweeper.spec import SchedulerSpec, TaskSpec

    train = [name for name in TrainSpec.model_fields if name not in (*NOT_SEARCHED, "scheduler", "optimizer_params")]
    scheduler = [f"scheduler.{name}" for name in SchedulerSpec.model_fields]
    return [*train, *scheduler, *(f"task.{name}" for name in TaskSpec.model_fields), "model.name", "model.params"]


def suggestion_order(search_space: Mapping[str, Domain]) -> list[str]:
    """The names, each after those that its `when` looks at; otherwise as written in the file.

    Raises `SpecError` for a circle of conditions.
    """
    ordered: list[str] = []
    waiting = list(search_space)
    while waiting:
        ready = [name for name in waiting if not any(cause in waiting for cause in search_space[name].when)]
        if not ready:
            raise SpecError(
                ("search_space", waiting[0], "when"),
                f"the conditions of {', '.join(waiting)} wait for each other",
                "Remove one of these `when`.",
            )
        ordered.append(ready[0])
        waiting.remove(ready[0])
    return ordered


def is_active(domain: Domain, spec: StudySpec, drawn: Mapping[str, Scalar]) -> bool:
    """Whether the conditions of a parameter hold, given what has been drawn and what the file fixes."""
    return all(
        any(same(_value_of(name, spec, drawn), wanted) for wanted in values) for name, values in domain.when.items()
    )


def same(value: Any, wanted: Scalar) -> bool:
    """Equality of a study file: 16 is 16.0, but 1 is not true, as it is in Python."""
    return value == wanted and isinstance(value, bool) == isinstance(wanted, bool)


def _value_of(name: str, spec: StudySpec, drawn: Mapping[str, Scalar]) -> Any:
    """The value that `name` has in this trial: drawn, or from the file. A parameter that was not drawn because its
    own condition failed has its fixed value."""
    if name in drawn:
        return drawn[name]
    path = field_path(name)
    assert path is not None, name
    value: Any = spec.model_dump()
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def suggest(trial: optuna.Trial, spec: StudySpec) -> dict[str, Scalar]:
    """Draw every active parameter, in an order that depends on the file alone."""
    drawn: dict[str, Scalar] = {}
    for name in suggestion_order(spec.search_space):
        domain = spec.search_space[name]
        if is_active(domain, spec, drawn):
            drawn[name] = _suggest_one(trial, name, domain)
    return drawn


def _suggest_one(trial: optuna.Trial, name: str, domain: Domain) -> Scalar:
    if isinstance(domain, ChoicesSpec):
        return trial.suggest_categorical(name, domain.choices)
    if domain.kind == "int":
        step = int(domain.step) if domain.step is not None else 1
        return trial.suggest_int(name, int(domain.low), int(highest(domain)), step=step, log=domain.log)
    return trial.suggest_float(name, domain.low, highest(domain), step=domain.step, log=domain.log)


def highest(domain: RangeSpec) -> float:
    """The largest value that can be drawn: `high`, or the last step below it."""
    return domain.high if domain.step is None else _step(domain, num_steps(domain) - 1)


def num_steps(domain: RangeSpec) -> int:
    """How many values a range with a `step` holds; in decimal, as written, where 0.3 + 0.6 is 0.9."""
    low, high, step = (Decimal(str(value)) for value in (domain.low, domain.high, domain.step))
    return int((high - low) / step) + 1


def _step(domain: RangeSpec, index: int) -> float:
    return float(Decimal(str(domain.low)) + index * Decimal(str(domain.step)))


def grid_values(domain: Domain) -> list[Scalar] | None:
    """Every value of a parameter, or None for a continuous range."""
    if isinstance(domain, ChoicesSpec):
        return list(domain.choices)
    if domain.kind == "int" and not domain.log:
        return list(range(int(domain.low), int(highest(domain)) + 1, int(domain.step or 1)))
    return None if domain.step is None else [_step(domain, index) for index in range(num_steps(domain))]


def largest(spec: StudySpec, name: str) -> Any:
    """The largest number that a parameter can be in any trial: drawn, or from the file."""
    return max(_extremes(spec, name))


def _extremes(spec: StudySpec, name: str) -> list[Any]:
    """Numbers among which are the smallest and the largest that a parameter can be."""
    domain = spec.search_space.get(name)
    fixed = [_value_of(name, spec, {})] if domain is None or domain.when else []
    if isinstance(domain, ChoicesSpec):
        return [*fixed, *(choice for choice in domain.choices if choice is not None)]
    return fixed if domain is None else [*fixed, domain.low, highest(domain)]


def derived_bounds(spec: StudySpec, name: str) -> tuple[float, float]:
    """Bounds of a derived value (one of `LIMITED`) over all draws; conditions may keep it further inside."""
    batches = [
        size * steps for size in _extremes(spec, "batch_size") for steps in _extremes(spec, "accumulation_steps")
    ]
    if name == "effective_batch_size":
        return min(batches), max(batches)
    scalings = spec.search_space.get("lr_scaling")
    ways = scalings.choices if isinstance(scalings, ChoicesSpec) else []
    lrs = [
        spec.train.model_copy(
            update={"lr": lr, "batch_size": batch, "accumulation_steps": 1, "lr_base_batch": base, "lr_scaling": way}
        ).applied_lr
        for lr in _extremes(spec, "lr")
        for batch in (min(batches), max(batches))
        for base in _extremes(spec, "lr_base_batch")
        for way in {spec.train.lr_scaling, *ways}
    ]
    return min(lrs), max(lrs)


def trial_config(spec: StudySpec, number: int, drawn: Mapping[str, Scalar]) -> TrialConfig:
    """The file's sections with the drawn values in place. Raises pydantic's ValidationError for a value that its
    field refuses together with the others, which `studyfile` has ruled out for every single value."""
    sections = {name: getattr(spec, name).model_dump(exclude_unset=True) for name in SEARCHED_SECTIONS}
    for name, value in drawn.items():
        path = field_path(name)
        assert path is not None, name
        place(sections, path, value)
    return TrialConfig.model_validate(
        {
            "number": number,
            "params": dict(drawn),
            **sections,
            **{name: getattr(spec, name) for name in ("objective", "data", "early_stopping", "speed")},
        }
    )


def place(sections: dict[str, Any], path: tuple[str, ...], value: Scalar) -> None:
    """Set one value in nested dictionaries, making those that are missing."""
    *parents, last = path
    for key in parents:
        sections = sections.setdefault(key, {})
    sections[last] = value


def beyond_limits(spec: StudySpec, config: TrialConfig) -> str | None:
    """Why the draw is outside `limits`, in words; None when it is inside."""
    for name, limit in spec.limits.items():
        value = getattr(config.train, name)
        if limit.max is not None and value > limit.max:
            return f"{name} {value:g} is above the limit {limit.max:g}"
        if limit.min is not None and value < limit.min:
            return f"{name} {value:g} is below the limit {limit.min:g}"
    return None
