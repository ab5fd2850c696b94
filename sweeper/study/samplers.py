"""Samplers and pruners by name, with the class's own arguments under `params`."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import inspect
import math
import warnings
from collections.abc import Iterator
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.pruners import (
    BasePruner,
    HyperbandPruner,
    MedianPruner,
    NopPruner,
    PercentilePruner,
    SuccessiveHalvingPruner,
    ThresholdPruner,
)
from optuna.samplers import (
    BaseSampler,
    CmaEsSampler,
    GPSampler,
    GridSampler,
    NSGAIISampler,
    QMCSampler,
    RandomSampler,
    TPESampler,
)
from optuna.trial import FrozenTrial

from sweeper.errors import SpecError
from sweeper.space import grid_values, largest, suggest
from sweeper.spec import StudySpec, derive_seed

SAMPLERS: dict[str, type[BaseSampler]] = {
    "tpe": TPESampler,
    "gp": GPSampler,
    "cmaes": CmaEsSampler,
    "qmc": QMCSampler,
    "random": RandomSampler,
    "grid": GridSampler,
    "nsga": NSGAIISampler,
}
PRUNERS: dict[str, type[BasePruner]] = {
    "median": MedianPruner,
    "percentile": PercentilePruner,
    "successive_halving": SuccessiveHalvingPruner,
    "hyperband": HyperbandPruner,
    "threshold": ThresholdPruner,
    "none": NopPruner,
}


JOINT = "sweeper:joint"


class Keyed(BaseSampler):
    """A sampler whose every independent draw has a seed of its own, from (study seed, trial number, name).

    A trial that is killed between two draws then goes on with the draws it would have had: those that are stored no
    longer move the stream of the others. What is drawn jointly is drawn at once, from (study seed, trial number).
    """

    def __init__(self, spec: StudySpec, number: int) -> None:
        self.spec, self.number = spec, number
        self.joint = _plain_sampler(spec, derive_seed(spec.sampler.seed, number))

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self.joint.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        if self.spec.sampler.name != "qmc":
            return self.joint.sample_relative(study, trial, search_space)
        # Each call takes the next point of the sequence: a trial keeps its own, for when it is killed before its draws.
        if JOINT not in trial.system_attrs:
            drawn = self.joint.sample_relative(study, trial, search_space)
            study._storage.set_trial_system_attr(trial._trial_id, JOINT, drawn)
            return drawn
        return trial.system_attrs[JOINT]

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        key = int.from_bytes(hashlib.sha256(param_name.encode()).digest()[:7], "big")
        single = _plain_sampler(self.spec, derive_seed(self.spec.sampler.seed, self.number, key))
        return single.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        self.joint.before_trial(study, trial)


def make_sampler(spec: StudySpec, number: int) -> BaseSampler:
    """The sampler for trial `number`, seeded from the study's seed and the number alone.

    So a resumed study proposes what an uninterrupted one would, and no two trials draw from one stream.
    Raises `SpecError` for an argument that the class does not take or refuses.
    """
    if spec.sampler.name == "grid":
        return _plain_sampler(spec, spec.sampler.seed)
    return Keyed(spec, number)


def _plain_sampler(spec: StudySpec, key: int) -> BaseSampler:
    name, kind = spec.sampler.name, SAMPLERS[spec.sampler.name]
    seed = key % 2**32
    arguments: dict[str, Any] = {"seed": seed}
    if name == "tpe" and any(domain.when for domain in spec.search_space.values()):
        # Conditions split the space; without groups a conditional parameter is drawn apart from all others.
        arguments |= {"multivariate": True, "group": True}
    elif name == "qmc":
        # One sequence for the whole study: its seed must stay, and its place is kept in the database.
        arguments = {
            "seed": spec.sampler.seed,
            "independent_sampler": RandomSampler(seed=seed),
            "warn_independent_sampling": False,
            "warn_asynchronous_seeding": False,
        }
    elif name == "cmaes":
        arguments["warn_independent_sampling"] = False
    elif name == "gp":
        arguments["independent_sampler"] = RandomSampler(seed=seed)
    elif name == "grid":
        grid = {key: grid_values(domain) for key, domain in spec.search_space.items()}
        arguments = {"search_space": grid, "seed": spec.sampler.seed}
    return _built("sampler", kind, spec.sampler.params, arguments, reserved=("seed", "search_space"))


def make_pruner(spec: StudySpec) -> BasePruner:
    """Raises `SpecError` for an argument that the class does not take or refuses."""
    name, arguments = spec.pruner.name, {}
    if name == "percentile":
        arguments = {"percentile": 25.0}
    elif name == "hyperband":
        # "auto" would wait for a complete trial; the longest one is known from the start.
        arguments = {"max_resource": largest(spec, "max_epochs") * spec.train.validations_per_epoch}
    elif name == "successive_halving":
        arguments = {"min_resource": 1}
    return _built("pruner", PRUNERS[name], spec.pruner.params, arguments, reserved=())


def rehearse(spec: StudySpec) -> None:
    """Run a study of made-up values in memory, past the sampler's random start: some arguments are looked at only then.

    Raises `SpecError` as `make_sampler` and `make_pruner` do.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=make_sampler(spec, 0), pruner=make_pruner(spec))
    for number in range(2 if spec.sampler.name == "gp" else REHEARSED):  # gp fits a model each time
        with _blamed_on("sampler"):
            trial = study.ask()
            suggest(trial, spec)
        with _blamed_on("pruner"):
            trial.report(float(number), 0)
            trial.should_prune()
        study._storage.set_trial_state_values(trial._trial_id, optuna.trial.TrialState.COMPLETE, [float(number)])


# Optuna's samplers draw their first 10 points at random.
REHEARSED = 12


@contextlib.contextmanager
def _blamed_on(section: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Optuna checks arguments in many ways, by assert among them
        what = f"the {section} refuses its arguments"
        raise SpecError((section, "params"), what, f"It says: {error}") from None


def _built(
    section: str, kind: Any, params: dict[str, Any], arguments: dict[str, Any], reserved: tuple[str, ...]
) -> Any:
    accepted = [name for name in inspect.signature(kind).parameters if name not in ("self", *reserved)]
    for key in params:
        if key not in accepted:
            near = difflib.get_close_matches(key, accepted, n=1)
            todo = f"Did you mean {near[0]}?" if near else f"It takes: {', '.join(accepted) or 'nothing'}."
            if key == "seed":
                todo = f"Write it as `{section}.seed`."
            raise SpecError((section, "params", key), f"{kind.__name__} takes no argument {key!r}", todo)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return kind(**{**arguments, **params})
    except Exception as error:  # Optuna checks arguments in many ways, by assert among them
        raise SpecError((section, "params"), f"{kind.__name__} refuses its arguments", f"It says: {error}") from None


def grid_size(spec: StudySpec) -> int | None:
    """The number of points of a grid study; None for other samplers."""
    if spec.sampler.name != "grid":
        return None
    return math.prod(len(grid_values(domain) or []) for domain in spec.search_space.values())


def grid_is_run(spec: StudySpec, study: optuna.Study) -> bool:
    """Whether every point of a grid has had a trial, however it ended: asked for more, Optuna draws points again."""
    size = grid_size(spec)
    if size is None:
        return False
    taken = {trial.system_attrs.get("grid_id") for trial in study.get_trials(deepcopy=False)}
    return len(taken - {None}) >= size
