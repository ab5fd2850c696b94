"""The networks by name: shapes, the layers they are made of, and what is said about parameters they cannot use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

from sweeper.errors import SpecError
from sweeper.imports import add_import_folder
from sweeper.models import build_model, check_model, has_batch_norm, zoo
from sweeper.records import DataInfo
from sweeper.spec import ModelSpec

# One small member of each family, with an image size it takes.
FAMILIES = [
    ("alexnet", 64),
    ("convnext_tiny", 32),
    ("densenet121", 32),
    ("efficientnet_b0", 8),
    ("googlenet", 16),
    ("inception_v3", 75),
    ("maxvit_t", 224),
    ("mnasnet0_5", 8),
    ("mobilenet_v2", 8),
    ("mobilenet_v3_small", 8),
    ("regnet_y_400mf", 8),
    ("resnet18", 8),
    ("shufflenet_v2_x0_5", 8),
    ("squeezenet1_0", 28),
    ("swin_t", 8),
    ("swin_v2_t", 8),
    ("vgg11", 32),
    ("vit_b_16", 32),
]


def info_of(*shape: int, outputs: int = 10) -> DataInfo:
    return DataInfo(name="toy", input_shape=shape, num_outputs=outputs, sizes={"train": 4, "val": 2})


def build(name: str, info: DataInfo, **params: Any) -> nn.Module:
    return build_model(ModelSpec(name=name, params=params), info)


def fault_of(name: str, params: dict[str, Any], info: DataInfo) -> tuple[tuple[str | int, ...], str, str]:
    with pytest.raises(SpecError) as caught:
        build_model(ModelSpec(name=name, params=params), info)
    fault = caught.value.fault
    return fault.path, fault.what, fault.todo


def answer(model: nn.Module, *shape: int) -> tuple[int, ...]:
    return tuple(model(torch.zeros(2, *shape)).shape)


def kinds(model: nn.Module) -> list[str]:
    return [type(layer).__name__ for layer in model.children()]


def test_the_default_cnn_is_conv16_conv32_pool_and_64_hidden_units() -> None:
    torch.manual_seed(3)
    model = build("cnn", info_of(1, 8, 8))
    torch.manual_seed(3)
    by_hand = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    samples = torch.rand(5, 1, 8, 8)
    assert torch.equal(model(samples), by_hand(samples))
    assert sum(parameter.numel() for parameter in model.parameters()) == 160 + 4640 + 32832 + 650


@pytest.mark.parametrize(
    ("shape", "params", "flattened"),
    [
        pytest.param((1, 8, 8), {"depth": 1}, 16 * 4 * 4, id="one convolution is pooled"),
        pytest.param((1, 8, 8), {"depth": 3}, 64 * 2 * 2, id="after the pair and after the last"),
        pytest.param((1, 8, 8), {"depth": 8, "width": 4}, 32 * 2 * 2, id="no pool below four pixels, 8 times at most"),
        pytest.param((3, 32, 32), {"depth": 4}, 128 * 8 * 8, id="two pools in colour"),
        pytest.param((3, 64, 48), {"depth": 2, "width": 8}, 16 * 32 * 24, id="not square"),
        pytest.param((1, 28, 28), {"depth": 6, "batch_norm": True, "dropout": 0.5}, 128 * 3 * 3, id="odd sides"),
    ],
)
def test_cnn_pools_while_the_image_is_large(shape: tuple[int, ...], params: dict[str, Any], flattened: int) -> None:
    model = build("cnn", info_of(*shape, outputs=7), **params)
    hidden = next(layer for layer in model.children() if isinstance(layer, nn.Linear))
    assert hidden.in_features == flattened
    assert answer(model, *shape) == (2, 7)


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        pytest.param(
            "mlp",
            {"depth": 2, "dropout": 0.1, "batch_norm": True},
            ["Flatten", *["Linear", "BatchNorm1d", "ReLU", "Dropout"] * 2, "Linear"],
            id="mlp with all",
        ),
        pytest.param("mlp", {}, ["Flatten", "Linear", "ReLU", "Linear"], id="mlp"),
        pytest.param("mlp", {"depth": 0}, ["Flatten", "Linear"], id="linear model"),
        pytest.param(
            "cnn",
            {"depth": 1, "dropout": 0.1, "batch_norm": True},
            ["Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d", "Flatten", "Linear", "ReLU", "Dropout", "Linear"],
            id="cnn with all",
        ),
    ],
)
def test_layers_stand_in_order(name: str, params: dict[str, Any], expected: list[str]) -> None:
    model = build(name, info_of(1, 8, 8), **params)
    assert kinds(model) == expected
    assert has_batch_norm(model) == bool(params.get("batch_norm"))


@pytest.mark.parametrize("shape", [(30,), (3, 8, 8), (5, 4)], ids=["rows", "images", "matrices"])
def test_mlp_takes_any_shape(shape: tuple[int, ...]) -> None:
    model = build("mlp", info_of(*shape, outputs=3), width=11)
    assert answer(model, *shape) == (2, 3)
    assert next(model.parameters()).shape == (11, torch.Size(shape).numel())


@pytest.mark.parametrize(
    ("name", "params", "path", "what", "todo"),
    [
        pytest.param(
            "cnn", {"widht": 8}, ("model", "params", "widht"), "cnn has no such parameter", "Did you mean `width`? ",
            id="misspelt",
        ),
        pytest.param(
            "mlp", {"hidden": 8}, ("model", "params", "hidden"), "mlp has no such parameter",
            "mlp takes `width`, `depth`, `dropout`, `batch_norm`.", id="of the other model",
        ),
        pytest.param(
            "mlp", {"width": 0}, ("model", "params", "width"), "must be at least 1, not 0", "mlp takes", id="too small"
        ),
        pytest.param(
            "cnn", {"dropout": 1.0}, ("model", "params", "dropout"), "must be below 1", "cnn takes", id="drops all"
        ),
        pytest.param(
            "cnn", {"width": "16"}, ("model", "params", "width"), "must be a whole number", "without quotes", id="text"
        ),
        pytest.param(
            "torchvision:resnet18", {"dropout": 0.1}, ("model", "params", "dropout"),
            "torchvision:resnet18 has no such parameter",
            "torchvision:resnet18 takes `zero_init_residual`, `groups`, `width_per_group`.", id="not in this network",
        ),
        pytest.param(
            "torchvision:mobilenet_v3_small", {"dropuot": 0.1}, ("model", "params", "dropuot"),
            "torchvision:mobilenet_v3_small has no such parameter", "Did you mean `dropout`? ",
            id="swallowed by the class",
        ),
        pytest.param(
            "torchvision:densenet121", {"growth_rate": 8}, ("model", "params", "growth_rate"),
            "torchvision:densenet121 has no such parameter", "`drop_rate`", id="what the name means",
        ),
        pytest.param(
            "torchvision:shufflenet_v2_x0_5", {"dropout": 0.1}, ("model", "params", "dropout"),
            "torchvision:shufflenet_v2_x0_5 has no such parameter", "takes no parameters.", id="nothing to set",
        ),
        pytest.param(
            "torchvision:resnet81", {}, ("model", "name"),
            f"torchvision {torchvision.__version__} has no classification model 'resnet81'", "Did you mean `resnet18`?",
            id="unknown network",
        ),
        pytest.param(
            "torchvision:fcn_resnet50", {}, ("model", "name"),
            f"torchvision {torchvision.__version__} has no classification model 'fcn_resnet50'", "It has alexnet, ",
            id="segmentation network",
        ),
        pytest.param("mpl", {}, ("model", "name"), "there is no model 'mpl'", "Did you mean `mlp`?", id="no model"),
    ],
)  # fmt: skip
def test_names_and_parameters_are_checked_without_building(
    name: str, params: dict[str, Any], path: tuple[str, ...], what: str, todo: str
) -> None:
    with pytest.raises(SpecError) as caught:
        check_model(ModelSpec(name=name, params=params))
    assert caught.value.fault.path == path
    assert caught.value.fault.what.startswith(what)
    assert todo in caught.value.fault.todo
    assert fault_of(name, params, info_of(1, 8, 8))[0] == path


@pytest.mark.parametrize(("name", "size"), FAMILIES, ids=[name for name, _ in FAMILIES])
def test_every_family_is_fitted_to_grey_images_and_to_the_classes(name: str, size: int) -> None:
    info = info_of(1, size, size, outputs=7)
    model = build(f"torchvision:{name}", info)
    first = next(layer for layer in model.modules() if isinstance(layer, nn.Conv2d))
    last = [layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d)][-1]
    assert first.weight.shape[1] == 1
    assert last.weight.shape[0] == 7
    assert model.training
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_every_family_is_in_the_table() -> None:
    names = torchvision.models.list_models(module=torchvision.models)
    tested = {zoo.network_class(name) for name, _ in FAMILIES}
    assert {zoo.network_class(name) for name in names} == tested


def test_a_fitted_network_answers_and_learns_with_real_numbers() -> None:
    model = build("torchvision:resnet18", info_of(1, 8, 8, outputs=4))
    output = model(torch.rand(3, 1, 8, 8))
    output.square().sum().backward()
    assert output.shape == (3, 4)
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert has_batch_norm(model)


def test_colour_images_keep_the_networks_own_first_layer() -> None:
    torch.manual_seed(0)
    model = build("torchvision:resnet18", info_of(3, 32, 32, outputs=5))
    torch.manual_seed(0)
    plain = torchvision.models.resnet18(num_classes=5)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("name", ["inception_v3", "googlenet"])
def test_networks_with_a_second_output_have_one_in_training(name: str) -> None:
    model = build(f"torchvision:{name}", info_of(3, 75, 75, outputs=4))
    assert answer(model.train(), 3, 75, 75) == (2, 4)


@pytest.mark.parametrize(
    ("name", "params", "layer", "attribute"),
    [
        pytest.param("efficientnet_b0", {"dropout": 0.25}, "classifier.0", "p", id="dropout"),
        pytest.param("vgg11", {"dropout": 0.25}, "classifier.2", "p", id="vgg"),
        pytest.param("squeezenet1_0", {"dropout": 0.25}, "classifier.0", "p", id="squeezenet"),
        pytest.param(
            "vit_b_16",
            {"attention_dropout": 0.25},
            "encoder.layers.encoder_layer_0.self_attention",
            "dropout",
            id="vit",
        ),
    ],
)
def test_parameters_reach_the_network(name: str, params: dict[str, Any], layer: str, attribute: str) -> None:
    model = build(f"torchvision:{name}", info_of(3, 32, 32), **params)
    assert getattr(model.get_submodule(layer), attribute) == 0.25


# Those with parameters that a study file can give; their own defaults, given, must build.
@pytest.mark.parametrize(("name", "size"), FAMILIES, ids=[name for name, _ in FAMILIES])
def test_each_parameter_that_a_network_is_said_to_take_is_taken(name: str, size: int) -> None:
    values = {bool: False, int: 8, float: 0.1, bool | None: False, int | None: 8, float | None: 0.1}
    only_with_bottlenecks = {"groups", "width_per_group"}
    fields = zoo.params_schema(name).model_fields
    params = {key: values[field.annotation] for key, field in fields.items() if key not in only_with_bottlenecks}  # type: ignore[index]
    assert answer(build(f"torchvision:{name}", info_of(3, size, size), **params), 3, size, size) == (2, 10)


@pytest.mark.parametrize(
    ("name", "shape", "params", "path", "what"),
    [
        pytest.param("alexnet", (1, 8, 8), {}, ("model", "name"), "take images of 8x8", id="pooled to nothing"),
        pytest.param("convnext_tiny", (3, 28, 28), {}, ("model", "name"), "take images of 28x28", id="kernel too big"),
        pytest.param("vit_b_16", (3, 28, 28), {}, ("model", "name"), "be built for 28x28", id="not whole patches"),
        pytest.param("vit_b_16", (3, 32, 16), {}, ("model", "name"), "take images of 32x16", id="not square"),
        pytest.param("maxvit_t", (3, 64, 64), {}, ("model", "name"), "be built for 64x64", id="not whole windows"),
        pytest.param(
            "alexnet", (3, 64, 64), {"dropout": 1.5}, ("model", "params"), "be built for 64x64, dropout=1.5",
            id="value the network refuses",
        ),
        pytest.param(
            "resnext50_32x4d", (3, 64, 64), {"groups": 2}, ("model", "params"), "be built for 64x64, groups=2",
            id="value the name fixes",
        ),
    ],
)  # fmt: skip
def test_what_a_network_cannot_take_is_said_with_its_name_and_the_size(
    name: str, shape: tuple[int, ...], params: dict[str, Any], path: tuple[str, ...], what: str
) -> None:
    found = fault_of(f"torchvision:{name}", params, info_of(*shape))
    assert found[:2] == (path, f"torchvision:{name} cannot {what}")
    assert "data.image_size" in found[2]


@pytest.mark.parametrize("name", ["cnn", "torchvision:resnet18"])
def test_rows_are_no_images(name: str) -> None:
    path, what, todo = fault_of(name, {}, info_of(30))
    assert path == ("model", "name")
    assert what == f"{name} takes images (channels, height, width), but a sample of toy has the shape (30,)"
    assert "mlp" in todo


@pytest.mark.parametrize("name", ["mlp", "cnn", "torchvision:mobilenet_v3_small"])
def test_the_seed_decides_the_weights(name: str) -> None:
    weights = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        model = build(name, info_of(1, 8, 8))
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


USER_MODULE = """
import torch

