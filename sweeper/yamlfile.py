"""A YAML 1.2 file as plain Python values, with the line of every key."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from sweeper.errors import StudyFileError, SweeperError

KeyPath = tuple[str | int, ...]


class YamlFile:
    """The values of a file and where they stand. `values` is {} for an empty file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = _read_text(path)
        try:
            self._tree = self._parse()
            self.values: dict[str, Any] = plain(self._tree) if self._tree is not None else {}
        except (RecursionError, ValueError, AttributeError, TypeError) as error:
            # Aliases that hold themselves, thousands of brackets, numbers of thousands of digits.
            raise StudyFileError(f"{path}:1: cannot be read as a study: {error}\n  Write it more simply.", []) from None

    def _parse(self) -> Any:
        try:
            tree = YAML(typ="rt").load(self.text)
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = mark.line + 1 if mark is not None else 1
            problem = " ".join((error.problem or str(error)).split())
            raise StudyFileError(f"{self.path}:{line}: {_in_words(problem)}", []) from None
        except YAMLError as error:
            raise StudyFileError(f"{self.path}:1: {' '.join(str(error).split())}", []) from None
        if tree is not None and not isinstance(tree, CommentedMap):
            raise StudyFileError(
                f"{self.path}:1: a study file holds keys and values, this one holds {type(plain(tree)).__name__}\n"
                "  Start it with `study: NAME`; `objective`, `data`, `model`, `search_space` and `budget` follow.",
                [],
            )
        return tree

    def line(self, path: Sequence[str | int]) -> int:
        """The line (from 1) of the key at `path`, or of the nearest key above it that the file has."""
        line, node = 1, self._tree
        for key in path:
            if not isinstance(node, CommentedMap | CommentedSeq) or not _has(node, key):
                break
            if not node.lc.data or key not in node.lc.data:
                break  # it came in by a merge key: its own line is elsewhere
            line = node.lc.data[key][0] + 1
            node = node[key]
        return line


def _has(node: CommentedMap | CommentedSeq, key: str | int) -> bool:
    if isinstance(node, CommentedMap):
        return key in node
    return isinstance(key, int) and key < len(node)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SweeperError(f"{path}: there is no such file\n  Looked for {path.absolute()}.") from None
    except IsADirectoryError:
        raise SweeperError(f"{path}: is a folder\n  Name the study file in it.") from None
    except UnicodeDecodeError as error:
        raise SweeperError(f"{path}: is not UTF-8 text (byte {error.start})\n  Save it as UTF-8.") from None
    except OSError as error:
        raise SweeperError(f"{path}: cannot be read: {error.strerror}") from None


def _in_words(problem: str) -> str:
    if problem.startswith("found duplicate key"):
        name = problem.split('"')[1] if '"' in problem else problem.removeprefix("found duplicate key ").split(" ")[0]
        return f"the key {name!r} stands twice\n  Keep one of the two; they would overwrite each other."
    if "'\\t'" in problem:
        return "this line is indented with a tab\n  Use spaces: YAML takes no tabs there."
    return f"this is not YAML: {problem}\n  Look at the indentation, colons and brackets here and in the line above."


def plain(node: Any) -> Any:
    """ruamel's values with positions and comments taken off: dict, list, str, bool, int, float, None."""
    if isinstance(node, Mapping):
        return {key if isinstance(key, int | float) else str(key): plain(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [plain(value) for value in node]
    if isinstance(node, bool) or node is None:
        return node
    if isinstance(node, str):
        if "\0" in node:
            raise ValueError(f"{str(node)!r} holds a NUL, which no path and no database takes")
        return str(node)
    if isinstance(node, datetime.date):  # YAML 1.2 has no dates: it is text that looks like one
        return node.isoformat()
    for kind in (int, float):
        if isinstance(node, kind):
            return kind(node)
    return node


def as_written(value: Any) -> str:
    """A value as it would stand in YAML, for messages."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:g}"
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


LONGEST_SHOWN = 60
