"""Samplers and pruners by name, with the class's own arguments under `params`."""

from __future__ import annotations

import difflib
import inspect
import math
import warnings
from typing import Any

import optuna
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

from sweeper.errors import SpecError
from sweeper.space import grid_values, suggest
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


def make_sampler(spec: StudySpec, number: int) -> BaseSampler:
    """The sampler for trial `number`, seeded from the study's seed and the number alone.

    So a resumed study proposes what an uninterrupted one would, and no two trials draw from one stream.
    Raises `SpecError` for an argument that the class does not take or refuses.
    """
    name, kind = spec.sampler.name, SAMPLERS[spec.sampler.name]
    seed = derive_seed(spec.sampler.seed, number) % 2**32
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
        arguments = {"max_resource": spec.train.max_epochs * spec.train.validations_per_epoch}
    elif name == "successive_halving":
        arguments = {"min_resource": 1}
    return _built("pruner", PRUNERS[name], spec.pruner.params, arguments, reserved=())


def rehearse(spec: StudySpec) -> None:
    """Draw, report and ask the pruner once, in memory: some arguments are looked at only then.

    Raises `SpecError` as `make_sampler` and `make_pruner` do.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=make_sampler(spec, 0), pruner=make_pruner(spec))
    try:
        for value in (0.0, 1.0):
            trial = study.ask()
            suggest(trial, spec)
            trial.report(value, 0)
            trial.should_prune()
            study._storage.set_trial_state_values(trial._trial_id, optuna.trial.TrialState.COMPLETE, [value])
    except (TypeError, ValueError, ArithmeticError) as error:
        what = "the sampler or pruner refuses its arguments"
        raise SpecError(("pruner" if spec.pruner.params else "sampler", "params"), what, f"It says: {error}") from None


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
    except (TypeError, ValueError) as error:
        raise SpecError((section, "params"), f"{kind.__name__} refuses its arguments", f"It says: {error}") from None


def grid_size(spec: StudySpec) -> int | None:
    """The number of points of a grid study; None for other samplers."""
    if spec.sampler.name != "grid":
        return None
    return math.prod(len(grid_values(domain) or []) for domain in spec.search_space.values())
