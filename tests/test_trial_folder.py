"""A trial's folder survives kills, damage and full disks."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sweeper.errors import CheckpointError, InterruptedNow, StorageError
from sweeper.records import EpochRecord
from sweeper.training.stopping import Judgement
from sweeper.training.trial_folder import SAVED_NAME, TrialFolder, open_checkpoint


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != SAVED_NAME)


def record(validation: int, **metrics: float) -> EpochRecord:
    return EpochRecord(
        validation=validation,
        epoch=validation,
        step=10 * validation,
        epoch_complete=True,
        timestamp_ms=1_700_000_000_000 + validation,
        metrics=metrics,
    )


# ---- records


def test_records_come_back_with_their_nan_and_infinities(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path / "study" / "trial-0001", keep_last=1)
    assert folder.records() == []
    folder.append_record(record(0, val_loss=0.1, train_loss=math.inf))
    folder.append_record(record(1, val_loss=math.nan, train_loss=-math.inf))
    first, second = folder.records()
    assert first == record(0, val_loss=0.1, train_loss=math.inf)
    assert math.isnan(second.metrics["val_loss"])
    assert second.metrics["train_loss"] == -math.inf
    assert dataclasses.replace(second, metrics={}) == record(1)


@pytest.mark.parametrize(
    "torn",
    [
        pytest.param(b'{"validation": 1, "epo', id="cut-in-the-middle"),
        pytest.param(json.dumps(record(1).to_json()).encode(), id="only-the-line-end-missing"),
        pytest.param(b"\0" * 40 + b"\n", id="zeros-of-a-power-cut"),
        pytest.param(b'{"validation": 1}\n', id="whole-line-half-a-record"),
    ],
)
def test_a_torn_last_line_is_passed_over_and_cut_off(tmp_path: Path, torn: bytes) -> None:
    folder = TrialFolder(tmp_path, keep_last=1)
    folder.append_record(record(0, val_loss=0.5))
    with open(folder.records_path, "ab") as file:
        file.write(torn)
    assert folder.records() == [record(0, val_loss=0.5)]
    folder.append_record(record(1, val_loss=0.4))
    assert folder.records() == [record(0, val_loss=0.5), record(1, val_loss=0.4)]
    assert folder.records_path.read_bytes().count(b"\n") == 2


def test_a_broken_line_before_the_last_is_named(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path, keep_last=1)
    for validation in range(3):
        folder.append_record(record(validation))
    lines = folder.records_path.read_bytes().splitlines(keepends=True)
    folder.records_path.write_bytes(lines[0] + b"what?\n" + lines[2])
    with pytest.raises(StorageError, match=r"records\.jsonl:2: .*what\?"):
        folder.records()


# ---- last and best


@pytest.mark.parametrize(
    ("keep_last", "while_running", "at_the_end"),
    [
        pytest.param(0, ["last-0004.pt"], [], id="0-is-best-only"),
        pytest.param(1, ["last-0004.pt"], ["last-0004.pt"], id="1"),
        pytest.param(2, ["last-0003.pt", "last-0004.pt"], ["last-0003.pt", "last-0004.pt"], id="2"),
        pytest.param(9, [f"last-000{n}.pt" for n in range(5)], [f"last-000{n}.pt" for n in range(5)], id="9"),
    ],
)
def test_keep_last_never_removes_the_best_and_nan_is_never_best(
    tmp_path: Path, keep_last: int, while_running: list[str], at_the_end: list[str]
) -> None:
    folder = TrialFolder(tmp_path, keep_last)
    judgement = Judgement("minimize", patience=9, min_delta=0.0, min_epochs=1)
    for epoch, value in enumerate([0.5, 0.3, 0.4, 0.45, math.nan]):
        if judgement.update(value, epoch=epoch, validation=epoch, epochs_complete=epoch + 1).is_best:
            folder.save_best({"epoch": epoch})
        folder.save_last({"epoch": epoch}, epoch)
    assert names(tmp_path) == ["best.pt", *while_running]
    assert folder.load_last() == {"epoch": 4}
    folder.finish()
    assert names(tmp_path) == ["best.pt", *at_the_end]
    assert open_checkpoint(folder.best_path) == {"epoch": 1}


def test_a_trial_without_checkpoints_has_none_to_load(tmp_path: Path) -> None:
    assert TrialFolder(tmp_path / "never-written", keep_last=2).load_last() is None
    assert TrialFolder(tmp_path, keep_last=2).load_last() is None


def test_the_newest_epoch_is_found_past_four_digits(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path, keep_last=2)
    for epoch in (9_998, 9_999, 10_000):
        folder.save_last({"epoch": epoch}, epoch)
    assert names(tmp_path) == ["last-10000.pt", "last-9999.pt"]
    assert folder.load_last() == {"epoch": 10_000}


def test_a_later_checkpoint_that_was_not_used_goes_when_training_goes_on(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path, keep_last=1)
    folder.save_last({"epoch": 4}, 4)
    (tmp_path / "last-0007.pt").write_text("damaged")
    folder.save_last({"epoch": 5}, 5)
    assert names(tmp_path) == ["last-0005.pt"]


def test_temporaries_are_swept_and_nothing_else(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path, keep_last=1)
    folder.save_last({"epoch": 0}, 0)
    (tmp_path / ".last-0001.pt.4321.tmp").write_bytes(b"half")
    (tmp_path / ".best.pt.4321.tmp").write_bytes(b"half")
    (tmp_path / ".notes.tmp").write_text("the user's")
    folder.sweep_temporaries()
    assert names(tmp_path) == [".notes.tmp", "last-0000.pt"]


# ---- damage


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = [
    pytest.param(truncate, id="truncated"),
    pytest.param(flip_a_bit, id="one-bit-flipped"),
    pytest.param(lambda path: path.write_bytes(b""), id="empty"),
    pytest.param(lambda path: path.write_text("no checkpoint at all"), id="a-text-file"),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    tmp_path: Path, damage: Callable[[Path], Any]
) -> None:
    folder = TrialFolder(tmp_path, keep_last=2)
    for epoch in (3, 4):
        folder.save_last({"epoch": epoch, "weights": torch.full((1000,), float(epoch))}, epoch)
    damage(tmp_path / "last-0004.pt")
    with pytest.warns(UserWarning, match=r"last-0004\.pt"):
        state = folder.load_last()
    assert state is not None
    assert state["epoch"] == 3
    assert torch.equal(state["weights"], torch.full((1000,), 3.0))


@pytest.mark.parametrize("damage", DAMAGES)
def test_when_every_checkpoint_is_damaged_all_are_named(tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    folder = TrialFolder(tmp_path, keep_last=2)
    for epoch in (3, 4):
        folder.save_last({"weights": torch.ones(1000)}, epoch)
        damage(tmp_path / f"last-000{epoch}.pt")
    with pytest.warns(UserWarning, match="Looking for an older one"), pytest.raises(CheckpointError) as caught:
        folder.load_last()
    assert "last-0003.pt" in str(caught.value)
    assert "last-0004.pt" in str(caught.value)


def test_a_file_that_needs_unpickling_is_refused(tmp_path: Path) -> None:
    torch.save({"path": Path("x")}, tmp_path / "last-0000.pt")
    with pytest.warns(UserWarning, match=r"last-0000\.pt"), pytest.raises(CheckpointError, match="UnpicklingError"):
        TrialFolder(tmp_path, keep_last=1).load_last()


# ---- kills

SAVE_FOR_EVER = textwrap.dedent("""
    import resource, signal, sys, torch
    from pathlib import Path
    from sweeper.training.trial_folder import SAVED_NAME, TrialFolder

    folder = TrialFolder(Path(sys.argv[1]), keep_last=2)
    limit = int(sys.argv[2])
    for epoch in range(1_000_000):
        if limit and epoch == 2:  # the kernel kills this process when a file grows to `limit` bytes
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        state = {"epoch": epoch, "weights": torch.full((500_000,), float(epoch))}
        folder.save_best(state)
        folder.save_last(state, epoch)
