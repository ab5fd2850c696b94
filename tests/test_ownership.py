"""Who owns a trial: real databases, real processes, and races that are provoked."""

from __future__ import annotations

import dataclasses
import datetime
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from sweeper.errors import LostTrialError, StorageError
from sweeper.ownership import Claims, Owner, Renewal, StaleTrial, open_storage, sqlite_path, storage_lock

SPAWN = multiprocessing.get_context("spawn")
STUDY = "study"
LONG_S = 1000.0
ELSEWHERE = Owner("elsewhere", "boot", "pid:[1]", 1, "1", "token")


@pytest.fixture(autouse=True)
def _quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path}/optuna.db"
    optuna.create_study(storage=open_storage(url), study_name=STUDY, direction="maximize")
    return url


def load(url: str) -> optuna.Study:
    return optuna.load_study(storage=open_storage(url), study_name=STUDY, sampler=optuna.samplers.RandomSampler(seed=0))


def claims_of(study: optuna.Study, owner: Owner | None = None) -> Claims:
    return Claims(study._storage, study._study_id, owner or Owner.current())


def plain(url: str) -> optuna.Study:
    """The study as any other Optuna tool opens it."""
    return optuna.load_study(storage=url, study_name=STUDY)


def sql(url: str, statement: str, *values: Any) -> list[Any]:
    with closing(sqlite3.connect(sqlite_path(url), timeout=60)) as connection, connection:
        return connection.execute(statement, values).fetchall()


def age_heartbeat(url: str, trial_id: int, seconds: float) -> None:
    """As if the last renewal had been so long ago."""
    sql(
        url,
        "UPDATE trial_heartbeats SET heartbeat = datetime('now', ?) WHERE trial_id = ?",
        f"-{seconds} seconds",
        trial_id,
    )


def owner_text(url: str, trial_id: int) -> str:
    return sql(
        url, "SELECT value_json FROM trial_system_attributes WHERE key='sweeper:owner' AND trial_id=?", trial_id
    )[0][0]


def seen_of(claims: Claims, trial_id: int) -> StaleTrial:
    """What a worker saw that holds `claims`'s owner for stale."""
    return StaleTrial(trial_id, 0, claims.owner.to_text(), "silent", None)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited for a minute"
        time.sleep(0.02)


def _report(target: Callable[..., Any], results: Any, place: int, args: tuple[Any, ...]) -> None:
    try:
        results.put((place, target(*args), None))
    except BaseException:
        results.put((place, None, traceback.format_exc()))


def run_together(target: Callable[..., Any], *args_of_each: tuple[Any, ...]) -> list[Any]:
    """Run `target(barrier, *args)` in one new process for each `args`; what they returned, in order."""
    barrier, results = SPAWN.Barrier(len(args_of_each)), SPAWN.Queue()
    processes = [
        SPAWN.Process(target=_report, args=(target, results, place, (barrier, *args)))
        for place, args in enumerate(args_of_each)
    ]
    for process in processes:
        process.start()
    answers = sorted((results.get(timeout=120) for _ in processes), key=lambda answer: answer[0])
    for process in processes:
        process.join()
    assert [error for _, _, error in answers if error] == []
    return [answer for _, answer, _ in answers]


# Who an owner is


def ended_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_an_owner_survives_being_written_and_each_is_another() -> None:
    first, second = Owner.current(), Owner.current()
    assert Owner.from_text(first.to_text()) == first
    assert first.pid == second.pid == os.getpid()
    assert first.to_text() != second.to_text()


@pytest.mark.parametrize(
    ("change", "is_dead"),
    [
        pytest.param({}, False, id="alive-here"),
        pytest.param({"start_time": "0"}, True, id="the-pid-belongs-to-a-later-process"),
        pytest.param({"boot_id": "before"}, True, id="the-machine-was-restarted"),
        pytest.param({"host": "elsewhere"}, None, id="another-host"),
        pytest.param({"host": "elsewhere", "boot_id": "other"}, None, id="another-host-has-another-boot"),
        pytest.param({"pid_namespace": "pid:[1]"}, None, id="another-container"),
    ],
)
def test_says_dead_only_when_it_can_know(change: dict[str, Any], is_dead: bool | None) -> None:
    assert dataclasses.replace(Owner.current(), **change).is_dead() is is_dead


