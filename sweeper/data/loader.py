"""Batches for the training loop: given lists of indices in, collated batches out, in that order."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
from collections.abc import Generator, Iterator
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, Dataset

from sweeper.data.augment import Augmented, build_augment
from sweeper.data.memory import InMemory
from sweeper.data.samples import collate, read_samples
from sweeper.errors import DataError
from sweeper.spec import derive_seed

Key = tuple[int, int]
"""(epoch, index): what a sample is drawn from. Setting the epoch on the dataset would not reach persistent workers."""


class EpochLoader:
    """Reads `dataset`, augmented where `augment` is not empty, in this process or in `num_workers` others.

    A sample depends on (seed, epoch, index) alone: it has the same bits for any number of workers, persistent or not,
    and for any number of epochs before. The global random states are left as they were.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        augment: list[str | dict[str, Any]],
        num_workers: int,
        pin_memory: bool,
        prefetch_factor: int,
        persistent_workers: bool,
    ) -> None:
        transform = build_augment(augment, dataset)
        self._dataset = _Keyed(dataset if transform is None else Augmented(dataset, transform), seed)
        self._plan = _Plan()
        for_workers: dict[str, Any] = {}
        if num_workers:
            for_workers = {
                "prefetch_factor": prefetch_factor,
                "persistent_workers": persistent_workers,
                "worker_init_fn": functools.partial(_start_worker, os.getpid()),
                # A child of a fork server would take `forkserver`, which loads torch again for each worker.
                "multiprocessing_context": "fork" if sys.platform == "linux" else None,
            }
        self._loader: DataLoader[Any] | None = DataLoader(
            self._dataset,
            batch_sampler=self._plan,
            num_workers=num_workers,
            collate_fn=_as_it_is,
            pin_memory=pin_memory and torch.accelerator.is_available(),  # torch warns without a device
            generator=torch.Generator().manual_seed(derive_seed(seed)),  # it would else draw from the global one
            **for_workers,
        )

    def __len__(self) -> int:
        """Samples, not batches."""
        return len(self._dataset)

    def epoch(self, epoch: int, plan: list[list[int]]) -> Generator[tuple[Any, Any], None, None]:
        """One batch (inputs, targets) for each list of indices in `plan`, in order, on the CPU.

        Close it, or read it to its end, before the next epoch is asked for.
        """
        assert self._loader is not None, "the loader is closed"
        self._plan.keys = [[(epoch, index) for index in indices] for indices in plan]
        try:
            for batch in self._loader:
                if isinstance(batch, DataError):
                    raise batch
                yield batch[0], batch[1]  # pinning makes lists of tuples
        except Exception as error:
            if not self._loader.num_workers:
                raise
            # What a worker raised names the worker's traceback in its text. The one here would keep torch's iterator
            # alive in a reference cycle, and ending its workers from the garbage collector takes 5 s.
            raise error.with_traceback(None)  # noqa: B904

    def close(self) -> None:
        """End the loader workers. No epoch can be read afterwards."""
        self._loader = None


class _Plan:
    """The batch sampler: what the next epoch reads."""

    keys: list[list[Key]] = []

    def __iter__(self) -> Iterator[list[Key]]:
        return iter(self.keys)

    def __len__(self) -> int:
        return len(self.keys)


class _Keyed(Dataset[Any]):
    """A dataset asked for whole batches, by keys."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, keys: list[Key]) -> tuple[Any, Any] | DataError:
        if isinstance(self.dataset, InMemory):  # nothing is drawn: no seeding, no collation
            return self.dataset.__getitems__([index for _, index in keys])
        try:
            return collate(read_samples(self.dataset, keys, self.seed))
        except DataError as error:  # handed over, not raised: torch would put the worker's traceback into its text
            return error


def _as_it_is(batch: Any) -> Any:
    return batch


def _start_worker(parent: int, _worker: int) -> None:
    """Runs first in each loader worker: it dies with its parent, and leaves Ctrl-C and a hangup to it."""
    # Handlers of the trial were inherited; they would end the worker in the middle of an epoch that is to be finished.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which torch ends a worker that hangs
        pr_set_pdeathsig = 1  # from <sys/prctl.h>; without it a worker outlives a killed trial by 5 s
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)


def is_in_memory(dataset: Any) -> bool:
    """Whether batches are looked up in memory, so that loader workers bring nothing."""
    return isinstance(dataset, InMemory)


def resolve_num_workers(setting: int | Literal["auto"], in_memory: bool, cores: int) -> int:
    """`speed.num_workers` as a number: `auto` is 0 for data in memory, else half of this worker's cores, at least 1."""
    if setting != "auto":
        return setting
    return 0 if in_memory else max(1, cores // 2)