""")


def save_for_ever(folder: Path, limit: int = 0) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", SAVE_FOR_EVER, str(folder), str(limit)])


def assert_whole(state: dict[str, Any] | None) -> int:
    assert state is not None
    assert torch.equal(state["weights"], torch.full((500_000,), float(state["epoch"])))
    return int(state["epoch"])


def test_a_kill_in_the_middle_of_a_save_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    process = save_for_ever(tmp_path, limit=1_000_000)  # half of the file
    assert process.wait() == -signal.SIGXFSZ
    assert [path.stat().st_size for path in tmp_path.glob(".best.pt.*.tmp")] == [1_000_000]
    folder = TrialFolder(tmp_path, keep_last=2)
    assert assert_whole(folder.load_last()) == 1
    assert assert_whole(open_checkpoint(folder.best_path)) == 1
    folder.save_last({"epoch": 2, "weights": torch.full((500_000,), 2.0)}, 2)
    assert assert_whole(folder.load_last()) == 2
    folder.finish()
    assert names(tmp_path) == ["best.pt", "last-0001.pt", "last-0002.pt"]


@pytest.mark.parametrize("delay_s", [0.0, 0.013, 0.031])
def test_sigkill_at_any_time_leaves_whole_checkpoints(tmp_path: Path, delay_s: float) -> None:
    process = save_for_ever(tmp_path)
    try:
        while not list(tmp_path.glob("last-*.pt")):
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(delay_s)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL
    folder = TrialFolder(tmp_path, keep_last=2)
    last = assert_whole(folder.load_last())
    assert assert_whole(open_checkpoint(folder.best_path)) in (last, last + 1)


def test_a_signal_during_a_save_comes_out_as_itself(tmp_path: Path) -> None:
    def interrupt(signum: int, frame: Any) -> None:
        raise InterruptedNow("SIGALRM")

    folder = TrialFolder(tmp_path, keep_last=1)
    state = {"epoch": 0, "weights": torch.zeros(500_000)}
    folder.save_last(state, 0)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for delay_s in np.linspace(1e-4, 6e-3, 30):
            with pytest.raises(InterruptedNow):  # noqa: PT012  (the signal falls somewhere into the loop)
                signal.setitimer(signal.ITIMER_REAL, delay_s)
                while True:
                    folder.save_last(state, 0)
            assert folder.load_last() is not None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ---- full and unwritable disks


@pytest.mark.parametrize("which", ["last", "best"])
def test_a_full_disk_is_said_and_leaves_what_was_there(small_disk: Path, which: str) -> None:
    folder = TrialFolder(small_disk / "trial-0000", keep_last=2)
    folder.save_best({"epoch": 0})
    folder.save_last({"epoch": 0}, 0)
    before = names(folder.path)
    large = {"weights": torch.zeros(1_000_000)}
    save = functools.partial(folder.save_last, epoch=1) if which == "last" else folder.save_best
    with pytest.raises(StorageError) as caught:
        save(large)
    message = str(caught.value)
    assert "No space left on device" in message or "File too large" in message
    assert str(folder.path) in message
    (needed,) = (int(word.replace(",", "")) for word in message.split() if word.replace(",", "").isdecimal())
    assert 4_000_000 <= needed <= 4_010_000
    kept = folder.path / ("best.pt" if which == "last" else "older-best.pt")  # the second is no longer the best
    assert names(folder.path) == sorted({*before, kept.name} - ({"best.pt"} if which == "best" else set()))
    assert folder.load_last() == open_checkpoint(kept) == {"epoch": 0}
    folder.save_best({"epoch": 2})
    assert names(folder.path) == before


def test_a_record_on_a_full_disk_is_said_and_the_next_one_starts_on_its_own_line(small_disk: Path) -> None:
    folder = TrialFolder(small_disk / "trial-0000", keep_last=2)
    folder.append_record(record(0))
    with pytest.raises(StorageError, match=r"record of validation 1 cannot be saved in .*trial-0000"):
        folder.append_record(record(1, **{f"val_{number}": 0.0 for number in range(100_000)}))
    folder.append_record(record(1, val_loss=0.5))
    assert folder.records() == [record(0), record(1, val_loss=0.5)]


def test_a_folder_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    folder = TrialFolder(tmp_path / "file" / "trial-0000", keep_last=1)
    with pytest.raises(StorageError, match=r"last-0000\.pt cannot be saved in .*trial-0000: Not a directory"):
        folder.save_last({}, 0)
    with pytest.raises(StorageError, match="record of validation 0 cannot be saved"):
        folder.append_record(record(0))
