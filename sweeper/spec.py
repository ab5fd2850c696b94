"""What the study file may say (`StudySpec`) and what one trial runs with (`TrialConfig`).

The models check one key or one section; `studyfile.py` reads the file, adds the lines and reports everything at
once. Values are strict: a text is never taken for a number, a boolean never for a count.
"""

from __future__ import annotations

import math
import os
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(ge=1)]
CountInt = Annotated[int, Field(ge=0)]
# A report per validation and a learning rate per step are kept: a slip of the finger must not fill memory or disk.
Epochs = Annotated[int, Field(ge=1, le=100_000)]
ValidationsPerEpoch = Annotated[int, Field(ge=1, le=1000)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Scalar = bool | int | float | str | None


class Section(BaseModel):
    # Infinities and NaN stay what they are in JSON (as Python's json reads and writes them), instead of null.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ser_json_inf_nan="constants")


class ObjectiveSpec(Section):
    monitor: str
    direction: Literal["minimize", "maximize"]


class DataSpec(Section):
    source: str
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    test_fraction: Fraction = 0.0
    split_seed: CountInt = 0
    augment: list[str | dict[str, Any]] = []
    on_bad_file: Literal["error", "skip"] = "error"
    dataset: str | None = None
    root: str | None = None
    download: bool = False
    channels: Literal[1, 3] | None = None
    image_size: PositiveInt | None = None
    params: dict[str, Any] = {}

    @model_validator(mode="after")
    def _something_left_to_train_on(self) -> DataSpec:
        if self.val_fraction + self.test_fraction >= 1:
            raise ValueError(
                f"val_fraction ({self.val_fraction}) and test_fraction ({self.test_fraction}) leave nothing to train on"
                " | Make their sum smaller than 1."
            )
        return self


class ModelSpec(Section):
    name: str
    params: dict[str, Any] = {}


class TaskSpec(Section):
    name: str = "classification"
    class_weights: Literal["none", "balanced"] | list[PositiveFloat] = "none"
    label_smoothing: Fraction = 0.0


class SchedulerSpec(Section):
    """Lengths are in epochs, except `warmup_steps` (optimizer steps) and plateau's `patience` (validations).

    Names and formulas are those of `torch.optim.lr_scheduler`; a key may only stand beside the schedulers that use it.
    """

    name: Literal[
        "constant", "step", "cosine", "cosine_warm_restarts", "one_cycle", "linear", "polynomial", "plateau"
    ] = "constant"
    warmup_epochs: NonNegativeFloat = 0
    warmup_steps: CountInt = 0
    step_size: PositiveFloat = 10
    gamma: PositiveFloat = 0.1
    eta_min: NonNegativeFloat = 0.0
    T_0: PositiveFloat = 10
    T_mult: PositiveInt = 1
    pct_start: Annotated[float, Field(gt=0, lt=1)] = 0.3
    div_factor: PositiveFloat = 25.0
    final_div_factor: PositiveFloat = 1e4
    start_factor: NonNegativeFloat = 1.0
    end_factor: NonNegativeFloat = 0.0
    power: PositiveFloat = 1.0
    factor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    patience: CountInt = 3
    min_lr: NonNegativeFloat = 0.0

    @model_validator(mode="after")
    def _one_length_of_warmup(self) -> SchedulerSpec:
        if self.warmup_epochs and self.warmup_steps:
            raise ValueError(
                f"warmup_epochs ({self.warmup_epochs:g}) and warmup_steps ({self.warmup_steps}) are both given"
                " | Keep one of them."
            )
        return self


SCHEDULER_KEYS: dict[str, tuple[str, ...]] = {
    "constant": (),
    "step": ("step_size", "gamma"),
    "cosine": ("eta_min",),
    "cosine_warm_restarts": ("T_0", "T_mult", "eta_min"),
    "one_cycle": ("pct_start", "div_factor", "final_div_factor"),
    "linear": ("start_factor", "end_factor"),
    "polynomial": ("power",),
    "plateau": ("factor", "patience", "min_lr"),
}


class GroupSpec(Section):
    """Parameters whose module name starts with `prefix` train with `lr * lr_factor`."""

    prefix: str
    lr_factor: NonNegativeFloat


class TrainSpec(Section):
    max_epochs: Epochs = 20
    optimizer: str = "adamw"
    lr: PositiveFloat = 1e-3
    batch_size: PositiveInt = 64
    accumulation_steps: PositiveInt = 1
    max_grad_norm: PositiveFloat | None = 1.0
    max_grad_value: PositiveFloat | None = None
    norm_type: Literal[2, "inf"] = 2
    weight_decay: NonNegativeFloat = 0.01
    momentum: Fraction = 0.9
    optimizer_params: dict[str, Any] = {}
    decay_biases_and_norms: bool = False
    groups: list[GroupSpec] = []
    scheduler: SchedulerSpec = SchedulerSpec()
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    lr_base_batch: PositiveInt = 256
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    init_scale: PositiveFloat = 65536.0
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda|cuda:\d{1,3})$")] = "auto"
    seed: CountInt = 0
    deterministic: bool = False
    validations_per_epoch: ValidationsPerEpoch = 1
    timeout_s: PositiveFloat | None = None
    stall_timeout_s: PositiveFloat | None = 1800.0

    @model_validator(mode="before")
    @classmethod
    def _clip_by_value_replaces_the_default_norm(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("max_grad_value") is not None and "max_grad_norm" not in values:
            return {**values, "max_grad_norm": None}
        return values

    @model_validator(mode="after")
    def _one_way_of_clipping(self) -> TrainSpec:
        if self.max_grad_norm is not None and self.max_grad_value is not None:
            raise ValueError(
                f"max_grad_norm ({self.max_grad_norm:g}) and max_grad_value ({self.max_grad_value:g}) are both given"
                " | Write `null` for one of them: gradients are clipped by norm or by value."
            )
        return self

    @model_validator(mode="after")
    def _each_prefix_once(self) -> TrainSpec:
        prefixes = [group.prefix.rstrip(".") for group in self.groups]
        twice = [prefix for prefix in prefixes if prefixes.count(prefix) > 1]
        if twice:
            raise ValueError(f"groups names the prefix {twice[0]!r} twice | Keep one of the two.")
        return self

    @property
    def effective_batch_size(self) -> int:
        """Samples per optimizer step."""
        return self.batch_size * self.accumulation_steps

    @property
    def applied_lr(self) -> float:
        """The peak learning rate after `lr_scaling` (Goyal et al. 2017, arXiv:1706.02677, section 2.1)."""
        ratio = self.effective_batch_size / self.lr_base_batch
        return self.lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[self.lr_scaling]


class RangeSpec(Section):
    """`low` and `high` included; `kind` is what a draw is, told by the field or, for free params, by the numbers."""

    low: Finite
    high: Finite
    log: bool = False
    step: PositiveFloat | None = None
    kind: Literal["int", "float"] = "float"
    when: dict[str, list[Scalar]] = {}


class ChoicesSpec(Section):
    choices: Annotated[list[Scalar], Field(min_length=1)]
    when: dict[str, list[Scalar]] = {}


Domain = RangeSpec | ChoicesSpec


class LimitSpec(Section):
    min: Finite | None = None
    max: Finite | None = None


LIMITED = ("effective_batch_size", "applied_lr")


class EarlyStoppingSpec(Section):
    patience: PositiveInt | None = None
    min_delta: NonNegativeFloat = 1e-4
    min_epochs: PositiveInt = 1

    def resolved_patience(self, num_validations: int) -> int:
        """`patience` in validations: as written, else the larger of 3 and 15 % of all validations, rounded up."""
        return self.patience if self.patience is not None else max(3, math.ceil(0.15 * num_validations))


class SamplerSpec(Section):
    name: Literal["tpe", "gp", "cmaes", "qmc", "random", "grid", "nsga"] = "tpe"
    seed: CountInt = 0
    params: dict[str, Any] = {}


class PrunerSpec(Section):
    name: Literal["median", "percentile", "successive_halving", "hyperband", "threshold", "none"] = "median"
    when: Literal["always", "stalled"] = "always"
    params: dict[str, Any] = {}


class BudgetSpec(Section):
    trials: PositiveInt
    hours: PositiveFloat | None = None
    target: Finite | None = None
    patience_trials: PositiveInt | None = None
    max_failures: CountInt = 3


class TrackingSpec(Section):
    uri: str = "sqlite:///mlruns/mlflow.db"
    artifacts: str = "mlruns/artifacts"

    @model_validator(mode="after")
    def _a_database_or_a_server(self) -> TrackingSpec:
        if not self.uri.startswith(("sqlite:///", "http://", "https://")):
            raise ValueError(
                f"uri ({self.uri.split('://')[0]!r}) is neither a SQLite database nor an MLflow server, and MLflow no "
                "longer opens folders"
                " | Write `sqlite:///mlruns/mlflow.db` or `http://HOST:PORT`."
            )
        return self


class CheckpointsSpec(Section):
    dir: str = "mlruns/checkpoints"
    every_epochs: PositiveInt = 1
    keep_last: CountInt = 2
    quota_gib: PositiveFloat | None = None


class SpeedSpec(Section):
    num_workers: CountInt | Literal["auto"] = "auto"
    pin_memory: bool | Literal["auto"] = "auto"
    prefetch_factor: PositiveInt = 2
    persistent_workers: bool = True
    cudnn_benchmark: bool | Literal["auto"] = "auto"
    channels_last: bool | Literal["auto"] = "auto"
    fused: bool | Literal["auto"] = "auto"
    tf32: bool = True
    compile: bool = False


class WorkersSpec(Section):
    threads: PositiveInt | Literal["auto"] = "auto"
    grace_period_s: PositiveFloat = 120.0
    max_attempts: PositiveInt = 3


class StudySpec(Section):
    """The whole file. `search_space` keys are the names of fields, as `space.field_path` resolves them."""

    study: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    objective: ObjectiveSpec
    data: DataSpec
    model: ModelSpec
    task: TaskSpec = TaskSpec()
    train: TrainSpec = TrainSpec()
    search_space: dict[str, Domain]
    limits: dict[str, LimitSpec] = {}
    enqueue: list[dict[str, Scalar]] = []
    early_stopping: EarlyStoppingSpec = EarlyStoppingSpec()
    sampler: SamplerSpec = SamplerSpec()
    pruner: PrunerSpec = PrunerSpec()
    budget: BudgetSpec
    storage: str = "sqlite:///mlruns/optuna.db"
    tracking: TrackingSpec = TrackingSpec()
    checkpoints: CheckpointsSpec = CheckpointsSpec()
    speed: SpeedSpec = SpeedSpec()
    workers: WorkersSpec = WorkersSpec()

    def with_absolute_paths(self) -> StudySpec:
        """So that a later change of the working directory, by the user's code, moves nothing."""
        prefix, artifacts = "sqlite:///", os.path.abspath(self.tracking.artifacts)
        tracking = {"artifacts": artifacts, "uri": self.tracking.uri}
        if self.tracking.uri.startswith(prefix):
            tracking["uri"] = prefix + os.path.abspath(self.tracking.uri.removeprefix(prefix))
        return self.model_copy(
            update={
                "storage": prefix + os.path.abspath(self.storage.removeprefix(prefix)),
                "tracking": self.tracking.model_copy(update=tracking),
                "checkpoints": self.checkpoints.model_copy(update={"dir": os.path.abspath(self.checkpoints.dir)}),
            }
        )

    def fingerprint(self) -> dict[str, Any]:
        """The sections that must not change between two runs of one study, as JSON values."""
        dumped = self.model_dump(mode="json")
        return {name: dumped[name] for name in FINGERPRINT_SECTIONS}


FINGERPRINT_SECTIONS = (
    "objective",
    "data",
    "model",
    "task",
    "train",
    "search_space",
    "limits",
    "sampler",
    "pruner",
    "early_stopping",
)


class TrialConfig(Section):
    """One trial's concrete values: every section with the drawn point in its place. `params` is the point as drawn."""

    number: CountInt
    params: dict[str, Scalar]
    objective: ObjectiveSpec
    data: DataSpec
    model: ModelSpec
    task: TaskSpec
    train: TrainSpec
    early_stopping: EarlyStoppingSpec
    speed: SpeedSpec

    @property
    def num_validations(self) -> int:
        return self.train.max_epochs * self.train.validations_per_epoch

    @property
    def seed(self) -> int:
        """The seed of this trial's weights, order and augmentation: from the study's seed and the number alone."""
        return derive_seed(self.train.seed, self.number)


def derive_seed(*numbers: int) -> int:
    """Mix numbers into one seed of 63 bits, so that neighbouring seeds and trials share no stream (SplitMix64)."""
    mixed = 0
    for number in numbers:
        mixed = (mixed ^ number) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 31
    return mixed >> 1
