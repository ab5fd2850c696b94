"""Optuna's tables, and the statements on them that Optuna does not offer.

Tables, not the mapped classes: on PostgreSQL their columns carry the types (`state` is an ENUM) into the SQL. Every
statement works on SQLite and on PostgreSQL.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import optuna
import sqlalchemy as sa
from optuna.storages._rdb import models
from optuna.trial import TrialState
from sqlalchemy.dialects import postgresql, sqlite

from sweeper.errors import DatabaseError

TRIALS = models.TrialModel.__table__
VALUES = models.TrialValueModel.__table__
REPORTS = models.TrialIntermediateValueModel.__table__
USER_ATTRS = models.TrialUserAttributeModel.__table__
SYSTEM_ATTRS = models.TrialSystemAttributeModel.__table__
HEARTBEATS = models.TrialHeartbeatModel.__table__

OWNER_KEY = "sweeper:owner"


@contextmanager
def answering(engine: sa.Engine) -> Iterator[None]:
    """Turn "the database does not answer" into a `DatabaseError` that names it, without its password."""
    try:
        yield
    except (sa.exc.OperationalError, sa.exc.InterfaceError, optuna.exceptions.StorageInternalError) as error:
        cause = error.orig if isinstance(error, sa.exc.DBAPIError) else error.__cause__
        raise DatabaseError(
            f"{engine.url.render_as_string()}: the database does not answer: {cause}\n"
            "  Close the program that holds it, then run the same command again: it goes on where it stopped."
        ) from error


@contextmanager
def transaction(engine: sa.Engine) -> Iterator[sa.Connection]:
    with answering(engine), engine.begin() as connection:
        yield connection


def utc_now() -> datetime.datetime:
    """Without a zone, as Optuna keeps `datetime_start` and `datetime_complete`."""
    return datetime.datetime.now(datetime.UTC).replace(tzinfo=None)


def database_now(connection: sa.Connection) -> datetime.datetime:
    """The clock of heartbeats. PostgreSQL's answer carries a zone, its heartbeats do not."""
    return connection.execute(sa.select(sa.func.now())).scalar_one().replace(tzinfo=None)


def is_running(trial_id: int) -> sa.ColumnElement[bool]:
    return sa.exists().where(TRIALS.c.trial_id == trial_id, TRIALS.c.state == TrialState.RUNNING)


def is_owned_by(trial_id: int, owner: str) -> sa.ColumnElement[bool]:
    return sa.exists().where(*_owner_row(trial_id, owner))


def beat_not_since(trial_id: int, heartbeat: datetime.datetime) -> sa.ColumnElement[bool]:
    # `<=`, not `==`: SQLite compares text, where Optuna's times end in ".000000" or not.
    return sa.exists().where(HEARTBEATS.c.trial_id == trial_id, HEARTBEATS.c.heartbeat <= heartbeat)


def change_owner(
    connection: sa.Connection, trial_id: int, seen: str, owner: str, *conditions: sa.ColumnElement[bool]
) -> bool:
    """Test and set: whether the owner was `seen`, and is `owner` now."""
    change = sa.update(SYSTEM_ATTRS).where(*_owner_row(trial_id, seen), *conditions)
    return connection.execute(change.values(value_json=owner)).rowcount == 1


def set_first_owner(connection: sa.Connection, trial_id: int, owner: str) -> bool:
    """Whether a running trial had no owner, and has `owner` now."""
    row = sa.select(sa.literal(trial_id), sa.literal(OWNER_KEY), sa.literal(owner)).where(is_running(trial_id))
    insert = _insert(connection, SYSTEM_ATTRS).from_select(["trial_id", "key", "value_json"], row)
    options = {"preserve_rowcount": True}  # SQLAlchemy keeps it by itself only for UPDATE and DELETE
    return connection.execute(insert.on_conflict_do_nothing(), execution_options=options).rowcount == 1


def start_waiting(connection: sa.Connection, trial_id: int) -> bool:
    """Test and set: whether the trial was WAITING, and is RUNNING now."""
    start = sa.update(TRIALS).where(TRIALS.c.trial_id == trial_id, TRIALS.c.state == TrialState.WAITING)
    return connection.execute(start.values(state=TrialState.RUNNING, datetime_start=utc_now())).rowcount == 1


def end_running(connection: sa.Connection, trial_id: int, state: TrialState, value: float | None) -> bool:
    """Test and set: whether the trial was RUNNING, and has ended in `state` with `value` now."""
    end = sa.update(TRIALS).where(TRIALS.c.trial_id == trial_id, TRIALS.c.state == TrialState.RUNNING)
    if connection.execute(end.values(state=state, datetime_complete=utc_now())).rowcount == 0:
        return False
    if value is not None:
        number, kind = models.TrialValueModel.value_to_stored_repr(value)
        row = {"trial_id": trial_id, "objective": 0, "value": number, "value_type": kind}
        connection.execute(sa.insert(VALUES).values(row))
    return True


