"""Import what the user names: `pkg.module:attribute`, looked for in the study file's folder first."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from sweeper.errors import SpecError


def is_import_path(name: str) -> bool:
    """Whether `name` means the user's code. Built-in families (`torchvision:resnet18`) also hold a colon."""
    return ":" in name and not name.startswith("torchvision:")


def add_import_folder(folder: Path) -> None:
    """Let the study file's folder be imported from, once, ahead of installed packages."""
    text = str(folder.resolve())
    if text not in sys.path:
        sys.path.insert(0, text)


def import_object(import_path: str, key: tuple[str | int, ...]) -> Any:
    """The object behind `pkg.module:attribute`, which stands at `key` of the study file.

    Raises `SpecError` when the module or the attribute is missing; an error inside the user's module passes through
    as the cause, with its own traceback.
    """
    module_name, _, attribute = import_path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        todo = f"Looked beside the study file and in the installed packages; the import said: {error}."
        raise SpecError(key, f"module {module_name!r} cannot be imported", todo) from error
    except Exception as error:
        todo = f"Importing it raised {type(error).__name__}: {error}"
        raise SpecError(key, f"module {module_name!r} fails while it is imported", todo) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [name for name in vars(module) if not name.startswith("_")]
        todo = f"It has: {', '.join(sorted(public)[:12]) or 'nothing public'}."
        raise SpecError(key, f"module {module_name!r} has no {attribute!r}", todo) from None
