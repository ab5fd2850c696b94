"""`checkpoints.quota_gib`: what goes, in which order, and what never does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from harness import Ran, listed_spec, run_spec

GIB = 2**30
SERIES = [[0.5, 0.6], [0.2, 0.3], [0.9, 0.9], [0.4, 0.5]]
PRUNER = {"name": "threshold", "params": {"upper": 0.8}}  # trial 2


def quota_spec(quota_gib: float | None) -> Any:
    checkpoints = {"keep_last": 1, **({} if quota_gib is None else {"quota_gib": quota_gib})}
    return listed_spec(SERIES, pruner=PRUNER, checkpoints=checkpoints)


def kept(ran: Ran) -> list[list[str]]:
    return [ran.on_disk(number) for number in range(len(SERIES))]


def size_gib(ran: Ran, name: str, number: int = 0) -> float:
    return (ran.folder / f"trial-{number:04d}" / name).stat().st_size / GIB


@pytest.fixture
def sizes(tmp_path: Path) -> tuple[float, float]:
    """GiB of a trial's best checkpoint and of its last one."""
    (tmp_path / "free").mkdir()
    ran = run_spec(quota_spec(None), tmp_path / "free")
    assert kept(ran) == [["best.pt", "last-0001.pt"]] * 2 + [["best.pt", "last-0000.pt"], ["best.pt", "last-0001.pt"]]
    assert ran.reasons() == ["max_epochs", "max_epochs", "pruned", "max_epochs"]
    return size_gib(ran, "best.pt"), size_gib(ran, "last-0001.pt")


@pytest.mark.parametrize(
    ("best", "last", "left"),
    [
        pytest.param(4, 4, [2, 2, 2, 2], id="all-fit"),
        pytest.param(4, 2.5, [1, 1, 2, 2], id="what-is-only-to-go-on-goes-first"),
        pytest.param(3.1, 1, [1, 1, 0, 2], id="then-pruned-trials"),
        pytest.param(2.1, 1, [0, 1, 0, 2], id="then-the-worst-complete-one"),
    ],
)
def test_what_goes_first(tmp_path: Path, sizes: tuple[float, float], best: float, last: float, left: list[int]) -> None:
    """Trial 3 runs when the quota is reached: its own files stay."""
    slack = 1.1
    quota = best * sizes[0] + last * sizes[1] * slack
    ran = run_spec(quota_spec(quota), tmp_path)
    found = kept(ran)
    assert [len(names) for names in found] == left
    assert "best.pt" in found[1]  # of the best trial
    used = sum(path.stat().st_size for path in ran.folder.glob("*/*.pt"))
    assert used <= quota * GIB
    assert [len((ran.folder / f"trial-{n:04d}/records.jsonl").read_text().splitlines()) for n in range(4)] == [
        2,
        2,
        1,
        2,
    ]
    assert ran.tracker.finished[3][1].get("note") is None


def test_a_quota_that_cannot_be_kept_is_said(tmp_path: Path) -> None:
    ran = run_spec(quota_spec(1e-9), tmp_path)
    assert kept(ran)[1] == ["best.pt"]
    assert [
        number for number in range(4) if "quota_gib (1e-09)" in ran.tracker.finished[number][1].get("note", "")
    ] == [0, 1, 2, 3]
    assert ran.reasons() == ["max_epochs", "max_epochs", "pruned", "max_epochs"]


def test_the_best_of_equal_ones_is_the_first(tmp_path: Path) -> None:
    spec = listed_spec([[0.5], [0.5], [0.5]], checkpoints={"keep_last": 0, "quota_gib": 1e-9})
    ran = run_spec(spec, tmp_path)
    assert ran.study.best_trial.number == 0
    assert ran.on_disk(0) == ["best.pt"]
    torch.load(ran.folder / "trial-0000/best.pt", weights_only=True)
