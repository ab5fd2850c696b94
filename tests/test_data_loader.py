from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import TensorDataset

from pictures import folder_spec, write_d2
from sweeper.data import load_data
from sweeper.data.loader import EpochLoader, is_in_memory, resolve_num_workers
from sweeper.data.memory import InMemory
from sweeper.errors import DataError
from sweeper.spec import DataSpec
from user_data import Breaking, Drawing, Named

PLAN = [[3, 1, 4], [0, 5], [2, 9, 8, 7]]
WORKERS = [
    pytest.param(0, False, id="no worker"),
    pytest.param(1, True, id="1 persistent"),
    pytest.param(2, True, id="2 persistent"),
    pytest.param(2, False, id="2 new ones each epoch"),
]


def make(dataset: Any, augment: Any = (), num_workers: int = 0, persistent: bool = False, seed: int = 7) -> EpochLoader:
    return EpochLoader(
        dataset,
        seed=seed,
        augment=list(augment),
        num_workers=num_workers,
        pin_memory=True,
        prefetch_factor=2,
        persistent_workers=persistent,
    )


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@pytest.mark.parametrize(("num_workers", "persistent"), WORKERS)
def test_batches_come_in_the_order_of_the_plan(num_workers: int, persistent: bool) -> None:
    loader = make(InMemory(torch.arange(10.0) * 2, torch.arange(10)), (), num_workers, persistent)
    assert len(loader) == 10
    for epoch, plan in enumerate([PLAN, PLAN[::-1], [], PLAN[:1]]):
        batches = list(loader.epoch(epoch, plan))
        assert [targets.tolist() for _, targets in batches] == plan
        assert [inputs.tolist() for inputs, _ in batches] == [[2.0 * index for index in indices] for indices in plan]
    loader.close()


def read(loader: EpochLoader, epochs: list[int]) -> list[torch.Tensor]:
    batches = [inputs for epoch in epochs for inputs, _ in loader.epoch(epoch, PLAN)]
    loader.close()
    return batches


DRAWN = {
    "user data": (Drawing(), []),
    "memory": (
        InMemory(torch.rand(10, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(10)),
        ["random_crop", {"color_jitter": {"brightness": 0.5, "contrast": 0.5}}, "random_erasing"],
    ),
}


@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.parametrize(("num_workers", "persistent"), WORKERS[1:])
def test_samples_have_the_same_bits_for_any_number_of_workers(kind: str, num_workers: int, persistent: bool) -> None:
    dataset, augment = DRAWN[kind]
    alone = read(make(dataset, augment), [0, 1])
    shared = read(make(dataset, augment, num_workers, persistent), [0, 1])
    assert all(torch.equal(one, other) for one, other in zip(alone, shared, strict=True))


def test_files_have_the_same_bits_for_any_number_of_workers(tmp_path: Path) -> None:
    spec = folder_spec(write_d2(tmp_path), augment=["random_resized_crop", "random_horizontal_flip"], image_size=12)
    train = load_data(spec).splits.train
    alone, shared = (read(make(train, spec.augment, count, True), [0, 1]) for count in (0, 2))
    assert all(torch.equal(one, other) for one, other in zip(alone, shared, strict=True))


def test_large_pictures_have_the_same_bits_whatever_the_main_process_uses_for_threads() -> None:
    large = InMemory(torch.rand(10, 3, 300, 300, generator=torch.Generator().manual_seed(0)), torch.arange(10))
    augment = [{"color_jitter": {"contrast": 0.9}}, {"random_affine": {"degrees": 20}}]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        two_threads = read(make(large, augment), [0])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(two_threads, read(make(large, augment), [0]), strict=True))


def test_a_sample_depends_on_seed_epoch_and_index_alone() -> None:
    later = read(make(Drawing()), [0, 1])
    resumed = read(make(Drawing()), [1])
    assert all(torch.equal(one, other) for one, other in zip(later[3:], resumed, strict=True))
    assert not torch.equal(later[0], later[3])
    assert not torch.equal(later[0], read(make(Drawing(), seed=8), [0])[0])
    ((backwards, _),) = make(Drawing()).epoch(0, [[4, 1, 3]])
    assert torch.equal(backwards.flip(0), later[0])


def test_torch_python_and_numpy_draws_all_differ_between_samples() -> None:
    drawn = torch.cat(read(make(Drawing()), [0, 1]))
    assert [len(column.unique()) for column in drawn[:, :3].T] == [18, 18, 18]


@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.parametrize(("num_workers", "persistent"), WORKERS)
def test_loading_leaves_the_global_random_states_alone(kind: str, num_workers: int, persistent: bool) -> None:
    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), float(np.random.rand())

    def seed() -> None:
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)

    seed()
    expected = [draw() for _ in range(3)]
    seed()
    dataset, augment = DRAWN[kind]
    loader = make(dataset, augment, num_workers, persistent)
    found = [draw() for _ in loader.epoch(0, PLAN)]
    loader.close()
    assert found == expected


