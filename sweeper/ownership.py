"""Who runs which trial: claims, kept in the study's database and changed only by conditional writes.

Optuna alone cannot share trials safely: its WAITING -> RUNNING is no test-and-set on SQLite, and it accepts reports and
results from a worker that has lost its trial. So each running trial has one row, a system attribute `sweeper:owner`,
that is the lock. A claim changes in one short transaction whose first statement writes only if the row still holds what
the caller saw; the number of rows written decides. Writing first also makes SQLite wait for its lock, where a
transaction that has read first would fail.

The row holds `Owner.to_text()` while the owner runs the trial, then `{"released": owner}` or `{"told": owner}`.
"""

from __future__ import annotations

import datetime
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any, Literal

import optuna
import sqlalchemy as sa
from optuna.storages import BaseStorage, RDBStorage
from optuna.storages._cached_storage import _CachedStorage
from optuna.study._constrained_optimization import _CONSTRAINTS_KEY
from optuna.trial import TrialState

from sweeper import tables
from sweeper.errors import LostTrialError
from sweeper.owner import Owner
from sweeper.storage import open_storage, open_to_read, sqlite_path, storage_lock
from sweeper.tables import OWNER_KEY, transaction

__all__ = ["Claims", "Owner", "Renewal", "StaleTrial", "open_storage", "open_to_read", "sqlite_path", "storage_lock"]

NOTHING: Mapping[Any, Any] = MappingProxyType({})
WhyStale = Literal["released", "ownerless", "dead", "silent"]


@dataclass(frozen=True)
class StaleTrial:
    """A RUNNING trial that nobody runs, as it was seen.

    `reason`: "released" by a worker that left in good order; "ownerless": not started by sweeper; "dead": its process
    has ended; "silent": not renewed for longer than the grace period. `seen` is the owner's text (None: ownerless),
    `heartbeat` the last renewal on the database's clock.
    """

    trial_id: int
    number: int
    seen: str | None
    reason: WhyStale
    heartbeat: datetime.datetime | None


