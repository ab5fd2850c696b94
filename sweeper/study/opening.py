"""Open or create a study: its databases' folders, its fingerprint, its fixed facts, its enqueued points."""

from __future__ import annotations

import json
import os
import uuid
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from pydantic import ValidationError

from sweeper.errors import StorageError, StudyChangedError
from sweeper.imports import is_import_path
from sweeper.ownership import open_storage, sqlite_path, storage_lock
from sweeper.records import DataInfo
from sweeper.space import same
from sweeper.spec import FINGERPRINT_SECTIONS, ChoicesSpec, RangeSpec, Scalar, StudySpec
from sweeper.study.samplers import make_pruner, make_sampler

SPEC = "sweeper:spec"
THREADS = "sweeper:threads"
TOKEN = "sweeper:token"
DATA = "sweeper:data"


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
    make_folder(sqlite_path(spec.storage).parent, "storage: sqlite:///FOLDER/optuna.db")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    # Built before the study exists: an argument that a sampler refuses must leave nothing behind.
    sampler, pruner = make_sampler(spec, 0), make_pruner(spec)
    with storage_lock(spec.storage):
        study = optuna.create_study(
            study_name=spec.study,
            storage=open_storage(spec.storage),
            direction=spec.objective.direction,
            sampler=sampler,
            pruner=pruner,
            load_if_exists=True,
        )
        if SPEC in study.user_attrs:
            compare(spec, study)
        elif study.get_trials(deepcopy=False):
            raise StorageError(
                f"The database {spec.storage} holds a study {spec.study!r} that another program made\n"
                "  Give this study another name, or another database with `storage`."
            )
        else:
            _write_facts(spec, study)
        _enqueue(spec, study)
    begun_with = study.user_attrs[THREADS]
    threads = begun_with if spec.workers.threads == "auto" else spec.workers.threads
    if threads != begun_with:
        warnings.warn(
            f"workers.threads is {threads}, and the study began with {begun_with}: another number adds in another "
            "order, so that values differ in their last digits",
            stacklevel=2,
        )
    return OpenStudy(study, threads, study.user_attrs[TOKEN])


def _write_facts(spec: StudySpec, study: optuna.Study) -> None:
    """What stays with the study. The spec comes last: with it the study is begun, without it a kill came before."""
    threads = _num_cores() if spec.workers.threads == "auto" else spec.workers.threads
    study.set_user_attr(THREADS, threads)
    study.set_user_attr(TOKEN, uuid.uuid4().hex)
    # Without the places of databases: they may change, and may hold a password.
    places = {"storage", "tracking", "checkpoints"}
    study.set_user_attr(SPEC, spec.model_dump_json(exclude_unset=True, exclude=places))


def _num_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def folder_name(study: str, token: str) -> str:
    """The folder of a study's checkpoints, or of its spool: never that of another study of the same name, whose
    database was moved away or stands elsewhere."""
    return f"{study}-{token[:8]}"


def stored_spec(spec: StudySpec, study: optuna.Study) -> StudySpec:
    """`spec` with the sections that the study was begun with: its trials were drawn and trained by them.

    Raises `StorageError` when this version of the program no longer understands them.
    """
    if SPEC not in study.user_attrs:
        raise StorageError(
            f"The study {spec.study!r} in {spec.storage} was interrupted while it was created\n  `sweep run` goes on."
        )
    try:
        begun = StudySpec.model_validate_json(study.user_attrs[SPEC], strict=False)
    except ValidationError as error:
        raise StorageError(
            f"The study {spec.study!r} in {spec.storage} was not begun by this version of sweeper: {error}\n"
            "  Give the file another `study` name to begin anew."
        ) from None
    return spec.model_copy(update={name: getattr(begun, name) for name in FINGERPRINT_SECTIONS})


def note_data(study: optuna.Study, spec: StudySpec, info: DataInfo) -> None:
    """Keep what the data was with the study, and compare.

    Raises `StudyChangedError` when it is another than at the beginning: other pictures in the same folder, say. Of a
    user's own data this is a warning, because it may be drawn anew each time.
    """
    now: dict[str, Any] = {"digest": info.digest, "sizes": info.sizes}
    before = study.user_attrs.get(DATA)
    if before is None:
        study.set_user_attr(DATA, now)
    if before in (None, now):
        return
    sizes = [", ".join(f"{size} {name}" for name, size in seen["sizes"].items()) for seen in (before, now)]
    what = (
        f"The data of the study {spec.study!r} is not what it was when the study began: it had {sizes[0]} (hash "
        f"{before['digest']}), now {sizes[1]} ({now['digest']})"
    )
    if is_import_path(spec.data.source):
        warnings.warn(f"{what}; values of earlier and later trials may not compare", stacklevel=2)
        return
    raise StudyChangedError(
        f"{what}.\n  Its trials would not compare. Put the data back, or give the file another `study` name."
    )


def make_folder(folder: Path, where: str) -> None:
    """Raises `StorageError`, which says with `where` how the file names another place."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StorageError(
            f"The folder {folder.absolute()} cannot be made: {reason}\n  Choose another place with `{where}`."
        ) from None


def compare(spec: StudySpec, study: optuna.Study) -> None:
    """Raises `StudyChangedError` with every difference in the sections that make trials comparable."""
    changes = differences(_json(stored_spec(spec, study)), _json(spec))
    if changes:
        shown = "\n".join(f"  {name}: was {before}, now {now}" for name, before, now in changes)
        raise StudyChangedError(
            f"The study {spec.study!r} was begun with other settings:\n{shown}\n"
            "  Its trials would not compare. Undo the change, or give the file another `study` name to begin anew."
        )


def _json(spec: StudySpec) -> Any:
    return json.loads(json.dumps(spec.fingerprint()))


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
    if isinstance(domain, ChoicesSpec):
        return next(choice for choice in domain.choices if same(value, choice))
    if isinstance(domain, RangeSpec) and value is not None:
        return int(value) if domain.kind == "int" else float(value)
    return value