def beat(connection: sa.Connection, trial_id: int) -> None:
    _upsert(connection, HEARTBEATS, {"trial_id": trial_id}, {"heartbeat": sa.func.now()})


def beat_if(connection: sa.Connection, trial_id: int, *conditions: sa.ColumnElement[bool]) -> bool:
    """One statement: whether the conditions hold, and the heartbeat is now."""
    renew = sa.update(HEARTBEATS).where(HEARTBEATS.c.trial_id == trial_id, *conditions)
    return connection.execute(renew.values(heartbeat=sa.func.now())).rowcount == 1


def set_attr(connection: sa.Connection, table: sa.Table, trial_id: int, key: str, value: Any) -> None:
    """Set a user or system attribute, whatever the trial's state."""
    _upsert(connection, table, {"trial_id": trial_id, "key": key}, {"value_json": json.dumps(value)})


def add_reports(connection: sa.Connection, trial_id: int, values: Mapping[int, float]) -> None:
    """Report values at the steps that have none."""
    for step, value in values.items():
        number, kind = models.TrialIntermediateValueModel.intermediate_value_to_stored_repr(value)
        row = {"trial_id": trial_id, "step": step, "intermediate_value": number, "intermediate_value_type": kind}
        connection.execute(_insert(connection, REPORTS).values(row).on_conflict_do_nothing())


def running_trials(study_id: int) -> sa.Select[Any]:
    """Rows of (trial id, number, start, owner's text or None, heartbeat or None), by number."""
    owner = sa.and_(SYSTEM_ATTRS.c.trial_id == TRIALS.c.trial_id, SYSTEM_ATTRS.c.key == OWNER_KEY)
    trial = (TRIALS.c.trial_id, TRIALS.c.number, TRIALS.c.datetime_start)
    return (
        sa.select(*trial, SYSTEM_ATTRS.c.value_json, HEARTBEATS.c.heartbeat)
        .select_from(TRIALS)
        .outerjoin(SYSTEM_ATTRS, owner)
        .outerjoin(HEARTBEATS, HEARTBEATS.c.trial_id == TRIALS.c.trial_id)
        .where(TRIALS.c.study_id == study_id, TRIALS.c.state == TrialState.RUNNING)
        .order_by(TRIALS.c.number)
    )


def waiting_trials(study_id: int) -> sa.Select[Any]:
    """Their ids, the oldest first."""
    waiting = sa.select(TRIALS.c.trial_id).where(TRIALS.c.study_id == study_id, TRIALS.c.state == TrialState.WAITING)
    return waiting.order_by(TRIALS.c.trial_id)


def num_by_state(study_id: int) -> sa.Select[Any]:
    """Rows of (state, number of trials), for the states that occur."""
    in_study = sa.select(TRIALS.c.state, sa.func.count()).where(TRIALS.c.study_id == study_id)
    return in_study.group_by(TRIALS.c.state)


def num_counted(study_id: int) -> sa.Select[Any]:
    """How many trials are COMPLETE, RUNNING, or PRUNED with another reason than `outside_limits`."""
    outside = sa.exists().where(
        USER_ATTRS.c.trial_id == TRIALS.c.trial_id,
        USER_ATTRS.c.key == "stop_reason",
        USER_ATTRS.c.value_json == json.dumps("outside_limits"),
    )
    counted = TRIALS.c.state.in_([TrialState.COMPLETE, TrialState.RUNNING, TrialState.PRUNED])
    in_study = sa.select(sa.func.count()).select_from(TRIALS).where(TRIALS.c.study_id == study_id, counted)
    return in_study.where(~outside)


def _owner_row(trial_id: int, owner: str) -> tuple[sa.ColumnElement[bool], ...]:
    return (
        SYSTEM_ATTRS.c.trial_id == trial_id,
        SYSTEM_ATTRS.c.key == OWNER_KEY,
        SYSTEM_ATTRS.c.value_json == owner,
    )


def _insert(connection: sa.Connection, table: sa.Table) -> Any:
    """An INSERT that can say `on_conflict_...`, which both databases have and SQL's standard does not."""
    return {"sqlite": sqlite.insert, "postgresql": postgresql.insert}[connection.dialect.name](table)


def _upsert(connection: sa.Connection, table: sa.Table, keys: dict[str, Any], values: dict[str, Any]) -> None:
    insert = _insert(connection, table).values(**keys, **values)
    connection.execute(insert.on_conflict_do_update(index_elements=list(keys), set_=values))
