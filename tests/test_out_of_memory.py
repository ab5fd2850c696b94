"""Out of memory: batches are taken in smaller parts, and what was drawn stays what it was."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import toys
from builders import make_spec
from harness import Ran, run_spec
from sweeper.training.fitting import halved
from sweeper.training.memory import is_out_of_memory
from sweeper.training.windows import Windows

PLAIN = {"optimizer": "sgd", "momentum": 0.0, "lr": 0.1, "max_epochs": 2}


def hungry_spec(fits: int, model: dict[str, Any] | None = None, **train: Any) -> Any:
    """Two trials of a model whose forward really asks for too much memory with more than `fits` samples."""
    params = {"fits": fits, **(model or {})}
    return make_spec(
        model={"name": "toys:hungry_model", "params": params},
        train={**PLAIN, **train},
        search_space={"lr": {"low": 0.1, "high": 0.2}},
        enqueue=[{"lr": 0.1}, {"lr": 0.2}],
        budget={"trials": 2},
    )


def metrics(ran: Ran, name: str) -> list[list[float]]:
    return [[record.metrics[name] for record in ran.tracker.records[number]] for number in sorted(ran.tracker.records)]


@pytest.mark.parametrize(
    ("batch_size", "accumulation_steps", "micro", "steps"),
    [
        pytest.param(64, 1, 16, 4, id="twice"),
        pytest.param(32, 3, 16, 6, id="within-windows"),
        pytest.param(45, 1, 12, 4, id="odd"),
    ],
)
def test_halving_the_micro_batch_changes_no_window(
    tmp_path: Path, batch_size: int, accumulation_steps: int, micro: int, steps: int
) -> None:
    train = {"batch_size": batch_size, "accumulation_steps": accumulation_steps}
    (tmp_path / "short").mkdir()
    (tmp_path / "ample").mkdir()
    short = run_spec(hungry_spec(fits=16, **train), tmp_path / "short")
    ample = run_spec(hungry_spec(fits=10**6, **train), tmp_path / "ample")
    assert short.reasons() == ample.reasons() == ["max_epochs"] * 2
    for name in ("train_loss", "val_loss", "optim/grad_norm"):
        for ours, theirs in zip(metrics(short, name), metrics(ample, name), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)
    assert [r.step for r in short.tracker.records[0]] == [r.step for r in ample.tracker.records[0]]
    started = short.tracker.started[0]
    assert started["tags"]["micro_batch_size"] == str(micro)
    assert started["params"]["batch_size"] == batch_size
    assert (started["params"]["speed.batch_size"], started["params"]["speed.accumulation_steps"]) == (micro, steps)
    assert started["params"]["effective_batch_size"] == batch_size * accumulation_steps
    assert "micro_batch_size" not in ample.tracker.started[0]["tags"]
    log = (short.folder / "trial-0000/trial.log").read_text()
    assert f"batch_size {batch_size} does not fit into memory" in log


def test_what_fits_is_remembered_for_the_next_trial(tmp_path: Path) -> None:
    toys.SIZES.clear()
    run_spec(hungry_spec(fits=16, batch_size=64), tmp_path)
    tried = [size for size in toys.SIZES if size > 16]
    assert tried == [64, 32]  # by the first trial; the second began with 16
    (kept,) = Path(os.environ["XDG_CACHE_HOME"]).glob("sweeper/micro-batches/*.json")
    assert json.loads(kept.read_text()) == {"fits": 16, "too_large": 32}


def test_a_smaller_batch_than_what_failed_is_tried_whole(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    run_spec(hungry_spec(fits=30, batch_size=64), tmp_path / "first")  # 32 did not fit, 16 did
    toys.SIZES.clear()
    run_spec(hungry_spec(fits=30, batch_size=24), tmp_path / "second")
    assert set(toys.SIZES) == {24, 1438 % 24}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"fits": "many"}', '{"fits": 0, "too_large": 1}'])
def test_a_damaged_memory_of_what_fits_stops_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    run_spec(hungry_spec(fits=16, batch_size=64), tmp_path / "first")
    (kept,) = Path(os.environ["XDG_CACHE_HOME"]).glob("sweeper/micro-batches/*.json")
    kept.write_text(content)
    ran = run_spec(hungry_spec(fits=16, batch_size=64), tmp_path / "second")
    assert ran.reasons() == ["max_epochs"] * 2


def test_batch_norm_is_not_given_fewer_than_16_samples(tmp_path: Path) -> None:
    (tmp_path / "some").mkdir()
    (tmp_path / "none").mkdir()
    some = run_spec(hungry_spec(fits=16, model={"batch_norm": True}, batch_size=64), tmp_path / "some")
    assert some.reasons() == ["max_epochs"] * 2
    assert "batch norm takes its statistics from 16 samples" in (some.folder / "trial-0000/trial.log").read_text()
    none = run_spec(hungry_spec(fits=15, model={"batch_norm": True}, batch_size=64), tmp_path / "none")
    assert (none.states(), none.reasons()) == (["PRUNED"] * 2, ["out_of_memory"] * 2)


def test_it_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    """Memory runs short in the second epoch: the first one is not trained again."""
    toys.SIZES.clear()
    ran = run_spec(hungry_spec(fits=10**6, model={"until": 30}, batch_size=64), tmp_path)
    assert ran.reasons() == ["max_epochs"] * 2
    assert [r.epoch for r in ran.tracker.records[0][-2:]] == [0, 1]
    assert "goes on after epoch 0" in (ran.folder / "trial-0000/trial.log").read_text()


def test_a_killed_trial_goes_on_with_the_parts_it_had(tmp_path: Path) -> None:
    """Also where the cache was lost meanwhile: the parts are in the checkpoint."""
    spec, seen = hungry_spec(fits=16, batch_size=64, max_epochs=3), iter([False, True])
    run_spec(spec, tmp_path, after_record=lambda: next(seen, False))
    (kept,) = Path(os.environ["XDG_CACHE_HOME"]).glob("sweeper/micro-batches/*.json")
    kept.unlink()
    toys.SIZES.clear()
    ran = run_spec(spec, tmp_path)
    assert ran.reasons() == ["max_epochs"] * 2
    assert max(toys.SIZES[: toys.SIZES.index(64)]) == 16  # 64 is what the second trial begins with
    assert ran.tracker.started[0]["tags"]["micro_batch_size"] == "16"


@pytest.mark.parametrize(
    ("size", "batch_norm", "half"),
    [(64, False, 32), (5, False, 3), (2, False, 1), (1, False, None), (32, True, 16), (31, True, 16), (30, True, None)],
)
def test_half_a_micro_batch(size: int, batch_norm: bool, half: int | None) -> None:
    assert halved(size, batch_norm) == half


@pytest.mark.parametrize(
    ("samples", "batch", "accumulation", "largest", "sizes"),
    [
        pytest.param(10, 4, 2, 2, [[2, 2, 2, 2], [2]], id="even"),
        pytest.param(9, 4, 1, 2, [[2, 2], [1, 2, 2]], id="a-joined-lone-sample"),
        pytest.param(5, 5, 1, 3, [[2, 3]], id="odd"),
        pytest.param(17, 32, 1, 16, [[8, 9]], id="no-part-is-a-lone-sample"),
        pytest.param(6, 4, 1, 9, [[4], [2]], id="large-enough"),
    ],
)
def test_windows_in_parts(samples: int, batch: int, accumulation: int, largest: int, sizes: list[list[int]]) -> None:
    windows = Windows(samples, batch, accumulation, largest)
    groups = windows.group(windows.plan(range(samples)))
    assert [[len(part) for part in window] for window in groups] == sizes
    assert [index for window in groups for part in window for index in part] == list(range(samples))
    assert len(groups) == windows.steps_per_epoch


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (torch.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_out_of_memory_is(error: BaseException, is_it: bool) -> None:
    assert is_out_of_memory(error) == is_it


def test_the_cpus_own_out_of_memory_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert is_out_of_memory(caught.value)