class Claims:
    """What one owner may do with the trials of one study. Threads may share it.

    Every method raises `StorageError` when the database does not answer.
    """

    def __init__(self, storage: BaseStorage, study_id: int, owner: Owner) -> None:
        """`storage` is `study._storage`, whose cache is then kept right, or an `RDBStorage`."""
        backend = storage._backend if isinstance(storage, _CachedStorage) else storage
        assert isinstance(backend, RDBStorage), f"{type(backend).__name__} has no tables"
        self.owner = owner
        self._me = owner.to_text()
        self._storage = storage
        self._study_id = study_id
        self._engine: sa.Engine = backend.engine

    # New work

    def claim_new(self, url: str, limit: int) -> int | None:
        """The id of a trial to run, the oldest enqueued or else a new one; None when `limit` trials count already."""
        with storage_lock(url):
            if self.num_counted() >= limit:
                return None
            waiting = self.pop_waiting()
            return self.create() if waiting is None else waiting

    def create(self) -> int:
        """A new RUNNING trial of mine; its id. Under `storage_lock`, without which SQLite may give a number twice."""
        # In the template the owner is stored together with the trial: there is no moment without one.
        template = optuna.create_trial(state=TrialState.RUNNING, system_attrs={OWNER_KEY: json.loads(self._me)})
        with tables.answering(self._engine):
            trial_id = self._storage.create_new_trial(self._study_id, template)
        with transaction(self._engine) as connection:
            tables.beat(connection, trial_id)
        return trial_id

    def pop_waiting(self) -> int | None:
        """Start the oldest enqueued trial as mine; its id, or None when none waits."""
        with transaction(self._engine) as connection:
            candidates = connection.execute(tables.waiting_trials(self._study_id)).scalars().all()
        for trial_id in candidates:
            with transaction(self._engine) as connection:
                won = tables.start_waiting(connection, trial_id)
                if won:
                    tables.set_attr(connection, tables.SYSTEM_ATTRS, trial_id, OWNER_KEY, json.loads(self._me))
                    tables.beat(connection, trial_id)
            if won:
                self._tell_cache()
                return trial_id
        return None

    # Interrupted work

    def stale(self, grace_period_s: float) -> list[StaleTrial]:
        """The RUNNING trials that nobody runs, by number.

        A process of this host that has ended is known at once; any other owner is stale once its heartbeat is older
        than `grace_period_s` (heartbeats in SQLite are whole seconds).
        """
        with transaction(self._engine) as connection:
            now = tables.database_now(connection)
            rows = connection.execute(tables.running_trials(self._study_id)).all()
        found = []
        for trial_id, number, started, seen, heartbeat in rows:
            # An owner that was killed right after it created the trial has no heartbeat: its start has to do.
            age = now - heartbeat if heartbeat is not None else tables.utc_now() - started
            reason = _why_stale(seen, is_silent=age > datetime.timedelta(seconds=grace_period_s))
            if reason is not None:
                found.append(StaleTrial(trial_id, number, seen, reason, heartbeat))
        return found

    def take_over(self, stale: StaleTrial) -> bool:
        """Make a stale trial mine; False when it has been taken, renewed or ended since it was seen."""
        with transaction(self._engine) as connection:
            if stale.seen is None:
                won = tables.set_first_owner(connection, stale.trial_id, self._me)
            else:
                conditions = [tables.is_running(stale.trial_id)]
                if stale.heartbeat is not None:
                    conditions.append(tables.beat_not_since(stale.trial_id, stale.heartbeat))
                won = tables.change_owner(connection, stale.trial_id, stale.seen, self._me, *conditions)
            if won:
                tables.beat(connection, stale.trial_id)
        if won:
            self._tell_cache()
        return won

    # My trial

    def renew(self, trial_id: int) -> bool:
        """Say that I still run this trial; False when it is no longer mine or no longer RUNNING."""
        with transaction(self._engine) as connection:
            return tables.beat_if(
                connection, trial_id, tables.is_owned_by(trial_id, self._me), tables.is_running(trial_id)
            )

    def release(self, trial_id: int) -> bool:
        """Leave my trial RUNNING, for any worker to continue at once; False as in `renew`."""
        with transaction(self._engine) as connection:
            running = tables.is_running(trial_id)
            return tables.change_owner(connection, trial_id, self._me, self._as("released"), running)

    def finish(
        self,
        trial_id: int,
        state: TrialState,
        value: float | None,
        *,
        intermediate: Mapping[int, float] = NOTHING,
        user_attrs: Mapping[str, Any] = NOTHING,
        constraints: Mapping[str, float] = NOTHING,
    ) -> bool:
        """Store how my trial ended, all of it; or nothing, and False, when it is no longer mine or no longer RUNNING.

        `intermediate` adds values at the steps that have none. A trial is infeasible when a constraint is above 0.
        """
        assert state.is_finished(), state
        assert value is None or value == value, "NaN is no result"
        assert value is not None or state != TrialState.COMPLETE, "a complete trial has a value"
        with transaction(self._engine) as connection:
            if not tables.change_owner(connection, trial_id, self._me, self._as("told")):
                return False
            if not tables.end_running(connection, trial_id, state, value):
                connection.rollback()  # someone ended it with another tool
                return False
            tables.add_reports(connection, trial_id, intermediate)
            for key, attr in user_attrs.items():
                tables.set_attr(connection, tables.USER_ATTRS, trial_id, key, attr)
            for name, constraint in constraints.items():
                key = f"{_CONSTRAINTS_KEY}:{name}"  # as Trial.set_constraint writes it
                tables.set_attr(connection, tables.SYSTEM_ATTRS, trial_id, key, float(constraint))
        return True

    def set_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        """Set a user attribute, of a trial that has ended too, which Optuna refuses.

        Another process that has listed the trial after its end keeps what it has seen.
        """
        with transaction(self._engine) as connection:
            tables.set_attr(connection, tables.USER_ATTRS, trial_id, key, value)
        with tables.answering(self._engine):
            # Optuna's cache holds an ended trial for ever, and hands out its own object here.
            self._storage.get_trial(trial_id).user_attrs[key] = value

    def set_attrs(self, trial_id: int, user: Mapping[str, Any], system: Mapping[str, Any] = NOTHING) -> None:
        """Set user and system attributes of my trial: all of them, or none. Raises `LostTrialError` as `renew` says."""
        with transaction(self._engine) as connection:
            mine = tables.is_owned_by(trial_id, self._me), tables.is_running(trial_id)
            if not tables.beat_if(connection, trial_id, *mine):
                raise LostTrialError(f"trial id {trial_id} is no longer run by this worker")
            for table, attrs in ((tables.USER_ATTRS, user), (tables.SYSTEM_ATTRS, system)):
                for key, value in attrs.items():
                    tables.set_attr(connection, table, trial_id, key, value)

    # Counting

    def trial_id(self, number: int) -> int:
        """The database's id of trial `number`, by which all methods go."""
        with tables.answering(self._engine):
            return self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)

    def counts(self) -> dict[str, int]:
        """The number of trials in each state, by the state's name; 0 for those that do not occur."""
        with transaction(self._engine) as connection:
            found = {state.name: count for state, count in connection.execute(tables.num_by_state(self._study_id))}
        return {state.name: found.get(state.name, 0) for state in TrialState}

    def num_counted(self) -> int:
        """How much of the budget is used: COMPLETE, PRUNED and RUNNING trials, without those `outside_limits`."""
        with transaction(self._engine) as connection:  # one statement: two would see two moments
            return connection.execute(tables.num_counted(self._study_id)).scalar_one()

    def num_failed(self) -> int:
        return self.counts()["FAIL"]

    def _as(self, word: Literal["released", "told"]) -> str:
        return json.dumps({word: json.loads(self._me)})

    def _tell_cache(self) -> None:
        with tables.answering(self._engine):
            # Optuna's cache refuses parameters for a trial that it has not listed.
            self._storage.get_all_trials(self._study_id, deepcopy=False)


