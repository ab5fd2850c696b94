"""Optimizers by name, parameter groups, and a step that leaves the weights alone when the gradients are not finite."""

from __future__ import annotations

import difflib
import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sweeper.errors import SpecError
from sweeper.spec import TrainSpec

# These take `found_inf` on the device and then leave weights and state untouched, so that no step waits for the host.
MASKING = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)
UNUSABLE = {"LBFGS": "needs a closure that evaluates the loss again", "SparseAdam": "takes sparse gradients only"}


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The class of `torch.optim` called `name`, in any case. Raises `SpecError` with the nearest name."""
    classes = {
        found.lower(): value
        for found, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    found = classes.get(name.lower())
    if found is None:
        near = difflib.get_close_matches(name.lower(), classes, n=1)
        todo = f"Did you mean {near[0]}?" if near else f"torch.optim has: {', '.join(sorted(classes))}."
        raise SpecError(("train", "optimizer"), f"torch.optim has no {name!r}", todo)
    if found.__name__ in UNUSABLE:
        raise SpecError(("train", "optimizer"), f"{name} {UNUSABLE[found.__name__]}", "Use another optimizer.")
    return found


def takes_momentum(name: str) -> bool:
    """Whether `train.momentum` is an argument of the optimizer (Adam's family has betas instead)."""
    return "momentum" in inspect.signature(optimizer_class(name)).parameters


def parameter_groups(model: nn.Module, train: TrainSpec) -> list[dict[str, Any]]:
    """Groups by module prefix (longest wins) and by decay: no weight decay on biases and norms unless asked.

    Each group carries `name` ("" for the rest) and `lr_factor` beside torch's own keys.
    """
    undecayed = set() if train.decay_biases_and_norms else _biases_and_norms(model)
    prefixes = sorted(train.groups, key=lambda group: -len(group.prefix))
    grouped: dict[tuple[str, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        group = next((group for group in prefixes if _starts_with(name, group.prefix)), None)
        prefix, factor = (group.prefix, group.lr_factor) if group is not None else ("", 1.0)
        decay = name not in undecayed
        entry = grouped.setdefault((prefix, decay), {"params": [], "name": prefix, "lr_factor": factor})
        entry["params"].append(parameter)
        if not decay:
            entry["weight_decay"] = 0.0
    for index, group in enumerate(train.groups):
        if not any(prefix == group.prefix for prefix, _ in grouped):
            children = ", ".join(name for name, _ in model.named_children())
            what = f"no trainable parameter's name starts with {group.prefix!r}"
            raise SpecError(("train", "groups", index, "prefix"), what, f"The model's modules are: {children}.")
    if not grouped:
        raise SpecError(("model", "name"), "the model has no trainable parameter", "Return a module with weights.")
    return list(grouped.values())


def _starts_with(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix.rstrip(".") + ".")


def _biases_and_norms(model: nn.Module) -> set[str]:
    names = {name for name, _ in model.named_parameters() if name.split(".")[-1].endswith("bias")}
    for module_name, module in model.named_modules():
        if isinstance(module, NORMS):
            names |= {f"{module_name}.{name}".lstrip(".") for name, _ in module.named_parameters(recurse=False)}
    return names


def build_optimizer(model: nn.Module, train: TrainSpec, fused: bool) -> torch.optim.Optimizer:
    """Raises `SpecError` for an argument that the optimizer does not take or refuses."""
    kind = optimizer_class(train.optimizer)
    accepted = inspect.signature(kind).parameters
    if "fused" in train.optimizer_params:
        raise SpecError(
            ("train", "optimizer_params", "fused"), "is a speed setting", "Write it as `speed: {fused: ...}`."
        )
    for key in ("weight_decay", "momentum"):
        if key in train.optimizer_params:
            raise SpecError(
                ("train", "optimizer_params", key), "has a key of its own", f"Write it as `train: {{{key}: ...}}`."
            )
    for key in train.optimizer_params:
        if key not in accepted or key in ("params", "lr"):
            near = difflib.get_close_matches(key, accepted, n=1)
            todo = f"Did you mean {near[0]}?" if near else f"It takes: {', '.join(list(accepted)[1:])}."
            raise SpecError(("train", "optimizer_params", key), f"{kind.__name__} takes no argument {key!r}", todo)
    arguments: dict[str, Any] = {"lr": train.applied_lr}
    arguments |= {key: getattr(train, key) for key in ("weight_decay", "momentum") if key in accepted}
    arguments |= {key: tuple(v) if isinstance(v, list) else v for key, v in train.optimizer_params.items()}
    groups = parameter_groups(model, train)
    if "weight_decay" not in accepted:
        for group in groups:
            group.pop("weight_decay", None)
    if fused:
        arguments["fused"] = True
    try:
        return kind(groups, **arguments)
    except Exception as error:  # torch checks arguments in many ways, an IndexError among them
        raise SpecError(
            ("train", "optimizer"), f"{kind.__name__} refuses its arguments", f"It says: {error}."
        ) from None


def can_mask(train: TrainSpec, device: torch.device) -> bool:
    """Whether the optimizer's fused kernel can skip a step on this device by itself.

    SGD with dampening treats its first step apart, and forgets to when that step was skipped: it reads the flag.
    """
    kind = optimizer_class(train.optimizer)
    params = train.optimizer_params
    damped = kind is torch.optim.SGD and params.get("dampening", 0) != 0
    other_kernel = any(params.get(key) for key in ("foreach", "capturable", "differentiable"))
    return kind in MASKING and device.type in ("cpu", "cuda") and not damped and not other_kernel


def _start_momentum(optimizer: torch.optim.Optimizer) -> None:
    """SGD's fused kernel leaves its momentum uninitialised when the very first step is skipped; zeros are exact."""
    if isinstance(optimizer, torch.optim.SGD):
        for group in optimizer.param_groups:
            for parameter in group["params"] if group["momentum"] else []:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


class Stepper:
    """Takes optimizer steps with the learning rates of a table, and none where the gradients are not finite.

    `lrs` has shape (total steps, groups). With a masking optimizer the count of steps that happened, and with it the
    learning rate, live on the device: nothing is read back. Other optimizers read one flag per step.
    `happened` has shape (), int64.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, lrs: np.ndarray, masking: bool, device: torch.device) -> None:
        self.optimizer, self.lrs, self.masking, self.device = optimizer, lrs, masking, device
        self.scale, self.floor = 1.0, 0.0
        self.happened = torch.zeros((), dtype=torch.int64, device=device)
        self._happened_on_host = 0
        if masking:
            _start_momentum(optimizer)
            self._table = torch.tensor(lrs, dtype=torch.float32, device=device)
            for group in optimizer.param_groups:
                group["lr"] = torch.zeros((), dtype=torch.float32, device=device)

    def set_scale(self, scale: float, floor: float) -> None:
        """Plateau's factor on every learning rate from now on, none falling below `floor`."""
        self.scale, self.floor = scale, floor
        if self.masking:
            self._table = torch.tensor(self._scaled(self.lrs), dtype=torch.float32, device=self.device)

    def _scaled(self, lrs: np.ndarray) -> np.ndarray:
        if self.scale == 1.0:
            return lrs
        return np.maximum(lrs * self.scale, np.minimum(lrs, self.floor))

    def step(self, bad: Tensor) -> None:
        """One optimizer step unless `bad` (shape (), bool, on the device)."""
        if self.masking:
            row = self._table.index_select(0, self.happened.clamp(max=len(self.lrs) - 1).view(1))[0]
            for group, lr in zip(self.optimizer.param_groups, row.unbind(), strict=True):
                group["lr"].copy_(lr)
            self.optimizer.found_inf = bad.to(torch.float32)  # type: ignore[attr-defined]
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
            self.optimizer.step()
            self.happened += ~bad
        elif not bool(bad):
            lrs = self.lrs_at(self._happened_on_host)
            for group, value in zip(self.optimizer.param_groups, lrs, strict=True):
                group["lr"] = value
            self.optimizer.step()
            self._happened_on_host += 1
            self.happened += 1

    def lrs_at(self, step: int) -> list[float]:
        """The learning rate of each group at optimizer step `step`."""
        return self._scaled(self.lrs[min(step, len(self.lrs) - 1)]).tolist()

    def state_dict(self) -> dict[str, Any]:
        """Everything but the learning-rate table, which the config rebuilds."""
        return {"optimizer": self.optimizer.state_dict(), "happened": int(self.happened), "scale": self.scale}

    def load_state_dict(self, state: dict[str, Any], floor: float) -> None:
        """Restore after the schedule has been built, so that no building of it resets a learning rate."""
        self._load_optimizer(state["optimizer"])
        self._happened_on_host = state["happened"]
        self.happened.fill_(state["happened"])
        self.set_scale(state["scale"], floor)
        if self.masking:
            for group in self.optimizer.param_groups:
                group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=self.device)

    def _load_optimizer(self, saved: dict[str, Any]) -> None:
        """Kernel and memory format are this attempt's: `speed.fused` and `speed.channels_last` may have changed, and a
        fused kernel pairs weights and moments as they lie in memory."""
        groups = [
            {**stored, "fused": group["fused"]} if "fused" in group else stored
            for stored, group in zip(saved["param_groups"], self.optimizer.param_groups, strict=True)
        ]
        self.optimizer.load_state_dict({**saved, "param_groups": groups})
        for parameter, kept in self.optimizer.state.items():
            for name, value in kept.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    kept[name] = torch.empty_like(parameter).copy_(value)
