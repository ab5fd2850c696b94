"""Shared by all tests. One torch thread: the machines are small, and more threads round differently."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """Ordinary tests run on the CPU on every machine: they compare bits, and they fork, which CUDA does not survive."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(autouse=True)
def _plain_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The developer's own databases and cache must not leak into a test."""
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "cache"))
    monkeypatch.delenv("SWEEPER_STORAGE", raising=False)
    monkeypatch.delenv("SWEEPER_TRACKING_URI", raising=False)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of 1 MiB; where mounting needs other rights, files of at most 1 MiB."""
    folder = tmp_path / "small disk"
    folder.mkdir()
    mounted = subprocess.run(["sh", "-c", 'mount -t tmpfs -o size=1m tmpfs "$0"', folder], capture_output=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if mounted.returncode != 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        yield folder
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if mounted.returncode == 0:
            subprocess.run(["umount", folder], check=True)
