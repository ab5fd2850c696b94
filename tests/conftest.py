"""Shared by all tests. One torch thread: the machines are small, and more threads round differently."""

from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """Ordinary tests run on the CPU on every machine: they compare bits, and they fork, which CUDA does not survive."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(autouse=True)
def _plain_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The developer's own databases must not leak into a test."""
    monkeypatch.delenv("SWEEPER_STORAGE", raising=False)
    monkeypatch.delenv("SWEEPER_TRACKING_URI", raising=False)
