"""`torchvision:NAME`: every classification network of torchvision, untrained, fitted to the data's channels."""

from __future__ import annotations

import functools
import inspect
import typing
from typing import Any

import torch
from pydantic import create_model
from torch import nn

from sweeper.errors import SpecError
from sweeper.models.params import did_you_mean, image_shape, read_params
from sweeper.records import DataInfo
from sweeper.spec import Section

PREFIX = "torchvision:"

# A parameter that a study file can give: anything else (a layer's class, a list of blocks) is code.
PLAIN_TYPES = (bool, int, float, bool | None, int | None, float | None)
SET_HERE = ("num_classes", "image_size", "aux_logits", "dropout_aux", "transform_input")
# torchvision passes these itself, they are what the name stands for; given again they are a TypeError.
MEANT_BY_NAME = {
    "DenseNet": ("growth_rate", "num_init_features"),
    "EfficientNet": ("last_channel",),
    "MaxVit": ("stem_channels", "partition_size", "head_dim", "stochastic_depth_prob"),
    "MNASNet": ("alpha",),
    "MobileNetV3": ("last_channel",),
    "SwinTransformer": ("embed_dim", "stochastic_depth_prob"),
    "VisionTransformer": ("patch_size", "num_layers", "num_heads", "hidden_dim", "mlp_dim"),
}


def read(model_name: str, params: dict[str, Any]) -> dict[str, Any]:
    """The parameters given, checked against those that the network's class takes.

    Raises `SpecError` for a name that torchvision does not have and for unknown parameters.
    """
    import torchvision

    name = model_name.removeprefix(PREFIX)
    names = torchvision.models.list_models(module=torchvision.models)
    if name not in names:
        raise SpecError(
            ("model", "name"),
            f"torchvision {torchvision.__version__} has no classification model {name!r}",
            did_you_mean(name, names) + f"It has {', '.join(names)}.",
        )
    return read_params(params_schema(name), params, model_name).model_dump(exclude_unset=True)


def build(model_name: str, params: dict[str, Any], info: DataInfo) -> nn.Module:
    """(batch, channels, height, width) -> (batch, num_outputs), without trained weights: nothing is downloaded.

    Raises `SpecError` when the network cannot be built with these parameters or cannot take images of this size.
    """
    import torchvision

    name = model_name.removeprefix(PREFIX)
    channels, height, width = image_shape(info, model_name)
    arguments = {**_own_arguments(name, height, width), **read(model_name, params)}
    try:
        model = torchvision.models.get_model(name, weights=None, num_classes=info.num_outputs, **arguments)
    except (TypeError, ValueError, AssertionError) as error:
        key = ("model", "params") if params else ("model", "name")
        given = "".join(f", {key}={value!r}" for key, value in params.items())
        raise _unfit(key, model_name, f"be built for {height}x{width}{given}", error) from error
    _fit_first_layer(model, channels)
    try:
        shape = _output_shape(model, info)
    except (RuntimeError, ValueError, AssertionError) as error:
        raise _unfit(("model", "name"), model_name, f"take images of {height}x{width}", error) from error
    assert shape == (2, info.num_outputs), f"{model_name} answers with {shape}"
    return model


def _own_arguments(name: str, height: int, width: int) -> dict[str, Any]:
    network = network_class(name).__name__
    if network == "VisionTransformer":
        return {"image_size": height}
    if network == "MaxVit":
        return {"input_size": (height, width)}
    if network in ("GoogLeNet", "Inception3"):
        # The second output in training would need a loss of its own; weights as torch draws them, as everywhere here.
        return {"aux_logits": False, "init_weights": False}
    return {}


def network_class(name: str) -> type[nn.Module]:
    """The class behind a name; a family such as resnet18, resnet50, ... is one class."""
    import torchvision

    return typing.get_type_hints(torchvision.models.get_model_builder(name))["return"]


@functools.cache
def params_schema(name: str) -> type[Section]:
    """The plain parameters of the network's class that its name leaves open."""
    network = network_class(name)
    hints = typing.get_type_hints(network.__init__)
    hidden = (*SET_HERE, *MEANT_BY_NAME.get(network.__name__, ()))
    fields: dict[str, Any] = {
        key: (hints[key], None)
        for key in inspect.signature(network).parameters
        if key not in hidden and hints.get(key) in PLAIN_TYPES
    }
    return create_model(f"{network.__name__}Params", __base__=Section, **fields)


def _fit_first_layer(model: nn.Module, channels: int) -> None:
    """Replace the first convolution by one for `channels` channels, freshly drawn; all were built for colour."""
    path, first = next((path, module) for path, module in model.named_modules() if isinstance(module, nn.Conv2d))
    if first.in_channels == channels:
        return
    assert first.groups == 1, f"the first convolution of {type(model).__name__} has groups"
    model.set_submodule(
        path,
        nn.Conv2d(
            channels,
            first.out_channels,
            typing.cast(tuple[int, int], first.kernel_size),
            stride=typing.cast(tuple[int, int], first.stride),
            padding=typing.cast(tuple[int, int], first.padding),
            bias=first.bias is not None,
        ),
    )


def _output_shape(model: nn.Module, info: DataInfo) -> tuple[int, ...]:
    """The shape of the answer to two samples, found without computing: weights and samples stand on `meta`."""
    named = [*model.named_parameters(), *model.named_buffers()]
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in named}
    samples = torch.empty(2, *info.input_shape, device="meta")
    model.eval()
    with torch.no_grad():
        output = torch.func.functional_call(model, shapes, (samples,))
    model.train()
    return tuple(output.shape)


def _unfit(key: tuple[str, ...], model_name: str, cannot: str, error: Exception) -> SpecError:
    said = str(error).strip().splitlines()[0]
    return SpecError(
        key,
        f"{model_name} cannot {cannot}",
        "Change its parameters, choose another model, or set `data.image_size` (each of torchvision's networks takes"
        f" 224). It said: {said}",
    )
