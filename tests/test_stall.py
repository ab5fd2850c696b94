"""Trials that hang: each is ended where it hangs, and the next one runs."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
import torch._dynamo  # the first optimizer of a process loads it, which takes long

from builders import make_spec
from harness import run_spec

assert torch._dynamo
# Long enough for a busy machine to build a model and fork two loader workers.
LIMIT_S = 5.0


@pytest.mark.parametrize(
    ("where", "deaf"),
    [
        pytest.param("training", False, id="in-training"),
        pytest.param("validation", False, id="in-validation"),
        pytest.param("build", False, id="while-built"),
        pytest.param("training", True, id="swallows-the-first-one"),
    ],
)
def test_a_trial_that_hangs_fails_with_the_place(tmp_path: Path, where: str, deaf: bool) -> None:
    spec = make_spec(
        model={"name": "toys:sleeping_model", "params": {"deaf": deaf}},
        train={"max_epochs": 1, "batch_size": 64, "stall_timeout_s": LIMIT_S},
        search_space={"model.params.where": {"choices": [where, "nowhere"]}},
        enqueue=[{"model.params.where": where}, {"model.params.where": "nowhere"}],
        budget={"trials": 1, "max_failures": 1},
    )
    before = signal.getsignal(signal.SIGALRM)
    ran = run_spec(spec, tmp_path)
    assert ran.states() == ["FAIL", "COMPLETE"]
    error = ran.trials[0].user_attrs["error"]
    assert "time.sleep(1000)" in error
    assert error.splitlines()[-1].endswith("nothing moved for 5 s (train.stall_timeout_s); it hung here")
    assert ran.tracker.finished[0][0] == "FAILED"
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_loader_worker_that_hangs_is_ended(tmp_path: Path) -> None:
    """Case 90."""
    mark = tmp_path / "hung"
    before = psutil.Process().children()  # Python's own, which other tests have started
    spec = make_spec(
        data={"source": "toys:hanging_data", "params": {"mark": str(mark)}},
        model={"name": "mlp"},
        train={"max_epochs": 2, "batch_size": 64, "stall_timeout_s": LIMIT_S},
        speed={"num_workers": 2},
        search_space={"lr": {"low": 1e-3, "high": 1e-2}},
        budget={"trials": 1, "max_failures": 1},
    )
    ran = run_spec(spec, tmp_path)
    assert mark.exists()
    assert ran.states() == ["FAIL", "COMPLETE"]
    assert "nothing moved for 5 s (train.stall_timeout_s)" in ran.trials[0].user_attrs["error"]
    assert psutil.Process().children() == before


def test_a_trial_that_moves_is_left_alone(tmp_path: Path) -> None:
    """Many steps, each shorter than the limit, all of them longer."""
    spec = make_spec(
        model={"name": "toys:slow_model"},
        train={"max_epochs": 6, "batch_size": 64, "stall_timeout_s": LIMIT_S},
        budget={"trials": 1, "max_failures": 0},
    )
    assert run_spec(spec, tmp_path).reasons() == ["max_epochs"]
