"""The study's database: opening it, and the lock beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock
import optuna
import sqlalchemy as sa
from optuna.storages import RDBStorage

from sweeper.errors import DatabaseError, StorageError

BUSY_TIMEOUT_S = 60.0
LOCK_POLL_S = 0.01


def sqlite_path(url: str) -> Path:
    """The absolute path of the database file. Raises `StorageError` for anything but a file of SQLite."""
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError as error:
        raise StorageError(f"storage: {url!r} is not a database URL. Write `sqlite:///mlruns/optuna.db`.") from error
    if parsed.get_backend_name() != "sqlite":
        # The URL itself may hold a password.
        raise StorageError(
            f"storage: a study cannot be kept in {parsed.get_backend_name()}. Write `sqlite:///mlruns/optuna.db`."
        )
    name = parsed.database
    if name is None or name in ("", ":memory:") or name.startswith("file:"):
        raise StorageError(f"storage: {url!r} names no file. Write `sqlite:///mlruns/optuna.db`.")
    return Path(name).absolute()


@contextmanager
def storage_lock(url: str) -> Iterator[None]:
    """Hold the lock beside the database, `<file>.lock`, against all other processes and threads; waits for it.

    The thread that holds it may take it again. Raises `StorageError` when the file cannot be made.
    """
    path = sqlite_path(url)
    if not path.parent.is_dir():  # filelock would create it
        raise StorageError(f"{path}: its folder does not exist. Create it, or correct `storage`.")
    lock = filelock.FileLock(f"{path}.lock", is_singleton=True)
    try:
        lock.acquire(poll_interval=LOCK_POLL_S)
    except OSError as error:
        raise StorageError(
            f"{path}.lock: cannot be locked: {error}. Choose a `storage` that can be written."
        ) from error
    try:
        yield
    finally:
        lock.release()


def open_storage(url: str) -> RDBStorage:
    """Open the database and create its tables if it is new; its folder must exist.

    Raises `StorageError` when it cannot be opened or is not Optuna's. A relative path is resolved now, so that a later
    change of the working directory does not matter.
    """
    path = sqlite_path(url)
    absolute = sa.make_url(url).set(database=str(path)).render_as_string(hide_password=False)
    with storage_lock(url):  # two processes that create the tables at once raise
        return _open(path, absolute)


def open_to_read(url: str) -> RDBStorage:
    """Open a database that exists to look at it: takes no lock, writes nothing, works in a read-only folder.

    Raises `StorageError` as `open_storage` does.
    """
    path = sqlite_path(url)
    read_only = sa.URL.create("sqlite", database=path.as_uri(), query={"mode": "ro", "uri": "true"})
    return _open(path, read_only.render_as_string(), skip_table_creation=True)


@contextmanager
def optuna_answering(url: str) -> Iterator[None]:
    """Optuna's word for a database that does not answer becomes ours. Raises `DatabaseError`."""
    try:
        yield
    except optuna.exceptions.StorageInternalError as error:
        cause = getattr(error.__cause__, "orig", None) or error.__cause__ or error
        raise DatabaseError(
            f"{sqlite_path(url)}: the database does not answer: {cause}\n"
            "  Close the program that holds it, then run the same command again: it goes on where it stopped."
        ) from error


def _open(path: Path, url: str, skip_table_creation: bool = False) -> RDBStorage:
    try:
        return RDBStorage(
            url.replace("{", "{{").replace("}", "}}"),  # Optuna fills its URLs with str.format
            engine_kwargs={"connect_args": {"timeout": BUSY_TIMEOUT_S}},
            skip_table_creation=skip_table_creation,
        )
    except (sa.exc.DBAPIError, optuna.exceptions.StorageInternalError, RuntimeError) as error:
        why = error.orig if isinstance(error, sa.exc.DBAPIError) else error.__cause__ or error
        why = why.orig if isinstance(why, sa.exc.DBAPIError) else why
        raise StorageError(
            f"{path}: cannot be used as Optuna's database: {why}\n"
            "  Correct `storage`, or move the file away to begin anew."
        ) from error
