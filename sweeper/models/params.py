"""The parameters of a model, read strictly; and what every image network asks of the data."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, TypeVar

from pydantic import ValidationError

from sweeper.errors import SpecError
from sweeper.faultwords import to_fault
from sweeper.records import DataInfo
from sweeper.spec import Section

P = TypeVar("P", bound=Section)


def read_params(schema: type[P], params: dict[str, Any], owner: str) -> P:
    """`params` as `schema`; `owner` is the model's name in messages.

    Raises `SpecError` with the key path of the first parameter that is unknown or has an impossible value.
    """
    try:
        return schema.model_validate(params)
    except ValidationError as error:
        first = error.errors()[0]
    key, names = str(first["loc"][0]), list(schema.model_fields)
    takes = f"{owner} takes {', '.join(f'`{name}`' for name in names) or 'no parameters'}."
    if first["type"] == "extra_forbidden":
        raise SpecError(("model", "params", key), f"{owner} has no such parameter", did_you_mean(key, names) + takes)
    fault = to_fault(first, params)
    raise SpecError(("model", "params", *fault.path), fault.what, f"{fault.todo} {takes}")


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """A sentence that names the most similar of `names`, with a space behind it; empty when none is near."""
    near = difflib.get_close_matches(word, list(names), n=1)
    return f"Did you mean `{near[0]}`? " if near else ""


def image_shape(info: DataInfo, owner: str) -> tuple[int, int, int]:
    """(channels, height, width) of one sample. Raises `SpecError` when the data holds no images."""
    if len(info.input_shape) != 3:
        raise SpecError(
            ("model", "name"),
            f"{owner} takes images (channels, height, width), but a sample of {info.name} has the shape"
            f" {info.input_shape}",
            "Use `mlp`, which takes any shape, or a model of your own.",
        )
    channels, height, width = info.input_shape
    return channels, height, width
