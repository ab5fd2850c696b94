"""State as plain Python and torch values, so that `torch.load(weights_only=True)` opens what we save.

Loading must never need full unpickling: a checkpoint from elsewhere could run any code.
"""

from __future__ import annotations

import random
import warnings
from collections import OrderedDict, deque
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

_LEAVES: tuple[Any, ...] = (bool, int, float, complex, str, bytes)


def to_plain(value: Any) -> Any:
    """`value` rebuilt from what safe loading allows. Tensors are kept as they are, not copied.

    numpy scalars become numbers, numeric arrays tensors, other arrays lists, `Enum` members their value, paths text.
    Raises `TypeError` for anything else, here and not at the resume that would need it.
    """
    if value is None or isinstance(value, torch.Tensor | torch.dtype | torch.device):
        return value
    if isinstance(value, Enum):
        return to_plain(value.value)
    if isinstance(value, np.generic) and type(value.item()) in _LEAVES:
        return value.item()
    if isinstance(value, np.ndarray):
        return _plain_array(value)
    for leaf in _LEAVES:
        if isinstance(value, leaf):
            return leaf(value)
    return _plain_container(value)


def _plain_array(array: np.ndarray) -> Any:
    if array.dtype.kind not in "biufc":
        return to_plain(array.tolist())
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C", copy=True))


def _plain_container(value: Any) -> Any:
    if isinstance(value, OrderedDict):
        plain = OrderedDict((to_plain(key), to_plain(item)) for key, item in value.items())
        vars(plain).update(to_plain(vars(value)))  # a module's `state_dict` keeps the versions of its parts here
        return plain
    if isinstance(value, Mapping):
        return {to_plain(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(to_plain(item) for item in value)
    if isinstance(value, list | deque):
        return [to_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return {to_plain(item) for item in value}
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} cannot be kept in a checkpoint: {value!r}")


def rng_state(device: torch.device) -> dict[str, Any]:
    """The state of every global random generator a trial on `device` draws from, as plain values on the CPU.

    Of CUDA only `device`'s own: a trial may go on as another index, or on a machine with fewer cards.
    """
    numpy_state: dict[str, Any] = dict(np.random.get_state(legacy=False))
    inner = numpy_state["state"]
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        # int64, because torch can do little with uint32
        "numpy": to_plain({**numpy_state, "state": {**inner, "key": inner["key"].astype(np.int64)}}),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_rng(state: dict[str, Any], device: torch.device) -> None:
    """Set every global generator to `state`, a result of `rng_state`, loaded with `map_location="cpu"`.

    A state saved on a CUDA device and restored elsewhere, or the reverse, is worth a warning: dropout on the device
    then draws other numbers than the uninterrupted trial would have drawn.
    """
    torch.set_rng_state(state["torch"].cpu())
    random.setstate(state["python"])
    inner = state["numpy"]["state"]
    key = inner["key"].cpu().numpy().astype(np.uint32)
    np.random.set_state({**state["numpy"], "state": {**inner, "key": key}})
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
    elif (device.type == "cuda") != ("cuda" in state):
        saved_on = "a CUDA device" if "cuda" in state else "a device other than CUDA"
        warnings.warn(
            f"The checkpoint was saved on {saved_on} and training goes on on {device}: the device's random numbers "
            "(dropout) continue from its seed, so this trial will not repeat an uninterrupted one bit by bit.",
            stacklevel=2,
        )