NUMBER = 3

def build(params, data):
    features = data.input_shape[0]
    return torch.nn.Linear(features, data.num_outputs, bias=params.pop("bias"))

def forgets(params, data):
    torch.nn.Linear(1, 1)

def fails(params, data):
    raise KeyError("depth")
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "nets_of_a_user.py").write_text(USER_MODULE)
    add_import_folder(tmp_path)
    yield "nets_of_a_user"
    sys.modules.pop("nets_of_a_user", None)


def test_a_users_function_gets_a_copy_of_the_params_and_the_data(user_module: str) -> None:
    spec = ModelSpec(name=f"{user_module}:build", params={"bias": False})
    for _ in range(2):
        model = build_model(spec, info_of(6, outputs=4))
        assert isinstance(model, nn.Linear)
        assert (model.in_features, model.out_features, model.bias) == (6, 4, None)


@pytest.mark.parametrize(
    ("attribute", "what"),
    [
        pytest.param("forgets", "returned an object of type NoneType, not a torch.nn.Module", id="returns nothing"),
        pytest.param("NUMBER", "is of type int, not a function", id="not callable"),
    ],
)
def test_what_is_no_model_is_said_in_words(user_module: str, attribute: str, what: str) -> None:
    path, found, todo = fault_of(f"{user_module}:{attribute}", {}, info_of(6))
    assert (path, found) == (("model", "name"), f"{user_module}:{attribute} {what}")
    assert "def build(params: dict, data: sweeper.DataInfo)" in todo


def test_an_error_of_the_users_own_passes_through(user_module: str) -> None:
    with pytest.raises(KeyError, match="depth"):
        build(f"{user_module}:fails", info_of(6))


def test_a_missing_module_names_it() -> None:
    assert fault_of("no_such_module_here:build", {}, info_of(6))[1] == "module 'no_such_module_here' cannot be imported"
