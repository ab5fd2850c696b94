"""`sweep status`: how far the study is, and its best trials."""

from __future__ import annotations

from typing import Any

from optuna.trial import FrozenTrial, TrialState

from sweeper.views.reading import StoredStudy

STATES = ("complete", "pruned", "failed", "running", "interrupted", "waiting")


def status_json(stored: StoredStudy) -> dict[str, Any]:
    """The contract of `sweep status --json`."""
    counts = dict.fromkeys(STATES, 0)
    for trial in stored.trials:
        counts[stored.state(trial)] += 1
    best = stored.best
    return {
        "study": stored.spec.study,
        "monitor": stored.spec.objective.monitor,
        "direction": stored.spec.objective.direction,
        "budget": stored.spec.budget.model_dump(mode="json"),
        "trials": counts,
        "best": None if best is None else best_json(best),
        "last_activity": stored.last_activity(),
    }


def states_text(stored: StoredStudy) -> str:
    """`14 complete, 12 pruned, 1 diverged`: pruned trials by their reason, for Optuna's PRUNED has more than one."""
    counts: dict[str, int] = {}
    for trial in stored.trials:
        state = stored.state(trial)
        word = trial.user_attrs.get("stop_reason", state).replace("_", " ") if state == "pruned" else state
        counts[word] = counts.get(word, 0) + 1
    order = sorted(counts, key=lambda word: STATES.index(word) if word in STATES else 1.5)
    return ", ".join(f"{counts[word]} {word}" for word in order) or "no trials"


def best_json(trial: FrozenTrial) -> dict[str, Any]:
    return {
        "trial": trial.number,
        "value": trial.value,
        "epoch": trial.user_attrs.get("best_epoch"),
        "params": dict(trial.params),
    }


def ranking(stored: StoredStudy, count: int) -> list[FrozenTrial]:
    """The best complete trials, best first."""
    done = [(t.value, t) for t in stored.trials if t.state == TrialState.COMPLETE and t.value is not None]
    sign = -1 if stored.spec.objective.direction == "maximize" else 1
    return [trial for _, trial in sorted(done, key=lambda pair: (sign * pair[0], pair[1].number))][:count]