def test_an_epoch_left_half_way_does_not_reach_the_next() -> None:
    loader = make(Drawing(), (), 2, True)
    left = loader.epoch(0, PLAN * 4)
    next(left)
    left.close()
    batches = [inputs for inputs, _ in loader.epoch(1, PLAN)]
    loader.close()
    assert all(torch.equal(one, other) for one, other in zip(batches, read(make(Drawing()), [1]), strict=True))


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("half_way", [True, False])
def test_close_ends_the_workers(persistent: bool, half_way: bool) -> None:
    before = {child.pid for child in children()}
    loader = make(Drawing(), (), 2, persistent)
    batches = loader.epoch(0, PLAN * 4)
    next(batches)
    assert len(children()) == len(before) + 2
    if not half_way:
        list(batches)
    batches.close()
    loader.close()
    assert {child.pid for child in children()} == before


def test_workers_survive_ctrl_c_so_that_the_epoch_can_be_finished() -> None:
    before = {child.pid for child in children()}
    loader = make(Drawing(), (), 2, True)
    batches = loader.epoch(0, PLAN * 4)
    next(batches)
    for child in children():
        if child.pid not in before:
            child.send_signal(signal.SIGINT)
    assert len(list(batches)) == 11
    loader.close()


def test_workers_of_a_killed_process_die_with_it() -> None:
    program = textwrap.dedent("""
        import psutil, sys
        from sweeper.data.loader import EpochLoader
        from user_data import DeathSignal
        if __name__ == "__main__":
            loader = EpochLoader(DeathSignal(), seed=0, augment=[], num_workers=2, pin_memory=False, prefetch_factor=2,
                                 persistent_workers=True)
            batches = loader.epoch(0, [[0]] * 100)
            print(int(next(batches)[0]), *[child.pid for child in psutil.Process().children()], flush=True)
            sys.stdin.read()
    """)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        death_signal, *pids = map(int, process.stdout.readline().split())
        workers = [psutil.Process(pid) for pid in pids]
        process.kill()
    assert len(workers) == 2
    # Elsewhere torch's own watch ends them, some seconds later.
    assert death_signal == (signal.SIGKILL if sys.platform == "linux" else 0)
    assert psutil.wait_procs(workers, timeout=30)[1] == []


def test_nothing_is_warned_of_when_memory_cannot_be_pinned() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(make(Drawing()).epoch(0, PLAN))


def test_dicts_and_numbers_are_collated() -> None:
    items = [({"a": torch.full((2,), float(place)), "b": place}, place / 2) for place in range(10)]
    ((inputs, targets),) = make(Named(items)).epoch(0, [[1, 4]])
    assert inputs["a"].tolist() == [[1.0, 1.0], [4.0, 4.0]]
    assert inputs["b"].tolist() == [1, 4]
    assert targets.dtype == torch.float32
    assert targets.tolist() == [0.5, 2.0]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_of_different_shapes_are_explained(num_workers: int) -> None:
    items = [(torch.zeros(place + 1), place) for place in range(10)]
    loader = make(Named(items), (), num_workers)
    with pytest.raises(DataError) as caught:
        list(loader.epoch(0, [[1, 4]]))
    loader.close()
    assert str(caught.value).startswith("Samples cannot be put into one batch: ")
    assert "They are (Tensor (2,), int); (Tensor (5,), int). Give every sample" in str(caught.value)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize(("num_workers", "persistent"), WORKERS)
def test_an_exception_of_the_users_keeps_its_type_and_ends_no_worker_late(num_workers: int, persistent: bool) -> None:
    before = {child.pid for child in children()}
    loader = make(Breaking([0] * 10), (), num_workers, persistent)
    with pytest.raises(ZeroDivisionError, match="sample 3"):
        list(loader.epoch(0, PLAN))
    loader.close()
    assert {child.pid for child in children()} == before


@pytest.mark.parametrize(
    ("setting", "in_memory", "cores", "expected"),
    [("auto", True, 8, 0), ("auto", False, 8, 4), ("auto", False, 1, 1), ("auto", False, 5, 2), (3, True, 1, 3)],
)
def test_the_number_of_workers(setting: Any, in_memory: bool, cores: int, expected: int) -> None:
    assert resolve_num_workers(setting, in_memory, cores) == expected


def test_digits_and_tensors_are_in_memory_and_files_are_not(tmp_path: Path) -> None:
    assert is_in_memory(load_data(DataSpec(source="digits")).splits.train)
    assert not is_in_memory(load_data(folder_spec(write_d2(tmp_path))).splits.train)
    assert not is_in_memory(TensorDataset(torch.zeros(2)))
