"""When a trial is best, stalled and finished: tables of small series."""

from __future__ import annotations

import json
import math

import pytest

from sweeper.training.stopping import Judgement, Verdict, carry_forward

NAN, INF = math.nan, math.inf


def judge(
    values: list[float],
    direction: str = "minimize",
    patience: int = 100,
    min_delta: float = 0.0,
    min_epochs: int = 1,
    validations_per_epoch: int = 1,
) -> tuple[Judgement, list[Verdict]]:
    """Feed the series as the training loop does, until the judgement stops it."""
    judgement = Judgement(direction, patience, min_delta, min_epochs)  # type: ignore[arg-type]
    verdicts = []
    for validation, value in enumerate(values):
        epoch, complete = validation // validations_per_epoch, (validation + 1) // validations_per_epoch
        verdicts.append(judgement.update(value, epoch=epoch, validation=validation, epochs_complete=complete))
        if verdicts[-1].stop:
            break
    return judgement, verdicts


@pytest.mark.parametrize(
    ("values", "direction", "patience", "validations_run", "best_epoch", "best_value"),
    [
        pytest.param([1.0, 0.9, 0.95, 0.96, 0.5], "minimize", 2, 4, 1, 0.9, id="two-bad-validations-stop"),
        pytest.param([1.0, 0.9, 0.95, 0.96, 0.5], "minimize", 1, 3, 1, 0.9, id="patience-1-stops-at-the-first-bad-one"),
        pytest.param([1.0, 0.9, 0.8], "minimize", 1, 3, 2, 0.8, id="the-first-validation-never-stops"),
        pytest.param([0.1, 0.2, 0.15, 0.16, 0.9], "maximize", 2, 4, 1, 0.2, id="maximize"),
        pytest.param([0.5, 0.5, 0.5, 0.1], "minimize", 2, 3, 0, 0.5, id="an-equal-value-is-no-improvement"),
        pytest.param([0.5, 0.6, 0.4, 0.6, 0.6, 0.1], "minimize", 2, 5, 2, 0.4, id="an-improvement-restarts-the-count"),
        pytest.param([0.5, 0.9, 0.8, 0.7, 0.6], "minimize", 3, 4, 0, 0.5, id="better-than-the-last-is-not-enough"),
        pytest.param([NAN, 0.5, 0.6, 0.4], "maximize", 9, 4, 2, 0.6, id="nan-first-blocks-no-later-best"),
        pytest.param([0.5, NAN, 0.4], "minimize", 9, 3, 2, 0.4, id="nan-in-the-middle-is-never-best"),
        pytest.param([NAN, NAN, 0.4], "minimize", 2, 2, None, None, id="nan-from-the-start-uses-up-patience"),
        pytest.param([0.5, NAN, 0.6, 0.1], "minimize", 2, 3, 0, 0.5, id="nan-counts-with-other-bad-values"),
        pytest.param([0.5, 0.3, 0.4, 0.45, NAN], "minimize", 9, 5, 1, 0.3, id="nan-last-leaves-the-best"),
        pytest.param([NAN, INF, 0.5], "minimize", 9, 3, 2, 0.5, id="nan-then-inf-then-finite"),
        pytest.param([0.5, INF, 0.6], "maximize", 9, 3, 2, 0.6, id="inf-is-never-best-when-maximizing"),
        pytest.param([0.5, -INF, 0.4], "minimize", 9, 3, 2, 0.4, id="minus-inf-is-never-best-when-minimizing"),
        pytest.param([NAN, INF, -INF], "maximize", 3, 3, None, None, id="never-finite-never-best"),
    ],
)
def test_a_trial_stops_after_patience_and_keeps_its_best(
    values: list[float],
    direction: str,
    patience: int,
    validations_run: int,
    best_epoch: int | None,
    best_value: float | None,
) -> None:
    judgement, verdicts = judge(values, direction, patience)
    assert len(verdicts) == validations_run
    assert (judgement.best_epoch, judgement.best_value) == (best_epoch, best_value)


def test_the_value_of_a_stopped_trial_is_its_best_and_not_its_last() -> None:
    judgement, verdicts = judge([0.7, 0.9, 0.8, 0.85], "maximize", patience=2)
    assert [verdict.stop for verdict in verdicts] == [False, False, False, True]
    assert judgement.best_value == 0.9


