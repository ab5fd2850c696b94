"""Where MLflow is, and whether that can work: answered without importing MLflow."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import urlsplit

from sweeper.errors import SpecError
from sweeper.tracking.texts import redact

SQLITE = "sqlite:///"
SQLITE_HEADER = b"SQLite format 3\0"


@dataclass(frozen=True)
class TrackingSettings:
    """`artifacts` is an absolute folder, for MLflow in a SQLite file; a server keeps artifacts where it was told to.

    `study_token` tells this study from an earlier one of the same name: any text made once, when the study is created,
    and kept with it. `parent_run_id` is what `Tracker.parent_ids` said last time, if it is known.
    """

    uri: str
    artifacts: PurePath
    study: str
    study_token: str
    monitor: str
    direction: str
    parent_run_id: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "artifacts": os.fspath(self.artifacts)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TrackingSettings:
        return cls(**{**values, "artifacts": Path(values["artifacts"])})

    @property
    def artifact_location(self) -> str | None:
        """The folder as a URI (a drive letter would be read as a scheme); None leaves the choice to the server."""
        return None if database_file(self.uri) is None else self.artifacts.as_uri()


def database_file(uri: str) -> Path | None:
    """The SQLite file that `uri` means; None for a server."""
    return Path(uri.removeprefix(SQLITE).partition("?")[0]) if uri.startswith(SQLITE) else None


def check_tracking(uri: str) -> None:
    """Find out now what would stop MLflow later. Creates nothing and asks no server, which may start later.

    Raises `SpecError` at `tracking.uri`.
    """
    database = database_file(uri)
    if database is None:
        _check_server(uri)
    else:
        _check_database(uri, database)


def _check_server(uri: str) -> None:
    try:
        usable = bool(urlsplit(uri).hostname) and urlsplit(uri).port != 0
    except ValueError:  # the port is no number, or too large
        usable = False
    if not usable:
        raise _unusable(uri, "has no usable host and port", "Write `http://HOST:PORT`.")


def _check_database(uri: str, database: Path) -> None:
    if database.name in ("", ":memory:"):
        raise _unusable(uri, "names no file", "Write `sqlite:///mlruns/mlflow.db`.")
    if database.is_dir():
        raise _unusable(uri, f"names a folder, {database.absolute()}", "Name a file in it.")
    if database.is_file():
        with database.open("rb") as file:
            head = file.read(len(SQLITE_HEADER))
        if head not in (b"", SQLITE_HEADER):
            raise _unusable(uri, f"names a file that is no SQLite database, {database.absolute()}", "Name another.")
    folder = next(parent for parent in database.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise _unusable(uri, f"lies below {folder}, which is no folder", "Choose another folder.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _unusable(uri, f"lies in {folder}, where you may not write", "Choose another folder.")


def _unusable(uri: str, what: str, todo: str) -> SpecError:
    return SpecError(("tracking", "uri"), f"{redact(uri)!r} {what}.", todo)
