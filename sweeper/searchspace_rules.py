"""Read `search_space` and `enqueue`: every name must be a field, every value one that its field accepts."""

from __future__ import annotations

import difflib
import math
from typing import Any

from pydantic import BaseModel, ValidationError

from sweeper.errors import Fault, SpecError
from sweeper.faultwords import USUAL_NAMES, to_fault
from sweeper.space import (
    NOT_SEARCHED,
    field_names,
    field_path,
    grid_values,
    highest,
    num_steps,
    place,
    same,
    suggestion_order,
)
from sweeper.spec import ChoicesSpec, Domain, ModelSpec, RangeSpec, TaskSpec, TrainSpec
from sweeper.yamlfile import KeyPath, as_written

SECTIONS: dict[str, type[BaseModel]] = {"model": ModelSpec, "task": TaskSpec, "train": TrainSpec}
RANGE_KEYS = ("low", "high", "log", "step", "choices", "when")


class SpaceReader:
    """Turns the raw section into domains. What is wrong is in `faults`, the domains without fault in `domains`."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.faults: list[Fault] = []
        self.notices: list[tuple[KeyPath, str]] = []
        self.domains: dict[str, Domain] = {}
        raw = values.get("search_space")
        if "search_space" not in values:
            return
        if not isinstance(raw, dict):
            todo = "Write at least one, as in `lr: {low: 1e-4, high: 1e-1, log: true}`, or {} to train one setting."
            self._fault((), "holds no parameter", todo)
            return
        for name, entry in raw.items():
            self._read(str(name), entry)
        self._check_conditions()
        self._check_grid()
        self._check_enqueued()

    def _fault(self, path: KeyPath, what: str, todo: str) -> None:
        self.faults.append(Fault(("search_space", *path), what, todo))

    def _read(self, name: str, entry: Any) -> None:
        path = field_path(name)
        if path is None:
            if name in NOT_SEARCHED:
                todo = "Hold it fixed under `train`; every trial has a seed of its own." if name == "seed" else ""
                self._fault((name,), "cannot be searched", todo or "Hold it fixed under `train`.")
                return
            self._fault((name,), "there is no such field to search", _name_hint(name))
            return
        if not isinstance(entry, dict):
            todo = f"To hold it fixed, write it under `{path[0]}`; to search, write `{{low: .., high: ..}}`."
            self._fault((name,), f"is {as_written(entry)}, not a range", todo)
            return
        unknown = [key for key in entry if key not in RANGE_KEYS]
        for key in unknown:
            near = difflib.get_close_matches(str(key), RANGE_KEYS, n=1)
            todo = f"Did you mean {near[0]}?" if near else f"A range knows: {', '.join(RANGE_KEYS)}."
            self._fault((name, key), "unknown key", todo)
        if unknown:
            return
        domain = self._choices(name, entry) if "choices" in entry else self._range(name, path, entry)
        if domain is not None and self._values_are_legal(name, path, domain):
            self.domains[name] = domain

    def _choices(self, name: str, entry: dict[str, Any]) -> ChoicesSpec | None:
        extra = [key for key in ("low", "high", "log", "step") if key in entry]
        choices = entry["choices"]
        if extra:
            self._fault((name, extra[0]), "stands beside choices", "Keep either choices or low and high.")
        elif not isinstance(choices, list):
            todo = "Write `choices: [16, 32, 64]`."
            self._fault((name, "choices"), f"must be a list, not {as_written(choices)}", todo)
        elif not choices:
            self._fault((name, "choices"), "is empty", "Name at least one value.")
        elif not all(_is_scalar(choice) for choice in choices):
            todo = "Use finite numbers, text, true, false or null."
            self._fault((name, "choices"), "holds something that a database cannot keep as one value", todo)
        elif len({_database_key(choice) for choice in choices}) < len(choices):
            self._fault(
                (name, "choices"),
                "holds the same value twice (1, 1.0 and true are one value to the database)",
                "Name each value once.",
            )
        else:
            return ChoicesSpec(choices=choices, when=self._when(name, entry))
        return None

    def _when(self, name: str, entry: dict[str, Any]) -> dict[str, list[Any]]:
        when = entry.get("when", {})
        if not isinstance(when, dict):
            self._fault(
                (name, "when"), f"must be names and values, not {as_written(when)}", "See `when: {optimizer: sgd}`."
            )
            return {}
        found = {str(cause): wanted if isinstance(wanted, list) else [wanted] for cause, wanted in when.items()}
        for cause, wanted in found.items():
            if not all(_is_scalar(value) for value in wanted):
                todo = "Write one value, or a list of numbers, texts, true, false or null."
                self._fault((name, "when", cause), f"cannot be {as_written(when[cause])}", todo)
                return {}
        return found

    def _range(self, name: str, path: tuple[str, ...], entry: dict[str, Any]) -> RangeSpec | None:
        for key in ("low", "high", *(["step"] if entry.get("step") is not None else [])):
            if key not in entry:
                self._fault((name,), f"{key} is missing", "Write both `low` and `high`, or `choices`.")
                return None
            value = entry[key]
            if isinstance(value, bool) or not isinstance(value, int | float):
                note = " (text)" if isinstance(value, str) else ""
                todo = "Write it without quotes, as in 0.001 or 1e-3."
                self._fault((name, key), f"must be a number, not {as_written(value)}{note}", todo)
                return None
            if not _is_scalar(value):
                self._fault((name, key), f"must be a finite number, not {as_written(value)}", "Write a smaller one.")
                return None
        if not isinstance(entry.get("log", False), bool):
            self._fault((name, "log"), f"must be true or false, not {as_written(entry['log'])}", "Write `log: true`.")
            return None
        return self._consistent_range(name, path, entry)

    def _consistent_range(self, name: str, path: tuple[str, ...], entry: dict[str, Any]) -> RangeSpec | None:
        low, high, step, log = entry["low"], entry["high"], entry.get("step"), entry.get("log", False)
        whole = self._is_whole(path, [value for value in (low, high, step) if value is not None])
        if low > high:
            todo = f"Swap them, or write `{name}: {low:g}` under `{path[0]}` to hold it fixed."
            self._fault((name,), f"low ({low:g}) is above high ({high:g})", todo)
        elif log and low <= 0:
            todo = "A log range needs low above 0; write the values themselves (1e-8), not their exponents (-8)."
            self._fault((name, "low"), f"{low:g} has no logarithm", todo)
        elif log and step is not None:
            self._fault((name, "step"), f"log and step ({step:g}) exclude each other", "Remove one of the two.")
        elif step is not None and step <= 0:
            self._fault((name, "step"), f"must be above 0, not {step:g}", "Write the distance between two values.")
        else:
            kind = "int" if whole else "float"
            domain = RangeSpec.model_validate(
                {"low": low, "high": high, "log": log, "step": step, "kind": kind, "when": self._when(name, entry)}
            )
            self._notice_lost_end(name, domain)
            return domain
        return None

    def _notice_lost_end(self, name: str, domain: RangeSpec) -> None:
        last = highest(domain)
        if abs(last - domain.high) > 1e-9 * max(1.0, abs(domain.high)):
            first = domain.model_copy(update={"high": min(domain.high, domain.low + 6 * (domain.step or 1))})
            more = ", ..." if domain.step is not None and num_steps(domain) > num_steps(first) else ""
            shown = ", ".join(as_written(value) for value in grid_values(first) or []) + more
            text = f"search_space.{name}: high ({domain.high:g}) is no step from low; the values are {{{shown}}}"
            self.notices.append((("search_space", name), text))

    def _is_whole(self, path: tuple[str, ...], numbers: list[float]) -> bool:
        """Whether draws are integers: the field wants them, or it is a free parameter written in integers."""
        if not all(isinstance(number, int) for number in numbers):
            return False
        free = path[:2] in (("model", "params"), ("train", "optimizer_params"))
        return free or self._why_illegal(path, numbers[0] + 0.5) is not None

    def _values_are_legal(self, name: str, path: tuple[str, ...], domain: Domain) -> bool:
        if isinstance(domain, ChoicesSpec):
            values: list[Any] = domain.choices
        elif domain.kind == "int":
            values = [int(domain.low), int(highest(domain))]
        else:
            values = [domain.low, highest(domain)]
        for value in values:
            why = self._why_illegal(path, value)
            if why is not None:
                self._fault((name,), f"{'.'.join(path)} cannot be {as_written(value)}: {why[0]}", why[1])
                return False
        return True

    def _why_illegal(self, path: tuple[str, ...], value: Any) -> tuple[str, str] | None:
        """What the field says to one value, beside the section as the file has it; None if it accepts it."""
        section = _deep_copy(self.values.get(path[0]) or {})
        if not isinstance(section, dict):
            return None
        if path == ("train", "max_grad_value") and value is not None:
            section.setdefault("max_grad_norm", None)
        try:
            place(section, path[1:], value)
        except (TypeError, AttributeError):
            return "a key above it holds a value, not a section", "Name a key that the file may hold."
        try:
            SECTIONS[path[0]].model_validate({"name": "mlp", **section} if path[0] == "model" else section)
        except ValidationError as error:
            for detail in error.errors():
                if detail["type"] == "value_error" and self._already_wrong(path[0], detail["msg"]):
                    continue
                if detail["loc"][: len(path) - 1] == path[1:] or detail["type"] == "value_error":
                    fault = to_fault(detail, section)
                    if fault.what == "unknown key":
                        params = f"Did you mean model.params.{path[-1]}?" if path[0] == "model" else fault.todo
                        return "there is no such key", params
                    return fault.what, fault.todo
        return None

    def _already_wrong(self, name: str, message: str) -> bool:
        """Whether the section says so without any drawn value: then that is the fault, and it is said there."""
        try:
            SECTIONS[name].model_validate(self.values.get(name) or {})
        except ValidationError as error:
            return any(detail["msg"] == message for detail in error.errors())
        return False

    def _check_conditions(self) -> None:
        for name, domain in self.domains.items():
            for cause, wanted in domain.when.items():
                path = field_path(cause)
                if path is None:
                    self._fault((name, "when", cause), "there is no such field", _name_hint(cause))
                    continue
                self._check_condition_values(name, cause, path, wanted)
        try:
            suggestion_order(self.domains)
        except SpecError as error:
            self.faults.append(error.fault)

    def _check_condition_values(self, name: str, cause: str, path: tuple[str, ...], wanted: list[Any]) -> None:
        domain = self.domains.get(cause)
        if not wanted:
            self._fault((name, "when", cause), "names no value, so it never holds", "Name one, or remove `when`.")
        for value in wanted:
            if domain is not None and not contains(domain, value):
                self._fault((name, "when", cause), f"is never {as_written(value)}", _range_hint(domain))
            elif domain is None and (why := self._why_illegal(path, value)) is not None:
                self._fault((name, "when", cause), f"cannot be {as_written(value)}: {why[0]}", why[1])

    def _check_grid(self) -> None:
        sampler = self.values.get("sampler")
        if not isinstance(sampler, dict) or sampler.get("name") != "grid":
            return
        for name, domain in self.domains.items():
            if grid_values(domain) is None:
                self._fault(
                    (name,), "the grid sampler needs single values", "Write `choices`, or a `step` without log."
                )
            if domain.when:
                self._fault(
                    (name, "when"), "the grid sampler knows no conditions", "Remove `when` or use another sampler."
                )

    def _check_enqueued(self) -> None:
        points = self.values.get("enqueue")
        if points and isinstance(self.values.get("sampler"), dict) and self.values["sampler"].get("name") == "grid":
            todo = "Remove one of the two; a grid runs every point anyway."
            self.faults.append(Fault(("enqueue",), "the grid sampler takes no enqueued points", todo))
        for index, point in enumerate(points if isinstance(points, list) else []):
            for name, value in point.items() if isinstance(point, dict) else []:
                at: KeyPath = ("enqueue", index, name)
                if name not in (self.values.get("search_space") or {}):
                    near = difflib.get_close_matches(str(name), list(self.domains), n=1)
                    todo = f"Did you mean {near[0]}?" if near else "Name parameters of the search space only."
                    self.faults.append(Fault(at, "is not in the search space", todo))
                elif name in self.domains and not contains(self.domains[name], value):
                    self.faults.append(
                        Fault(at, f"{as_written(value)} is outside its range", _range_hint(self.domains[name]))
                    )


def contains(domain: Domain, value: Any) -> bool:
    """Whether a point's value is one that the domain can draw."""
    if isinstance(domain, ChoicesSpec):
        return any(same(value, choice) for choice in domain.choices)
    if isinstance(value, bool) or not isinstance(value, int | float) or not domain.low <= value <= domain.high:
        return False
    if domain.kind == "int" and value != int(value):
        return False
    steps = (value - domain.low) / domain.step if domain.step else 0.0
    return abs(steps - round(steps)) < 1e-6


def _is_scalar(value: Any) -> bool:
    """Whether a database can keep the value: text, a boolean, null, or a number that fits."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return math.isfinite(value) if isinstance(value, float) else abs(value) < 2**63
    return value is None or isinstance(value, bool | str)


def _range_hint(domain: Domain) -> str:
    if isinstance(domain, ChoicesSpec):
        return f"It is one of {', '.join(map(as_written, domain.choices))}."
    step = f" in steps of {domain.step:g}" if domain.step else ""
    return f"It goes from {domain.low:g} to {domain.high:g}{step}."


def _name_hint(name: str) -> str:
    names = field_names()
    plain = name.removeprefix("train.")
    last = USUAL_NAMES.get(plain, plain.rpartition(".")[2])
    near = [found for found in (plain, last) if found in names] or difflib.get_close_matches(plain, names, n=1)
    if near:
        return f"Did you mean {near[0]}?"
    return "Use a name that stands under `train`, or a dotted one such as model.params.width or scheduler.gamma."


def _database_key(value: Any) -> Any:
    return float(value) if isinstance(value, bool | int | float) else value


def _deep_copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _deep_copy(item) for key, item in value.items()}
    return value
