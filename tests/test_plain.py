"""What is saved opens without unpickling, and gives back the same values and the same random draws."""

from __future__ import annotations

import enum
import os
import random
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sweeper.training.plain import restore_rng, rng_state, to_plain
from sweeper.training.trial_folder import TrialFolder

CPU = torch.device("cpu")


class Colour(enum.StrEnum):
    RED = "red"


class Number(enum.IntEnum):
    TWO = 2


def test_numpy_enums_and_paths_are_saved_as_plain_values(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path, keep_last=1)
    values: dict[Any, Any] = {
        "lr": np.float64(0.1),
        "count": np.int32(3),
        "flag": np.bool_(True),
        "enums": [Colour.RED, Number.TWO],
        "path": Path("a") / "b",
        "tuple": (1, (np.float32(0.5), None)),
        "containers": [deque([1, 2]), {3}, frozenset({4})],
        "texts": np.array(["a", "b"]),
        np.int64(7): {Colour.RED: "key"},
        "dtype": torch.float16,
    }
    folder.save_last(values, 0)
    state = folder.load_last()
    assert state is not None
    assert state == {
        "lr": 0.1,
        "count": 3,
        "flag": True,
        "enums": ["red", 2],
        "path": os.path.join("a", "b"),
        "tuple": (1, (0.5, None)),
        "containers": [[1, 2], {3}, {4}],
        "texts": ["a", "b"],
        7: {"red": "key"},
        "dtype": torch.float16,
    }
    assert [type(state[key]) for key in ("lr", "count", "flag")] == [float, int, bool]


@pytest.mark.parametrize(
    "array",
    [
        pytest.param(np.arange(6, dtype=np.float64).reshape(2, 3), id="float64"),
        pytest.param(np.arange(6, dtype=np.uint32)[::-1], id="uint32-reversed"),
        pytest.param(np.arange(3, dtype=">i4"), id="big-endian"),
        pytest.param(np.array(1.5), id="no-dimension"),
        pytest.param(np.zeros((0, 4)), id="empty"),
    ],
)
def test_numeric_arrays_are_saved_as_tensors(tmp_path: Path, array: np.ndarray) -> None:
    folder = TrialFolder(tmp_path, keep_last=1)
    folder.save_last({"array": array}, 0)
    state = folder.load_last()
    assert state is not None
    assert isinstance(state["array"], torch.Tensor)
    assert np.array_equal(state["array"].numpy(), array)
    assert state["array"].numpy().shape == array.shape


def test_what_safe_loading_would_refuse_is_refused_when_saving(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path, keep_last=1)
    with pytest.raises(TypeError, match=r"slice cannot be kept in a checkpoint"):
        folder.save_last({"deep": [{"slice": slice(3)}]}, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_state_dict_keeps_the_versions_of_its_modules(tmp_path: Path) -> None:
    weights = nn.BatchNorm1d(2).state_dict()
    plain = to_plain(weights)
    assert isinstance(plain, OrderedDict)
    assert vars(plain)["_metadata"] == {"": {"version": 2}}
    folder = TrialFolder(tmp_path, keep_last=1)
    folder.save_last({"model": weights}, 0)
    state = folder.load_last()
    assert state is not None
    assert vars(state["model"])["_metadata"] == {"": {"version": 2}}


def test_optimizer_and_scaler_states_continue_bit_for_bit(tmp_path: Path) -> None:
    def build() -> tuple[nn.Linear, torch.optim.Optimizer, torch.amp.GradScaler]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", growth_interval=2)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(8, 4)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()

    whole, first, second = build(), build(), build()
    torch.manual_seed(1)
    train(*whole, steps=5)
    torch.manual_seed(1)
    train(*first, steps=3)
    folder = TrialFolder(tmp_path, keep_last=1)
    folder.save_last({"parts": [part.state_dict() for part in first], "rng": rng_state(CPU)}, 0)
    torch.manual_seed(99)
    state = folder.load_last()
    assert state is not None
    second[0].load_state_dict(state["parts"][0])
    second[1].load_state_dict(state["parts"][1])
    second[2].load_state_dict(state["parts"][2])
    restore_rng(state["rng"], CPU)
    train(*second, steps=2)
    assert torch.equal(second[0].weight, whole[0].weight)
    assert second[2].state_dict() == whole[2].state_dict()


# ---- random state


def draws() -> list[float]:
    return [
        *torch.rand(3).tolist(),
        *torch.randn(3).tolist(),
        *(random.random() for _ in range(3)),
        random.gauss(0, 1),
        *np.random.random(3),
        np.random.normal(),  # one of a pair: the other half is part of the state
    ]


def test_every_generator_goes_on_with_the_same_draws(tmp_path: Path) -> None:
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    draws()
    folder = TrialFolder(tmp_path, keep_last=1)
    folder.save_last({"rng": rng_state(CPU)}, 0)
    expected = draws()
    state = folder.load_last()
    assert state is not None
    restore_rng(state["rng"], CPU)
    assert draws() == expected


def test_a_cuda_state_on_a_host_without_cuda_is_only_a_warning() -> None:
    state = {**rng_state(CPU), "cuda": torch.zeros(16, dtype=torch.uint8)}
    expected = draws()
    with pytest.warns(UserWarning, match="saved on a CUDA device and training goes on on cpu"):
        restore_rng(state, CPU)
    assert draws() == expected
