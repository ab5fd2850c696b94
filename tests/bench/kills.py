"""`python -m tests.bench chaos`: kills survived of kills tried, and seconds lost per kill.

Two of five kills hit a named point (between two commits, around a rename, in start-up), the others a random moment.
"""

from __future__ import annotations

import platform
import tempfile
from pathlib import Path

import torch

from tests import chaos


def run(num_kills: int, seed: int) -> int:
    """Print one line a life, then the comparison; 1 if anything differs."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        whole, killed = Path(work, "whole"), Path(work, "killed")
        for folder in (whole, killed):
            folder.mkdir()
            # As long as the kills need: each life gets a little further.
            text = chaos.STUDY.format(epochs=6, trials=max(4, num_kills // 2))
            (folder / "study.yaml").write_text(text)
        left_alone = chaos.live(whole, None)
        print(f"left alone: {left_alone.seconds:.1f} s, exit code {left_alone.code}", flush=True)
        lives, hit, at_points = [], 0, 0
        for death in chaos.deaths(seed, num_kills, 2 * num_kills // 5):
            life = chaos.live(killed, death)
            lives.append(life)
            hit += life.killed
            at_points += life.at_point
            print(f"{len(lives):>4}: {death}: {'killed' if life.killed else f'exit code {life.code}'}", flush=True)
        last = chaos.live(killed, None)
        found = chaos.differences(whole, killed)
        lost = (sum(life.seconds for life in [*lives, last]) - left_alone.seconds) / max(1, hit)
        print(f"{hit} of {num_kills} kills hit a running study, {at_points} of them at a named point; seed {seed}")
        print(f"the last run: exit code {last.code}; {len(found)} differences")
        print(f"{lost:.2f} s lost per kill ({platform.machine()}, torch {torch.__version__}, one study, n = {hit})")
        for sentence in found[:50]:
            print(f"  {sentence[:300]}")
        return 1 if found or last.code else 0
