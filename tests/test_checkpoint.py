"""The best checkpoint becomes the model again, or says why it cannot."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from sweeper.errors import CheckpointError
from sweeper.models import build_model
from sweeper.records import DataInfo, EpochRecord
from sweeper.spec import (
    DataSpec,
    EarlyStoppingSpec,
    ModelSpec,
    ObjectiveSpec,
    SpeedSpec,
    TaskSpec,
    TrainSpec,
    TrialConfig,
)
from sweeper.training.checkpoint import TrialFolder, best_payload, load_model, open_checkpoint


def config_of(model: ModelSpec) -> TrialConfig:
    return TrialConfig(
        number=7,
        params={"lr": 0.01},
        objective=ObjectiveSpec(monitor="val_accuracy", direction="maximize"),
        data=DataSpec(source="digits"),
        model=model,
        task=TaskSpec(),
        train=TrainSpec(lr=0.01),
        early_stopping=EarlyStoppingSpec(),
        speed=SpeedSpec(),
    )


INFO = DataInfo(
    "digits", input_shape=(1, 8, 8), num_outputs=3, sizes={"train": 4, "val": 2}, class_names=("a", "b", "c")
)
INPUT = torch.linspace(0, 1, 64).reshape(1, 1, 8, 8)
RECORD = EpochRecord(
    validation=5, epoch=5, step=60, epoch_complete=True, timestamp_ms=1_700_000_000_000, metrics={"val_accuracy": 0.75}
)


def save_best(folder: Path, spec: ModelSpec, import_folder: Path | None = None) -> nn.Module:
    """Save a model whose batch norm has seen data, and hand it back."""
    model = build_model(spec, INFO)
    model(torch.randn(16, 1, 8, 8))
    payload = best_payload(model, config_of(spec), INFO, RECORD, "a-study", import_folder, INPUT)
    TrialFolder(folder, keep_last=0).save_best(payload)
    return model


@pytest.mark.parametrize("name_the_file", [pytest.param(True, id="file"), pytest.param(False, id="folder")])
def test_the_best_model_comes_back_ready_for_inference(tmp_path: Path, name_the_file: bool) -> None:
    model = save_best(tmp_path, ModelSpec(name="mlp", params={"batch_norm": True, "dropout": 0.5})).eval()
    loaded = load_model(str(tmp_path / "best.pt") if name_the_file else tmp_path)
    assert not loaded.training
    batch = torch.randn(5, 1, 8, 8)
    assert torch.equal(loaded(batch), model(batch))


def test_the_best_checkpoint_says_where_it_is_from(tmp_path: Path) -> None:
    spec = ModelSpec(name="mlp", params={"width": 4})
    model = save_best(tmp_path, spec)
    payload = open_checkpoint(tmp_path / "best.pt")
    weights = payload.pop("model")
    assert {name: value.tolist() for name, value in weights.items()} == {
        name: value.tolist() for name, value in model.state_dict().items()
    }
    assert TrialConfig(**payload.pop("config")) == config_of(spec)
    assert DataInfo.from_json(payload.pop("data_info")) == INFO
    assert torch.equal(payload.pop("example_input"), INPUT)
    assert payload == {
        "format": 1,
        "model_spec": {"name": "mlp", "params": {"width": 4}},
        "import_folder": None,
        "epoch": 5,
        "validation": 5,
        "value": 0.75,
        "monitor": "val_accuracy",
        "study": "a-study",
        "trial": 7,
    }


def test_the_payload_is_a_copy_that_later_steps_do_not_change() -> None:
    model = nn.Linear(1, 1)
    before = model.weight.item()
    spec = ModelSpec(name="mlp")
    payload = best_payload(model, config_of(spec), INFO, RECORD, "a-study", None, INPUT)
    with torch.no_grad():
        model.weight.add_(1)
    assert payload["model"]["weight"].item() == before
    assert not payload["model"]["weight"].requires_grad


def test_a_users_model_is_imported_from_where_the_study_file_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    code = tmp_path / "my code"
    code.mkdir()
    (code / "net_of_the_checkpoint_test.py").write_text(
        "from torch import nn\n"
        "def build(params, data):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, params['width']), nn.Linear(params['width'], 3))\n"
    )
    spec = ModelSpec(name="net_of_the_checkpoint_test:build", params={"width": 2})
    sys.path.insert(0, str(code))
    model = save_best(tmp_path / "trial", spec, import_folder=code)
    sys.path.remove(str(code))
    del sys.modules["net_of_the_checkpoint_test"]
    batch = torch.randn(5, 1, 8, 8)
    assert torch.equal(load_model(tmp_path / "trial")(batch), model(batch))


def test_a_best_checkpoint_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"best\.pt: no such file"):
        load_model(tmp_path)
    TrialFolder(tmp_path, keep_last=0).save_best({"format": 2})
    with pytest.raises(CheckpointError, match=r"best\.pt: .* \(format 2, not 1\)"):
        load_model(tmp_path)
    save_best(tmp_path, ModelSpec(name="mlp", params={"width": 4}))
    payload = open_checkpoint(tmp_path / "best.pt")
    payload["model_spec"]["params"]["width"] = 5
    TrialFolder(tmp_path, keep_last=0).save_best(payload)
    with pytest.raises(CheckpointError, match=r"weights do not fit the model 'mlp'"):
        load_model(tmp_path)
    content = bytearray((tmp_path / "best.pt").read_bytes())
    content[content.index(payload["model"]["1.weight"].numpy().tobytes())] ^= 1
    (tmp_path / "best.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"best\.pt: damaged, the checksum of .* is wrong"):
        load_model(tmp_path)


ODD_PARAMS = """
from torch import nn
def build(params, data):
    model = nn.Sequential(nn.Flatten(), nn.Hardtanh(-1.0, params["cap"]), nn.Linear(64, params["widths"][1]))
    return model.append(nn.BatchNorm1d(params["widths"][1]))
"""


def test_params_come_back_as_the_python_values_that_they_were(tmp_path: Path) -> None:
    (tmp_path / "odd_params.py").write_text(ODD_PARAMS)
    sys.path.insert(0, str(tmp_path))
    spec = ModelSpec(name="odd_params:build", params={"cap": float("inf"), "widths": {1: 4}})
    try:
        save_best(tmp_path, spec, tmp_path)
        assert open_checkpoint(tmp_path / "best.pt")["model_spec"]["params"] == spec.params
        loaded = load_model(tmp_path)
    finally:
        sys.path.remove(str(tmp_path))
    assert loaded[1].max_val == float("inf")
