"""Open or create a study: its databases' folders, its fingerprint, its fixed facts, its enqueued points."""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna

from sweeper.errors import StorageError, StudyChangedError
from sweeper.ownership import open_storage, sqlite_path, storage_lock
from sweeper.spec import RangeSpec, Scalar, StudySpec
from sweeper.study.samplers import make_pruner, make_sampler

FINGERPRINT = "sweeper:fingerprint"
THREADS = "sweeper:threads"
TOKEN = "sweeper:token"


@dataclass(frozen=True)
class OpenStudy:
    """`threads` per worker is a fact of the study: another number of threads rounds differently. `token` tells it
    from an earlier study of the same name."""

    study: optuna.Study
    threads: int
    token: str


def open_study(spec: StudySpec) -> OpenStudy:
    """Create the study or open the stored one.

    Raises `StudyChangedError`, with every difference, when a section that makes old and new trials incomparable was
    changed; `StorageError` when the database cannot be used. Safe against others doing the same at once.
    """
    _make_folder(sqlite_path(spec.storage).parent)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with storage_lock(spec.storage):
        storage = open_storage(spec.storage)
        names = [summary.study_name for summary in optuna.get_all_study_summaries(storage=storage)]
        is_new = spec.study not in names
        # Checked before the study exists: an argument that a sampler refuses must leave nothing behind.
        sampler, pruner = make_sampler(spec, 0), make_pruner(spec)
        study = optuna.create_study(
            study_name=spec.study,
            storage=storage,
            direction=spec.objective.direction,
            sampler=sampler,
            pruner=pruner,
            load_if_exists=True,
        )
        if is_new:
            threads = len(os.sched_getaffinity(0)) if spec.workers.threads == "auto" else spec.workers.threads
            study.set_user_attr(FINGERPRINT, json.dumps(spec.fingerprint()))
            study.set_user_attr(THREADS, threads)
            study.set_user_attr(TOKEN, uuid.uuid4().hex)
        else:
            _compare(spec, study)
        _enqueue(spec, study)
    threads = study.user_attrs[THREADS]
    if spec.workers.threads != "auto":
        threads = spec.workers.threads
    return OpenStudy(study, threads, study.user_attrs[TOKEN])


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"The database's folder {folder.absolute()} cannot be made: {error.strerror}\n"
            "  Choose another place with `storage: sqlite:///FOLDER/optuna.db`."
        ) from None


def _compare(spec: StudySpec, study: optuna.Study) -> None:
    stored_text = study.user_attrs.get(FINGERPRINT)
    if stored_text is None:
        raise StorageError(
            f"The database {spec.storage} holds a study {spec.study!r} that another program made\n"
            "  Give this study another name, or another database with `storage`."
        )
    changes = differences(json.loads(stored_text), json.loads(json.dumps(spec.fingerprint())))
    if changes:
        shown = "\n".join(f"  {name}: was {before}, now {now}" for name, before, now in changes)
        raise StudyChangedError(
            f"The study {spec.study!r} was begun with other settings:\n{shown}\n"
            "  Its trials would not compare. Undo the change, or give the file another `study` name to begin anew."
        )


def differences(before: Any, now: Any, name: str = "") -> list[tuple[str, str, str]]:
    """(key path, stored value, new value) of everything that differs, as JSON text."""
    if isinstance(before, dict) and isinstance(now, dict):
        changes = []
        for key in dict.fromkeys([*before, *now]):
            changes += differences(before.get(key, _ABSENT), now.get(key, _ABSENT), f"{name}.{key}" if name else key)
        return changes
    if before == now and isinstance(before, bool) == isinstance(now, bool):
        return []
    return [(name, _shown(before), _shown(now))]


_ABSENT = object()


def _shown(value: Any) -> str:
    return "absent" if value is _ABSENT else json.dumps(value)


def _enqueue(spec: StudySpec, study: optuna.Study) -> None:
    for point in spec.enqueue:
        study.enqueue_trial({name: _typed(spec, name, value) for name, value in point.items()}, skip_if_exists=True)


def _typed(spec: StudySpec, name: str, value: Scalar) -> Scalar:
    """Optuna compares points with their types: 1 is another point than 1.0."""
    domain = spec.search_space[name]
    if isinstance(domain, RangeSpec) and value is not None:
        return int(value) if domain.kind == "int" else float(value)
    return value