def test_an_ended_process_and_a_zombie_are_dead() -> None:
    assert dataclasses.replace(Owner.current(), pid=ended_pid()).is_dead() is True
    child = subprocess.Popen(["sleep", "60"])
    start_time = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
    owner = dataclasses.replace(Owner.current(), pid=child.pid, start_time=start_time)
    assert owner.is_dead() is False
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has collected it
    assert owner.is_dead() is True
    child.wait()


# The database and its lock


@pytest.mark.parametrize(
    "folder", ["plain", "with space", "br{ac}es {SCHEMA_VERSION}", "quo'te\"s", "line\nfeed", "ümlaut & co=1"]
)
def test_the_folder_of_the_database_may_have_any_name(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir()
    url = f"sqlite:///{tmp_path / folder}/o.db"
    optuna.create_study(storage=open_storage(url), study_name=STUDY)
    assert sqlite_path(url) == tmp_path / folder / "o.db"
    assert load(url).study_name == STUDY
    assert sorted(path.name for path in (tmp_path / folder).iterdir()) == ["o.db", "o.db.lock"]


def test_a_relative_path_stays_what_it_was_when_the_working_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mlruns").mkdir()
    monkeypatch.chdir(tmp_path)
    storage = open_storage("sqlite:///mlruns/o.db")
    monkeypatch.chdir("/")
    storage.engine.dispose()
    optuna.create_study(storage=storage, study_name=STUDY)
    assert load(f"sqlite:///{tmp_path}/mlruns/o.db").study_name == STUDY


@pytest.mark.parametrize(
    ("url", "words"),
    [
        pytest.param("sqlite:///{tmp}/missing/o.db", "{tmp}/missing/o.db: its folder does not exist", id="no-folder"),
        pytest.param("sqlite:///{tmp}/text.db", "{tmp}/text.db: cannot be used as Optuna's database", id="no-database"),
        pytest.param("sqlite:///:memory:", "names no file", id="memory"),
        pytest.param("optuna.db", "is not a database URL", id="no-url"),
        pytest.param("mysql://me:secret@host/db", "cannot be kept in mysql", id="another-database"),
    ],
)
def test_says_why_a_database_cannot_be_opened(tmp_path: Path, url: str, words: str) -> None:
    (tmp_path / "text.db").write_text("this is no database, whatever its name may be\n" * 100)
    with pytest.raises(StorageError) as caught:
        open_storage(url.replace("{tmp}", str(tmp_path)))
    assert words.replace("{tmp}", str(tmp_path)) in str(caught.value)
    assert "secret" not in str(caught.value)
    assert not (tmp_path / "missing").exists()


def _open_new(barrier: Any, url: str) -> str:
    barrier.wait()
    return open_storage(url).get_current_version()


def test_four_processes_may_open_a_new_database_at_once(tmp_path: Path) -> None:
    versions = run_together(_open_new, *[(f"sqlite:///{tmp_path}/new.db",)] * 4)
    assert versions == ["v3.2.0.a"] * 4


def test_the_thread_that_holds_the_lock_may_take_it_again(url: str) -> None:
    with storage_lock(url), storage_lock(url):
        assert open_storage(url).get_all_studies()[0].study_name == STUDY


# The budget


def _work(barrier: Any, url: str, limit: int) -> list[int]:
    study = load(url)
    claims = claims_of(study)
    barrier.wait()
    mine = []
    while (trial_id := claims.claim_new(url, limit)) is not None:
        assert claims.finish(trial_id, TrialState.COMPLETE, float(trial_id))
        mine.append(trial_id)
    return mine


@pytest.mark.parametrize(
    ("num_waiting", "limit"),
    [
        pytest.param(0, 30, id="all-new"),
        pytest.param(20, 30, id="enqueued-and-new"),
        pytest.param(30, 20, id="more-enqueued-than-the-budget"),
    ],
)
def test_four_processes_run_exactly_the_budget_and_none_twice(url: str, num_waiting: int, limit: int) -> None:
    study = load(url)
    for index in range(num_waiting):
        study.enqueue_trial({"x": index})
    ids = [trial_id for mine in run_together(_work, *[(url, limit)] * 4) for trial_id in mine]
    assert len(ids) == len(set(ids)) == limit
    trials = plain(url).get_trials()
    assert [trial.number for trial in trials] == list(range(max(limit, num_waiting)))
    assert [trial.number for trial in trials if trial.state == TrialState.COMPLETE] == list(range(limit))
    assert claims_of(study).claim_new(url, limit) is None


NUM_RACES = 30


def _take_the_only_one(barrier: Any, url: str, has_waiting: bool) -> list[int | None]:
    """In each round all take at the same moment what only one can have: an enqueued trial, or the last free slot."""
    claims = claims_of(load(url))
    taken = []
    for place in range(NUM_RACES):
        barrier.wait()
        taken.append(claims.pop_waiting() if has_waiting else claims.claim_new(url, place + 1))
        if barrier.wait() == 0 and has_waiting:
            load(url).enqueue_trial({})
        barrier.wait()
    return taken


@pytest.mark.parametrize(
    "has_waiting", [pytest.param(True, id="one-enqueued-trial"), pytest.param(False, id="one-free-slot")]
)
def test_of_three_processes_that_take_the_same_at_once_one_gets_it(url: str, has_waiting: bool) -> None:
    if has_waiting:
        load(url).enqueue_trial({})
    rounds = zip(*run_together(_take_the_only_one, *[(url, has_waiting)] * 3), strict=True)
    assert [sum(trial_id is not None for trial_id in taken) for taken in rounds] == [1] * NUM_RACES
    assert [trial.number for trial in plain(url).trials] == list(range(NUM_RACES + has_waiting))


@pytest.mark.parametrize(
    ("state", "stop_reason", "is_counted", "num_failed"),
    [
        pytest.param(TrialState.COMPLETE, "early_stopped", 1, 0, id="complete"),
        pytest.param(TrialState.PRUNED, "pruned", 1, 0, id="pruned"),
        pytest.param(TrialState.PRUNED, "diverged", 1, 0, id="diverged"),
        pytest.param(TrialState.PRUNED, "outside_limits", 0, 0, id="outside-limits"),
        pytest.param(TrialState.FAIL, "failed", 0, 1, id="failed"),
        pytest.param(None, None, 1, 0, id="running"),
    ],
)
def test_what_counts_in_the_budget(
    url: str, state: TrialState | None, stop_reason: str | None, is_counted: int, num_failed: int
) -> None:
    claims = claims_of(load(url))
    trial_id = claims.create()
    if state is not None:
        value = 0.5 if state == TrialState.COMPLETE else None
        assert claims.finish(trial_id, state, value, user_attrs={"stop_reason": stop_reason})
    load(url).enqueue_trial({"x": 1.0})
    assert (claims.num_counted(), claims.num_failed()) == (is_counted, num_failed)
    nothing = {"RUNNING": 0, "COMPLETE": 0, "PRUNED": 0, "FAIL": 0, "WAITING": 1}
    assert claims.counts() == {**nothing, (state or TrialState.RUNNING).name: 1}


def test_counts_only_its_own_study(url: str) -> None:
    claims_of(load(url)).create()
    other = optuna.create_study(storage=open_storage(url), study_name="other")
    claims = claims_of(other)
    assert claims.num_counted() == 0
    assert claims.stale(0) == []
    assert claims.claim_new(url, 1) is not None
    assert claims.claim_new(url, 1) is None
    assert [trial.number for trial in other.get_trials()] == [0]


# Starting


def test_an_enqueued_point_is_run_with_its_values_and_before_new_ones(url: str) -> None:
    load(url).enqueue_trial({"x": 0.25}, user_attrs={"mlflow_run_id": "abc"})
    study = load(url)
    claims = claims_of(study)
    waiting = claims.claim_new(url, 2)
    assert waiting is not None
    trial = optuna.Trial(study, waiting)
    assert (trial.number, trial.suggest_float("x", 0.0, 1.0), trial.user_attrs) == (0, 0.25, {"mlflow_run_id": "abc"})
    assert claims.renew(waiting)
    new = claims.claim_new(url, 2)
    assert new is not None
    assert optuna.Trial(study, new).number == 1
    assert claims.pop_waiting() is None


# Stale trials


def _run_one(url: str, results: Any, interval_s: float) -> None:
    """A worker with one trial: it says its id, and once it is lost, what it was still allowed to write."""
    claims = claims_of(load(url))
    trial_id = claims.claim_new(url, LONG_LIMIT)
    with Renewal(claims, trial_id, interval_s) as renewal:  # type: ignore[arg-type]
        results.put(trial_id)
        wait_until(lambda: renewal.lost)
        with pytest.raises(LostTrialError):
            renewal.check()
    assert trial_id is not None
    results.put((claims.finish(trial_id, TrialState.COMPLETE, 999.0), claims.release(trial_id)))


LONG_LIMIT = 1000


@contextmanager
def worker(url: str, interval_s: float = 0.05) -> Iterator[tuple[Any, int, Any]]:
    """(process, id of the trial that it runs, queue of what it says)"""
    results = SPAWN.Queue()
    process = SPAWN.Process(target=_run_one, args=(url, results, interval_s))
    process.start()
    try:
        yield process, results.get(timeout=60), results
    finally:
        process.kill()
        process.join()


def test_a_killed_worker_is_stale_at_once_and_a_living_one_is_not(url: str) -> None:
    claims = claims_of(load(url))
    with worker(url) as (process, trial_id, _):
        assert claims.stale(LONG_S) == []
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert [(stale.trial_id, stale.number, stale.reason) for stale in claims.stale(LONG_S)] == [
            (trial_id, 0, "dead")
        ]
        process.join()
    (stale,) = claims.stale(LONG_S)
    assert (stale.trial_id, stale.reason) == (trial_id, "dead")
    assert claims.take_over(stale)
    assert claims.stale(LONG_S) == []


def test_a_stopped_worker_is_stale_after_the_grace_period_and_writes_nothing_when_it_wakes(url: str) -> None:
    claims = claims_of(load(url))
    with worker(url) as (process, trial_id, results):
        age_heartbeat(url, trial_id, 2 * LONG_S)
        wait_until(lambda: claims.stale(LONG_S) == [])  # renewed by the worker's thread
        os.kill(process.pid, signal.SIGSTOP)
        assert claims.stale(LONG_S) == []
        age_heartbeat(url, trial_id, 2 * LONG_S)
        (stale,) = claims.stale(LONG_S)
        assert (stale.trial_id, stale.reason) == (trial_id, "silent")
        assert claims.take_over(stale)
        os.kill(process.pid, signal.SIGCONT)
        assert results.get(timeout=60) == (False, False)
    assert claims.finish(trial_id, TrialState.COMPLETE, 0.5)
    assert plain(url).trials[0].value == 0.5


@pytest.mark.parametrize(
    ("age_s", "is_stale"), [pytest.param(90, False, id="within"), pytest.param(110, True, id="beyond")]
)
@pytest.mark.parametrize(
    "owner",
    [
        pytest.param(ELSEWHERE, id="another-host"),
        pytest.param(dataclasses.replace(Owner.current(), pid_namespace="pid:[1]"), id="another-container"),
        pytest.param(Owner.current(), id="this-process"),
    ],
)
def test_an_owner_that_may_be_alive_has_the_grace_period(url: str, owner: Owner, age_s: float, is_stale: bool) -> None:
    claims = claims_of(load(url), owner)
    trial_id = claims.create()
    age_heartbeat(url, trial_id, age_s)
    assert [stale.reason for stale in claims.stale(100)] == ["silent"] * is_stale


def test_without_a_first_heartbeat_the_grace_period_counts_from_the_start(url: str) -> None:
    claims = claims_of(load(url), ELSEWHERE)
    claims.create()
    sql(url, "DELETE FROM trial_heartbeats")
    assert claims.stale(100) == []
    sql(url, "UPDATE trials SET datetime_start = datetime('now', '-110 seconds')")
    assert [(stale.reason, stale.heartbeat) for stale in claims.stale(100)] == [("silent", None)]


def test_an_owner_that_renews_after_it_was_seen_silent_keeps_its_trial(url: str) -> None:
    owner, other = claims_of(load(url)), claims_of(load(url))
    trial_id = owner.create()
    age_heartbeat(url, trial_id, 110)
    (stale,) = other.stale(100)
    assert owner.renew(trial_id)
    assert other.take_over(stale) is False
    age_heartbeat(url, trial_id, 110)
    assert other.take_over(other.stale(100)[0]) is True


def test_a_trial_that_another_tool_started_counts_as_interrupted(url: str) -> None:
    plain(url).ask()
    claims = claims_of(load(url))
    (stale,) = claims.stale(LONG_S)
    assert (stale.number, stale.seen, stale.reason) == (0, None, "ownerless")
    assert claims.take_over(stale) is True
    assert claims.take_over(stale) is False
    assert claims.renew(stale.trial_id)


def _take_all(barrier: Any, url: str) -> list[int]:
    claims = claims_of(load(url))
    found = claims.stale(LONG_S)
    assert len(found) == 30
    barrier.wait()
    return [stale.trial_id for stale in found if claims.take_over(stale)]


def test_each_of_30_stale_trials_has_one_winner_among_three_processes(url: str) -> None:
    study = load(url)
    leaving, dead = claims_of(study), claims_of(study, dataclasses.replace(Owner.current(), pid=ended_pid()))
    for _ in range(10):
        study.ask()
        dead.create()
        leaving.release(leaving.create())
    taken = run_together(_take_all, *[(url,)] * 3)
    assert sorted(trial_id for mine in taken for trial_id in mine) == [trial._trial_id for trial in study.trials]


def test_a_trial_taken_over_goes_on_with_its_values_and_may_draw_more(url: str) -> None:
    study = load(url)
    first = claims_of(study)
    trial = optuna.Trial(study, first.create())
    x = trial.suggest_float("x", 0.0, 1.0)
    trial.report(0.25, 0)
    trial.set_user_attr("attempt", 1)
    assert first.release(trial._trial_id)

    later = load(url)
    second = claims_of(later)
    assert second.take_over(second.stale(LONG_S)[0])
    again = optuna.Trial(later, trial._trial_id)
    assert (again.number, again.suggest_float("x", 0.0, 1.0), again.user_attrs) == (0, x, {"attempt": 1})
    again.suggest_float("y", 0.0, 1.0)
    again.report(0.5, 1)
    assert second.finish(trial._trial_id, TrialState.COMPLETE, 0.5)
    assert plain(url).trials[0].intermediate_values == {0: 0.25, 1: 0.5}
    assert set(plain(url).trials[0].params) == {"x", "y"}


# Releasing, renewing


def test_a_released_trial_is_free_at_once_and_keeps_who_left_it(url: str) -> None:
    claims, other = claims_of(load(url)), claims_of(load(url))
    trial_id = claims.create()
    assert other.release(trial_id) is False
    assert claims.release(trial_id) is True
    assert claims.renew(trial_id) is False
    assert claims.release(trial_id) is False
    (stale,) = other.stale(LONG_S)
    assert (stale.trial_id, stale.reason) == (trial_id, "released")
    assert claims.owner.token in owner_text(url, trial_id)
    assert plain(url).trials[0].state == TrialState.RUNNING


def test_renewal_outlives_a_locked_database_and_prints_nothing(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    # Long enough for the waits of this process's own threads for each other, on a slow disk too.
    impatient = optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": {"timeout": 1.0}})
    claims = claims_of(optuna.load_study(storage=impatient, study_name=STUDY))
    trial_id = claims.create()
    with Renewal(claims, trial_id, interval_s=0.02) as renewal:
        with closing(sqlite3.connect(sqlite_path(url), isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            with pytest.raises(StorageError, match="the database does not answer: database is locked"):
                renewal.check()
            time.sleep(1.5)  # the thread meets the lock too
            other.execute("ROLLBACK")
        age_heartbeat(url, trial_id, LONG_S)
        wait_until(lambda: claims.stale(LONG_S / 2) == [])
        renewal.check()
        assert renewal.lost is False
        assert claims.release(trial_id)
        with pytest.raises(LostTrialError):
            renewal.check()
    assert renewal.lost is True
    assert capfd.readouterr() == ("", "")


# The end


@pytest.mark.parametrize(
    ("state", "value"),
    [
        pytest.param(TrialState.COMPLETE, 0.75, id="complete"),
        pytest.param(TrialState.COMPLETE, float("-inf"), id="complete-infinite"),
        pytest.param(TrialState.PRUNED, 0.5, id="pruned"),
        pytest.param(TrialState.PRUNED, None, id="pruned-without-a-value"),
        pytest.param(TrialState.FAIL, None, id="failed"),
    ],
)
def test_every_reader_of_optuna_sees_how_a_trial_ended(url: str, state: TrialState, value: float | None) -> None:
    study, other = load(url), load(url)
    claims = claims_of(study)
    trial = optuna.Trial(study, claims.create())
    x = trial.suggest_float("x", 0.0, 1.0)
    trial.report(0.25, 0)
    trial.report(0.125, 1)
    assert [view.get_trials()[0].state for view in (study, other)] == [TrialState.RUNNING] * 2  # now both cache it
    assert claims.finish(
        trial._trial_id,
        state,
        value,
        intermediate={1: 9.0, 2: 0.5, 3: float("nan")},
        user_attrs={"stop_reason": "why", "best_epoch": 1, "nothing": None},
    )
    for view in (study, other, plain(url)):
        (seen,) = view.get_trials()
        assert (seen.state, seen.value, seen.params) == (state, value, {"x": x})
        assert str(seen.intermediate_values) == str({0: 0.25, 1: 0.125, 2: 0.5, 3: float("nan")})
        assert seen.user_attrs == {"stop_reason": "why", "best_epoch": 1, "nothing": None}
        if state == TrialState.COMPLETE:
            assert view.best_value == value
    assert claims.stale(0) == []


def test_times_are_local_as_optuna_gives_them(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        monkeypatch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        before = datetime.datetime.now()
        study = load(url)
        study.enqueue_trial({})
        claims = claims_of(study)
        for _ in range(2):
            trial_id = claims.claim_new(url, 2)
            assert trial_id is not None
            assert claims.finish(trial_id, TrialState.COMPLETE, 1.0)
        after = datetime.datetime.now()
        for trial in plain(url).trials:
            assert trial.datetime_start is not None
            assert trial.datetime_complete is not None
            assert before <= trial.datetime_start <= trial.datetime_complete <= after
    finally:
        monkeypatch.undo()
        time.tzset()


def test_the_best_trial_is_the_best_feasible_one(url: str) -> None:
    study, other = load(url), load(url)
    claims = claims_of(study)
    assert claims.finish(claims.create(), TrialState.COMPLETE, 0.9, constraints={"diverged": 1.0})
    for view in (study, other, plain(url)):
        with pytest.raises(ValueError, match="feasible"):
            _ = view.best_trial
    assert claims.finish(claims.create(), TrialState.COMPLETE, 0.5)
    assert claims.finish(claims.create(), TrialState.COMPLETE, 0.4, constraints={"diverged": 0.0})
    for view in (study, other, plain(url)):
        assert (view.best_trial.number, view.best_value) == (1, 0.5)
        assert [trial.constraints for trial in view.trials] == [{"diverged": 1.0}, {}, {"diverged": 0.0}]


def test_a_user_attribute_may_arrive_after_the_end(url: str) -> None:
    study = load(url)
    claims = claims_of(study)
    trial_id = claims.create()
    claims.set_user_attr(trial_id, "mlflow_run_id", "first")
    assert claims.finish(trial_id, TrialState.COMPLETE, 0.5)
    assert study.trials[0].user_attrs == {"mlflow_run_id": "first"}
    claims.set_user_attr(trial_id, "mlflow_run_id", "second")
    claims.set_user_attr(trial_id, "late", {"a": [1]})
    for view in (study, plain(url)):
        assert view.trials[0].user_attrs == {"mlflow_run_id": "second", "late": {"a": [1]}}


def _taken_over(url: str, claims: Claims, trial_id: int) -> None:
    assert claims_of(load(url)).take_over(seen_of(claims, trial_id))


def _released(url: str, claims: Claims, trial_id: int) -> None:
    assert claims.release(trial_id)


def _told_before(url: str, claims: Claims, trial_id: int) -> None:
    assert claims.finish(trial_id, TrialState.COMPLETE, 0.5)


def _ended_by_hand(url: str, claims: Claims, trial_id: int) -> None:
    plain(url).tell(0, state=TrialState.FAIL)


@pytest.mark.parametrize("lose", [_taken_over, _released, _told_before, _ended_by_hand])
def test_who_has_lost_a_trial_writes_nothing(url: str, lose: Callable[[str, Claims, int], None]) -> None:
    claims = claims_of(load(url))
    trial_id = claims.create()
    lose(url, claims, trial_id)
    with closing(sqlite3.connect(sqlite_path(url))) as connection:
        before = list(connection.iterdump())
        late = {"intermediate": {7: 1.0}, "user_attrs": {"late": 1}, "constraints": {"late": 1.0}}
        assert claims.finish(trial_id, TrialState.COMPLETE, 999.0, **late) is False  # type: ignore[arg-type]
        assert claims.renew(trial_id) is False
        assert claims.release(trial_id) is False
        assert list(connection.iterdump()) == before


def _finish_or_take(barrier: Any, url: str, owner: str, ids: list[int], place: int) -> list[bool]:
    """Place 0 owns the trials and finishes them with 0; place 1 takes each over at that moment and finishes with 1."""
    study = load(url)
    claims = claims_of(study, Owner.from_text(owner) if place == 0 else None)
    stored = []
    for trial_id in ids:
        seen = StaleTrial(trial_id, 0, owner, "silent", None)
        barrier.wait()
        mine = place == 0 or claims.take_over(seen)
        stored.append(mine and claims.finish(trial_id, TrialState.COMPLETE, float(place), user_attrs={"by": place}))
    return stored


def test_of_an_owner_and_a_taker_exactly_one_stores_and_is_the_owner_of_record(url: str) -> None:
    claims = claims_of(load(url))
    text = claims.owner.to_text()
    ids = [claims.create() for _ in range(NUM_RACES)]
    by_owner, by_taker = run_together(_finish_or_take, (url, text, ids, 0), (url, text, ids, 1))
    assert [first + second for first, second in zip(by_owner, by_taker, strict=True)] == [1] * NUM_RACES
    for trial, taker_won in zip(plain(url).trials, by_taker, strict=True):
        assert (trial.state, trial.value, trial.user_attrs) == (TrialState.COMPLETE, taker_won, {"by": int(taker_won)})
        assert (claims.owner.token in owner_text(url, trial._trial_id)) is not taker_won
