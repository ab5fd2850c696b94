"""pydantic's errors as sentences for a person: what is wrong with the value, and what to do."""

from __future__ import annotations

import difflib
import typing
from typing import Any

from pydantic import BaseModel

from sweeper.errors import Fault
from sweeper.spec import StudySpec
from sweeper.yamlfile import KeyPath, as_written


def merge_alternatives(faults: list[Fault]) -> list[Fault]:
    """A key that may be, say, a number or `auto` fails once for each; its reader needs one sentence."""
    merged: dict[KeyPath, Fault] = {}
    # A list with a fault in it was meant as a list: that it is no single word either says nothing.
    inside = {fault.path[:-1] for fault in faults if isinstance(fault.path[-1:][0] if fault.path else None, int)}
    for fault in faults:
        if fault.path in inside:
            continue
        first = merged.get(fault.path)
        if first is None:
            merged[fault.path] = fault
        elif first.what.startswith("must be") and fault.what.startswith("must be"):
            wanted = first.what.removeprefix("must be ").split(", not ")[0]
            other = fault.what.removeprefix("must be ")
            merged[fault.path] = Fault(fault.path, f"must be {wanted} or {other}", first.todo)
    return list(merged.values())


def to_fault(detail: Any, values: dict[str, Any]) -> Fault:
    """One pydantic error in words. `values` is what was validated; its shape tells union branches from keys."""
    path = _real_path(detail["loc"], values)
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    written = as_written(value)
    if kind == "missing":
        return Fault(path, "is missing", "Add it; the README shows a complete file.")
    if kind == "extra_forbidden":
        return _unknown_key(path)
    if kind == "value_error":
        what, _, todo = str(context["error"]).partition(" | ")
        return Fault(path, what, todo)
    if kind == "literal_error":
        return Fault(path, f"must be {context['expected']}, not {written}", _closest(value, context["expected"]))
    if kind in WORDS:
        todo = _as_section(path, value) or _how_to_write(kind, value)
        return Fault(path, f"must be {WORDS[kind]}, not {written}{_kind_note(value)}", todo)
    if kind in BOUNDS:
        word, name = BOUNDS[kind]
        return Fault(path, f"must be {word} {context[name]}, not {written}", "Write a value in that range.")
    if kind == "finite_number":
        return Fault(path, f"must be a finite number, not {written}", "Write a number.")
    if kind == "string_pattern_mismatch" and path[-1:] == ("study",):
        return Fault(
            path,
            f"{written} cannot name a study",
            "Use letters, digits, dots, dashes and underscores: it also names a folder.",
        )
    if kind == "string_pattern_mismatch" and path[-1:] == ("device",):
        return Fault(path, f"{written} is not a device", "Write auto, cpu, cuda, cuda:1 or mps.")
    return Fault(path, f"{detail['msg'].lower()} (it is {written})", "Mend the value.")


WORDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "dict_type": "a section of keys and values",
    "model_type": "a section of keys and values",
    "list_type": "a list",
}
BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}


NAMED_SECTIONS = {
    "data": "source",
    "model": "name",
    "task": "name",
    "scheduler": "name",
    "sampler": "name",
    "pruner": "name",
}


def _as_section(path: KeyPath, value: Any) -> str | None:
    """How a word that stands where a section belongs would be written; None for other keys."""
    key = str(path[-1]) if path else ""
    if key == "early_stopping":
        return "To switch it off, write `early_stopping: {patience: 1000}`, or as many validations as there can be."
    if key not in NAMED_SECTIONS:
        return None
    word = value if isinstance(value, str) else "none" if key == "pruner" else "NAME"
    return f"Write `{key}: {{{NAMED_SECTIONS[key]}: {word}}}`."


def _kind_note(value: Any) -> str:
    return " (text)" if isinstance(value, str) else ""


def _how_to_write(kind: str, value: Any) -> str:
    if value in ("None", "none", "NULL"):
        return "YAML's word for nothing is `null`."
    if isinstance(value, str) and kind in ("int_type", "float_type") and _is_number(value):
        return f"Write it without quotes: {value.strip()}."
    if isinstance(value, str) and kind == "bool_type":
        return "YAML 1.2 knows only true and false; on, off, yes and no are text."
    if isinstance(value, bool) and kind == "string_type":
        return "Put it in quotes if the text is meant."
    return f"Write {WORDS[kind]}."


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _closest(value: Any, expected: str) -> str:
    options = [option.strip("'") for option in expected.replace(" or ", ", ").split(", ")]
    near = difflib.get_close_matches(str(value), options, n=1)
    if value == "off" or value is False:
        return "YAML 1.2 reads `off` as text and false as a boolean; write one of the listed words."
    return f"Did you mean {near[0]}?" if near else "Write one of the listed words."


def _real_path(location: tuple[str | int, ...], values: Any) -> KeyPath:
    """pydantic's location without the names of union branches, which are no keys of the file."""
    path: list[str | int] = []
    node = values
    for position, key in enumerate(location):
        last = position == len(location) - 1
        if isinstance(node, dict) and (key in node or last):
            path.append(key)
            node = node.get(key)
        elif isinstance(node, list) and isinstance(key, int):
            path.append(key)
            node = node[key] if key < len(node) else None
        elif isinstance(node, BaseModel) and key in type(node).model_fields:
            path.append(key)
            node = getattr(node, str(key))
    return tuple(path)


USUAL_NAMES = {
    "learning_rate": "lr",
    "epochs": "max_epochs",
    "num_epochs": "max_epochs",
    "gradient_accumulation_steps": "accumulation_steps",
    "grad_clip": "max_grad_norm",
    "gradient_clip_val": "max_grad_norm",
    "amp": "precision",
    "n_trials": "trials",
}
"""What other tools call our keys."""


def _unknown_key(path: KeyPath) -> Fault:
    *parents, name = path
    known = _known_keys(tuple(parents))
    near = difflib.get_close_matches(str(name), known, n=1)
    if name == "directions":
        todo = "A study has one objective: write `direction: minimize` or `direction: maximize`."
    elif near or USUAL_NAMES.get(str(name)) in known:
        todo = f"Did you mean {near[0] if near else USUAL_NAMES[str(name)]}?"
    else:
        todo = f"Known here: {', '.join(known)}." if known else "Remove it."
    return Fault(path, "unknown key", todo)


def _known_keys(path: KeyPath) -> list[str]:
    model: Any = StudySpec
    for key in path:
        if isinstance(key, int):
            continue
        annotation = model.model_fields[key].annotation if key in model.model_fields else None
        candidates = [annotation, *typing.get_args(annotation)]
        model = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
        if model is None:
            return []
    return list(model.model_fields)