@pytest.mark.parametrize(
    ("values", "min_delta", "counters", "best_epochs"),
    [
        pytest.param([1.0, 0.5, 0.25], 0.25, [0, 0, 1], [0, 1, 2], id="a-gain-of-exactly-min-delta-is-best-but-stalls"),
        pytest.param([1.0, 0.875, 0.75, 0.625], 0.25, [0, 1, 2, 0], [0, 1, 2, 3], id="small-gains-add-up"),
        pytest.param([1.0, 1.5, 0.875, 0.9], 0.25, [0, 1, 2, 3], [0, 0, 2, 2], id="best-moves-the-counter-does-not"),
        pytest.param([NAN, 1.0, 0.875], 0.25, [1, 0, 1], [None, 1, 1 + 1], id="first-finite-value-is-an-improvement"),
        pytest.param([1.0, 0.9999999, 0.9999998], 0.0, [0, 0, 0], [0, 1, 2], id="min-delta-0-takes-any-gain"),
    ],
)
def test_min_delta_moves_the_counter_and_any_gain_moves_the_best(
    values: list[float], min_delta: float, counters: list[int], best_epochs: list[int | None]
) -> None:
    judgement = Judgement("minimize", patience=100, min_delta=min_delta, min_epochs=1)
    seen = []
    for epoch, value in enumerate(values):
        verdict = judgement.update(value, epoch=epoch, validation=epoch, epochs_complete=epoch + 1)
        assert verdict.stalled == (judgement.counter >= 1)
        assert verdict.is_best == (judgement.best_epoch == epoch)
        seen.append((judgement.counter, judgement.best_epoch))
    assert seen == list(zip(counters, best_epochs, strict=True))


@pytest.mark.parametrize(
    ("min_epochs", "validations_per_epoch", "validations_run", "may_stop"),
    [
        pytest.param(1, 1, 2, [True, True], id="no-wait"),
        pytest.param(4, 1, 4, [False, False, False, True], id="stops-as-soon-as-min-epochs-are-complete"),
        pytest.param(2, 2, 4, [False, False, False, True], id="epochs-not-validations"),
        pytest.param(1, 4, 4, [False, False, False, True], id="not-inside-the-first-epoch"),
    ],
)
def test_nothing_stops_before_min_epochs_are_complete(
    min_epochs: int, validations_per_epoch: int, validations_run: int, may_stop: list[bool]
) -> None:
    values = [0.5, 0.6, 0.6, 0.6, 0.6, 0.6]
    _, verdicts = judge(values, patience=1, min_epochs=min_epochs, validations_per_epoch=validations_per_epoch)
    assert len(verdicts) == validations_run
    assert [verdict.may_stop for verdict in verdicts] == may_stop


def test_the_best_knows_its_epoch_and_its_validation() -> None:
    judgement, _ = judge([0.5, 0.4, 0.45, 0.3, 0.35], validations_per_epoch=2)
    assert (judgement.best_value, judgement.best_epoch, judgement.best_validation) == (0.3, 1, 3)


@pytest.mark.parametrize("cut", range(6))
def test_a_restored_judgement_goes_on_as_the_uninterrupted_one(cut: int) -> None:
    values = [NAN, 0.5, 0.375, 0.375, 0.25, INF]

    def fresh() -> Judgement:
        return Judgement("minimize", patience=2, min_delta=0.1875, min_epochs=1)

    def feed(judgement: Judgement, start: int, end: int) -> list[Verdict]:
        return [
            judgement.update(values[epoch], epoch=epoch, validation=epoch, epochs_complete=epoch + 1)
            for epoch in range(start, end)
        ]

    whole, first, second = fresh(), fresh(), fresh()
    verdicts = feed(first, 0, cut)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    verdicts += feed(second, cut, 6)
    assert verdicts == feed(whole, 0, 6)
    assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize(
    ("next_validation", "expected"),
    [
        pytest.param(3, {3: 0.9, 4: 0.9}, id="stopped-early"),
        pytest.param(5, {}, id="ran-to-the-end"),
    ],
)
def test_the_plateau_is_carried_to_the_validations_not_run(next_validation: int, expected: dict[int, float]) -> None:
    assert carry_forward(0.9, next_validation, 5) == expected
