"""`checkpoints.quota_gib`: what goes first when a study's checkpoints take more room than they may."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import optuna
from optuna.trial import TrialState

from sweeper.room import TrialRoom

GIB = 2**30


def keep_within_quota(room: TrialRoom, study: optuna.Study) -> str | None:
    """Remove weights of trials that have ended until the study's checkpoints fit; a sentence if they do not even then.

    What can matter least goes first: what only a running trial needs, then the best weights of trials that cannot be
    the study's best, then those of the worst complete ones. The best trial's stay, and so do all of running trials'
    and every record.
    """
    quota_gib = room.spec.checkpoints.quota_gib
    if quota_gib is None:
        return None
    sizes = _sizes(room.checkpoints)
    used = sum(sizes.values())
    if used <= quota_gib * GIB:
        return None
    for path in _expendable(room, study):
        with suppress(FileNotFoundError):
            path.unlink()
            used -= sizes.get(path, 0)
        if used <= quota_gib * GIB:
            return None
    return (
        f"checkpoints take {used / GIB:.3g} GiB, more than checkpoints.quota_gib ({quota_gib:g}), though nothing is "
        "left but those of running trials and of the best one"
    )


def _sizes(folder: Path) -> dict[Path, int]:
    sizes = {}
    for pattern in ("*/*.pt", "*/.*.tmp"):
        for path in folder.glob(pattern):
            with suppress(FileNotFoundError):  # another worker has renamed or removed it
                sizes[path] = path.stat().st_size
    return sizes


def _expendable(room: TrialRoom, study: optuna.Study) -> Iterable[Path]:
    ended = [trial for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()]
    for trial in ended:
        yield from room.folder(trial.number).only_to_go_on()
    for trial in ended:
        if trial.state != TrialState.COMPLETE:
            yield room.folder(trial.number).best_path
    sign = 1 if room.spec.objective.direction == "minimize" else -1
    complete = [
        (sign * trial.value, trial.number)
        for trial in ended
        if trial.value is not None and trial.state == TrialState.COMPLETE
    ]
    for _, number in sorted(complete, reverse=True)[:-1]:
        yield room.folder(number).best_path