class Renewal:
    """The heartbeat beside a running trial: a thread renews it every `interval_s`, however long the training blocks.

        with Renewal(claims, trial_id, interval_s=10) as renewal:
            ...
            renewal.check()  # before each report, rename, log and tell

    A database that does not answer is asked again an interval later. `lost` becomes true, for good, as soon as the
    trial belongs to someone else or has ended.
    """

    def __init__(self, claims: Claims, trial_id: int, interval_s: float) -> None:
        self.lost = False
        self._claims = claims
        self._trial_id = trial_id
        self._interval_s = interval_s
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"renewal-{trial_id}", daemon=True)

    def __enter__(self) -> Renewal:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._leave.set()
        self._thread.join()

    def check(self) -> None:
        """Renew now. Raises `LostTrialError` when the trial is lost, `StorageError` when the database is silent."""
        if os.getpid() != self._claims.owner.pid:
            os._exit(0)  # a child that the user's code forked, which goes on as if it were its parent
        if self.lost or not self._claims.renew(self._trial_id):
            self.lost = True
            raise LostTrialError(f"trial id {self._trial_id} is no longer run by this worker")

    def _run(self) -> None:
        while not self._leave.wait(self._interval_s):
            try:
                renewed = self._claims.renew(self._trial_id)
            except Exception:
                continue  # nothing may end this thread or print from it; `check` raises the same in the training
            if not renewed:
                self.lost = True
                return


def _why_stale(seen: str | None, is_silent: bool) -> WhyStale | None:
    """`seen` is the text of a RUNNING trial's owner."""
    if seen is None:
        return "ownerless"
    if "released" in json.loads(seen):
        return "released"
    if Owner.from_text(seen).is_dead():
        return "dead"
    return "silent" if is_silent else None
