"""`pkg.module:function`: a network of the user's, made by `build(params: dict, data: DataInfo) -> nn.Module`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from sweeper.errors import SpecError
from sweeper.imports import import_object
from sweeper.records import DataInfo

WANTED = "Write `def build(params: dict, data: sweeper.DataInfo) -> torch.nn.Module`."


def find(import_path: str) -> Callable[[dict[str, Any], DataInfo], Any]:
    """The user's function. Raises `SpecError` when it cannot be imported or called."""
    function = import_object(import_path, ("model", "name"))
    if not callable(function):
        raise SpecError(
            ("model", "name"), f"{import_path} is of type {type(function).__name__}, not a function", WANTED
        )
    return function


def build(import_path: str, params: dict[str, Any], info: DataInfo) -> nn.Module:
    """What the function returns. Its own exceptions pass through; anything but a module is a `SpecError`."""
    model = find(import_path)(dict(params), info)
    if not isinstance(model, nn.Module):
        raise SpecError(
            ("model", "name"),
            f"{import_path} returned an object of type {type(model).__name__}, not a torch.nn.Module",
            WANTED,
        )
    return model
