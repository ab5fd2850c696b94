"""Networks by name: `mlp`, `cnn`, `torchvision:NAME`, or the user's `pkg.module:function`.

`check_model` looks at the name and the parameters alone, `build_model` makes the network for the data at hand.
Weights are drawn from torch's global random state: whoever wants the same network again seeds it before.
"""

from __future__ import annotations

import torch

from sweeper.errors import SpecError
from sweeper.imports import is_import_path
from sweeper.models import cnn, mlp, user, zoo
from sweeper.models.params import did_you_mean, read_params
from sweeper.records import DataInfo
from sweeper.spec import ModelSpec

__all__ = ["build_model", "check_model", "has_batch_norm"]


def check_model(spec: ModelSpec) -> None:
    """Raises `SpecError` when the name is unknown or a parameter is none the model takes. Builds nothing.

    What a user's own function does with its parameters is seen only when it builds.
    """
    if is_import_path(spec.name):
        user.find(spec.name)
    elif spec.name.startswith(zoo.PREFIX):
        zoo.read(spec.name, spec.params)
    elif spec.name == "mlp":
        read_params(mlp.MlpParams, spec.params, spec.name)
    elif spec.name == "cnn":
        read_params(cnn.CnnParams, spec.params, spec.name)
    else:
        raise SpecError(
            ("model", "name"),
            f"there is no model {spec.name!r}",
            did_you_mean(spec.name, ["mlp", "cnn"])
            + "There are `mlp`, `cnn`, `torchvision:NAME` and your own `pkg.module:function`.",
        )


def build_model(spec: ModelSpec, info: DataInfo) -> torch.nn.Module:
    """The network, on the CPU, in training mode, with `info.num_outputs` outputs for samples of `info.input_shape`.

    Raises `SpecError` when name or parameters are unknown or the network cannot take such inputs.
    """
    check_model(spec)
    if is_import_path(spec.name):
        return user.build(spec.name, spec.params, info)
    if spec.name.startswith(zoo.PREFIX):
        return zoo.build(spec.name, spec.params, info)
    if spec.name == "mlp":
        return mlp.build(read_params(mlp.MlpParams, spec.params, spec.name), info)
    return cnn.build(read_params(cnn.CnnParams, spec.params, spec.name), info)


def has_batch_norm(model: torch.nn.Module) -> bool:
    """Whether any layer's output depends on the other samples of its micro-batch."""
    return any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in model.modules())
