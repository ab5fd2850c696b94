"""Every fault of a study file is reported at once, where it stands, with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from sweeper.errors import StudyFileError, SweeperError
from sweeper.spec import ChoicesSpec, RangeSpec, StudySpec
from sweeper.studyfile import StudyFile, read_study_file

GOOD = """\
study: toy
objective: {monitor: val_accuracy, direction: maximize}
data: {source: digits}
model: {name: mlp}
train: {max_epochs: 3}
search_space:
  lr: {low: 1e-5, high: 1e-1, log: true}
budget: {trials: 4}
"""


def read(tmp_path: Path, text: str) -> StudyFile:
    path = tmp_path / "study.yaml"
    path.write_text(text, encoding="utf-8")
    return read_study_file(path)


def faults(tmp_path: Path, text: str) -> list[str]:
    """The message, without the folder, as `line: text` of its first lines (the second line says what to do)."""
    with pytest.raises(StudyFileError) as caught:
        read(tmp_path, text)
    return str(caught.value).replace(f"{tmp_path}/study.yaml:", "").splitlines()


def with_space(line: str) -> str:
    return GOOD.replace("  lr: {low: 1e-5, high: 1e-1, log: true}", line)


@pytest.mark.parametrize(
    ("new", "found"),
    [
        pytest.param(
            "groups: [{prefix: '1', lr_factor: 0.1}, {prefix: '1.', lr_factor: 5}]",
            ["5: train: groups names the prefix '1' twice", "  Keep one of the two."],
            id="a-prefix-twice",
        ),
        pytest.param(
            "max_epochs: 3}\ntask: {class_weights: [1, 2, 0]",
            ["6: task.class_weights[2]: must be above 0.0, not 0", "  Write a value in that range."],
            id="a-weight-of-nothing",
        ),
    ],
)
def test_one_fault_is_told_once(tmp_path: Path, new: str, found: list[str]) -> None:
    assert faults(tmp_path, GOOD.replace("max_epochs: 3", new)) == found


def test_every_fault_is_reported_at_once_in_the_order_of_lines(tmp_path: Path) -> None:
    text = """\
study: toy
objective: {monitor: val_accuracy, direction: maximise}
data: {source: digits, val_frac: 0.1}
model: {name: mlp}
train: {max_epochs: "3", optimizr: sgd}
search_space:
  lr: {low: 0, high: 1, log: true}
  batch_sise: {choices: [16]}
"""
    assert faults(tmp_path, text) == [
        "1: budget: is missing",
        "  Add it; the README shows a complete file.",
        "2: objective.direction: must be 'minimize' or 'maximize', not 'maximise'",
        "  Did you mean maximize?",
        "3: data.val_frac: unknown key",
        "  Did you mean val_fraction?",
        "5: train.max_epochs: must be a whole number, not '3' (text)",
        "  Write it without quotes: 3.",
        "5: train.optimizr: unknown key",
        "  Did you mean optimizer?",
        "7: search_space.lr.low: 0 has no logarithm",
        "  A log range needs low above 0; write the values themselves (1e-8), not their exponents (-8).",
        "8: search_space.batch_sise: there is no such field to search",
        "  Did you mean batch_size?",
    ]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        pytest.param("  lr: {low: 0, high: 1, log: true}", "7: search_space.lr.low: 0 has no logarithm", id="log-of-0"),
        pytest.param(
            "  lr: {low: -8, high: 0, log: true}", "7: search_space.lr.low: -8 has no logarithm", id="exponents"
        ),
        pytest.param(
            "  lr: {low: 1e-3, high: 1, log: true, step: 0.1}",
            "7: search_space.lr.step: log and step (0.1) exclude each other",
            id="log-and-step",
        ),
        pytest.param(
            "  lr: {low: 0.1, high: 0.01}",
            "7: search_space.lr: low (0.1) is above high (0.01)",
            id="low-above-high",
        ),
        pytest.param("  optimizer: {choices: []}", "7: search_space.optimizer.choices: is empty", id="no-choice"),
        pytest.param(
            "  lr: {low: '1e-5', high: 1}", "7: search_space.lr.low: must be a number, not '1e-5' (text)", id="text"
        ),
        pytest.param("  lr: 0.1", "7: search_space.lr: is 0.1, not a range", id="a-fixed-value"),
        pytest.param("  lr: {low: 1, hihg: 2}", "7: search_space.lr.hihg: unknown key", id="unknown-key"),
        pytest.param(
            "  batch_size: {choices: [16, 0]}",
            "7: search_space.batch_size: train.batch_size cannot be 0: must be at least 1, not 0",
            id="illegal-choice",
        ),
        pytest.param(
            "  lr_scaling: {choices: [linear, root]}",
            "7: search_space.lr_scaling: train.lr_scaling cannot be 'root': "
            "must be 'none', 'linear' or 'sqrt', not 'root'",
            id="illegal-word",
        ),
        pytest.param(
            "  momentum: {low: 0, high: 1.5}",
            "7: search_space.momentum: train.momentum cannot be 1.5: must be below 1.0, not 1.5",
            id="illegal-end",
        ),
        pytest.param("  seed: {choices: [1]}", "7: search_space.seed: cannot be searched", id="not-searched"),
        pytest.param(
            "  scheduler.gamma: {low: 0.1, high: 0.5}",
            "7: search_space.scheduler.gamma: the scheduler constant has no 'gamma'",
            id="key-of-another-scheduler",
        ),
        pytest.param(
            "  momentum: {low: 0.1, high: 0.9, when: {optimiser: sgd}}",
            "7: search_space.momentum.when.optimiser: there is no such field",
            id="condition-on-nothing",
        ),
        pytest.param(
            "  optimizer: {choices: [adamw, sgd]}\n  momentum: {low: 0.1, high: 0.9, when: {optimizer: sdg}}",
            "8: search_space.momentum.when.optimizer: is never 'sdg'",
            id="condition-never-true",
        ),
        pytest.param(
            "  batch_size: {low: 8, high: 64, step: 8}\n  momentum: {low: 0.1, high: 0.9, when: {batch_size: 12}}",
            "8: search_space.momentum.when.batch_size: is never 12",
            id="condition-off-the-steps",
        ),
        pytest.param(
            "  batch_size: {low: 8, high: 64}\n  momentum: {low: 0.1, high: 0.9, when: {batch_size: '8'}}",
            "8: search_space.momentum.when.batch_size: is never '8'",
            id="condition-of-another-type",
        ),
        pytest.param(
            "  momentum: {low: 0.1, high: 0.9, when: {optimizer: []}}",
            "7: search_space.momentum.when.optimizer: names no value, so it never holds",
            id="condition-on-no-value",
        ),
        pytest.param(
            "  batch_size: {choices: [1, true]}",
            "7: search_space.batch_size.choices: holds the same value twice "
            "(1, 1.0 and true are one value to the database)",
            id="one-and-true",
        ),
        pytest.param(
            "  optimizer: {choices: [[1, 2]]}",
            "7: search_space.optimizer.choices: holds something that a database cannot keep as one value",
            id="list-as-choice",
        ),
        pytest.param(
            "  lr: {low: 1e-3, high: .inf}",
            "7: search_space.lr.high: must be a finite number, not inf",
            id="infinite",
        ),
        pytest.param(
            "  lr: {low: .nan, high: 1}", "7: search_space.lr.low: must be a finite number, not nan", id="nan"
        ),
        pytest.param(
            f"  batch_size: {{low: 1, high: 1{'0' * 400}}}",
            f"7: search_space.batch_size.high: must be a finite number, not 1{'0' * 59}...",
            id="huge",
        ),
        pytest.param(
            "  momentum: {low: 0.1, high: 0.9, when: {optimizer: [[sgd]]}}",
            "7: search_space.momentum.when.optimizer: cannot be [['sgd']]",
            id="condition-on-a-list",
        ),
    ],
)
def test_a_bad_range_is_named_with_its_line(tmp_path: Path, line: str, fault: str) -> None:
    assert faults(tmp_path, with_space(line))[0] == fault


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        pytest.param(
            "direction: maximize", "direction: [minimize, maximize]", "2: objective.direction", id="two-directions"
        ),
        pytest.param(
            "direction: maximize", "directions: [minimize]", "2: objective.direction: is missing", id="directions"
        ),
        pytest.param(
            "monitor: val_accuracy", "monitor: accuracy", "2: objective.monitor: 'accuracy' is not", id="monitor"
        ),
        pytest.param("study: toy", "study: a/b", "1: study: 'a/b' cannot name a study", id="a-path-as-name"),
        pytest.param("max_epochs: 3", "precision: off", "5: train.precision: must be 'auto', 'fp32'", id="off-is-text"),
        pytest.param(
            "max_epochs: 3", "deterministic: on", "5: train.deterministic: must be true or false", id="on-is-text"
        ),
        pytest.param("max_epochs: 3", "scheduler: no", "5: train.scheduler: must be a section", id="scheduler-no"),
        pytest.param(
            "max_epochs: 3", "max_grad_norm: None", "5: train.max_grad_norm: must be a number", id="None-is-text"
        ),
        pytest.param(
            "max_epochs: 3", "batch_size: 16.5", "5: train.batch_size: must be a whole number", id="half-a-sample"
        ),
        pytest.param(
            "max_epochs: 3", "batch_size: true", "5: train.batch_size: must be a whole number", id="true-samples"
        ),
        pytest.param(
            "max_epochs: 3",
            "max_grad_norm: 1, max_grad_value: 1",
            "5: train: max_grad_norm (1) and max_grad_value (1) are both given",
            id="two-clips",
        ),
        pytest.param(
            "max_epochs: 3",
            "scheduler: {name: cosine, gamma: 0.5}",
            "5: train.scheduler.gamma: the scheduler cosine has no 'gamma'",
            id="key-of-another-scheduler",
        ),
        pytest.param(
            "budget: {trials: 4}", "tracking: {uri: ./mlruns}\nbudget: {trials: 4}", "8: tracking: uri", id="folder"
        ),
        pytest.param(
            "budget: {trials: 4}",
            "storage: sqlite:///a.db\ntracking: {uri: 'sqlite:///a.db'}\nbudget: {trials: 4}",
            "8: storage: the study and MLflow share one database",
            id="one-database",
        ),
        pytest.param(
            "budget: {trials: 4}",
            "limits: {batch: {max: 4}}\nbudget: {trials: 4}",
            "8: limits.batch: there is no derived value",
            id="unknown-limit",
        ),
        pytest.param(
            "budget: {trials: 4}",
            "limits: {effective_batch_size: {max: 63}}\nbudget: {trials: 4}",
            "8: limits.effective_batch_size: no draw can be inside: effective_batch_size goes from 64 to 64",
            id="limit-below-everything",
        ),
        pytest.param(
            "budget: {trials: 4}",
            "limits: {applied_lr: {min: 2}}\nbudget: {trials: 4}",
            "8: limits.applied_lr: no draw can be inside: applied_lr goes from 1e-05 to 0.1",
            id="limit-above-everything",
        ),
        pytest.param("max_epochs: 3", "max_epochs: 1e9", "5: train.max_epochs: must be", id="float-epochs"),
        pytest.param(
            "max_epochs: 3",
            "max_epochs: 1000000",
            "5: train.max_epochs: must be at most 100000, not 1000000",
            id="a-million-epochs",
        ),
        pytest.param(
            "budget: {trials: 4}",
            "storage: 'sqlite:///'\nbudget: {trials: 4}",
            "8: storage: 'sqlite:///' names no file",
            id="storage-without-a-file",
        ),
        pytest.param(
            "budget: {trials: 4}",
            "storage: 'sqlite:///.'\nbudget: {trials: 4}",
            "8: storage: 'sqlite:///.' names no file",
            id="storage-in-a-folder",
        ),
        pytest.param(
            "budget: {trials: 4}",
            "enqueue: [{lr: 1}]\nbudget: {trials: 4}",
            "8: enqueue[0].lr: 1 is outside its range",
            id="enqueued-outside",
        ),
        pytest.param(
            "model: {name: mlp}",
            "model: {name: mlp}\nmodel: {name: cnn}",
            "5: the key 'model' stands twice",
            id="twice",
        ),
        pytest.param("study: toy", "study: [", "", id="no-yaml"),
        pytest.param(
            GOOD[GOOD.index("search_space") :],
            "search_space:\nbudget: {trials: 1}\n",
            "6: search_space: holds no",
            id="empty-space",
        ),
        pytest.param("study: toy", "on: 1\nstudy: toy", "1: on: unknown key", id="on-as-a-key"),
    ],
)
def test_a_bad_key_is_named_with_its_line(tmp_path: Path, old: str, new: str, fault: str) -> None:
    assert faults(tmp_path, GOOD.replace(old, new))[0].startswith(fault)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        pytest.param("1e-3", 0.001, id="no-dot"),
        pytest.param("1E-3", 0.001, id="capital"),
        pytest.param("5e5", 500000.0, id="no-sign"),
        pytest.param("1e+3", 1000.0, id="plus"),
        pytest.param("1.0E3", 1000.0, id="dot"),
        pytest.param("010", 10, id="not-octal"),
        pytest.param("1_000", 1000, id="underscore"),
    ],
)
def test_numbers_are_numbers_in_every_spelling(tmp_path: Path, written: str, value: float) -> None:
    spec = read(tmp_path, with_space(f"  weight_decay: {{choices: [{written}, 0.5]}}")).spec
    choices = spec.search_space["weight_decay"]
    assert isinstance(choices, ChoicesSpec)
    assert choices.choices[0] == value
    assert isinstance(choices.choices[0], int | float)


def test_booleans_and_null_are_choices(tmp_path: Path) -> None:
    spec = read(
        tmp_path,
        with_space("  model.params.batch_norm: {choices: [true, false]}\n  max_grad_norm: {choices: [null, 1.0]}"),
    ).spec
    assert [d.choices for d in spec.search_space.values() if isinstance(d, ChoicesSpec)] == [[True, False], [None, 1.0]]


@pytest.mark.parametrize(
    ("old", "new", "todo"),
    [
        pytest.param("max_epochs: 3", "scheduler: cosine", "Write `scheduler: {name: cosine}`.", id="scheduler"),
        pytest.param("{trials: 4}", "{trials: 4}\nsampler: grid", "Write `sampler: {name: grid}`.", id="sampler"),
        pytest.param("{trials: 4}", "{trials: 4}\npruner: none", "Write `pruner: {name: none}`.", id="pruner"),
        pytest.param("{trials: 4}", "{trials: 4}\npruner: null", "Write `pruner: {name: none}`.", id="null-pruner"),
        pytest.param("{name: mlp}", "mlp", "Write `model: {name: mlp}`.", id="model"),
        pytest.param("{source: digits}", "digits", "Write `data: {source: digits}`.", id="data"),
        pytest.param(
            "{trials: 4}",
            "{trials: 4}\nearly_stopping: false",
            "To switch it off, write `early_stopping: {patience: 1000}`, or as many validations as there can be.",
            id="early-stopping",
        ),
        pytest.param("max_epochs: 3", "learning_rate: 0.1", "Did you mean lr?", id="another-tool's-name"),
        pytest.param("max_epochs: 3", "max_epochs: three", "Write a whole number.", id="a-word"),
        pytest.param("max_epochs: 3", "max_epochs: 12:30", "Write a whole number.", id="no-base-60"),
        pytest.param("max_epochs: 3", "max_epochs: '3'", "Write it without quotes: 3.", id="quotes"),
        pytest.param("  lr: {low", "  learning_rate: {low", "Did you mean lr?", id="searched-by-another-name"),
        pytest.param("  lr: {low", "  optimizer.lr: {low", "Did you mean lr?", id="searched-in-the-wrong-place"),
        pytest.param("  lr: {low", "  model.width: {low", "Did you mean model.params.width?", id="without-params"),
        pytest.param("  lr:", "\tlr:", "Use spaces: YAML takes no tabs there.", id="tab"),
    ],
)
def test_what_to_do_is_what_helps(tmp_path: Path, old: str, new: str, todo: str) -> None:
    assert faults(tmp_path, GOOD.replace(old, new))[1].strip() == todo


@pytest.mark.parametrize(
    ("old", "new", "notice"),
    [
        pytest.param("maximize", "minimize", ":2: objective.direction: minimize looks for the worst", id="accuracy"),
        pytest.param("val_accuracy", "val_loss", ":2: objective.direction: maximize looks for the worst", id="loss"),
        pytest.param(
            "budget",
            "limits: {effective_batch_size: {max: 64}}\nenqueue: [{}]\nbudget",
            ":9: enqueue[0]: lr will be drawn, and the point may then be outside `limits`",
            id="open-point",
        ),
    ],
)
def test_what_is_rarely_meant_is_noticed(tmp_path: Path, old: str, new: str, notice: str) -> None:
    (found,) = read(tmp_path, GOOD.replace(old, new)).notices
    assert notice in found


def test_a_study_of_one_setting_searches_nothing(tmp_path: Path) -> None:
    text = GOOD[: GOOD.index("search_space")] + "search_space: {}\nbudget: {trials: 1}\n"
    assert read(tmp_path, text).spec.search_space == {}


def test_a_fault_of_the_environment_is_said_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWEEPER_STORAGE", "mysql://host/db")
    assert faults(tmp_path, GOOD)[0] == (
        "SWEEPER_STORAGE in the environment: storage: 'mysql' databases are not supported yet"
    )


def test_what_looks_like_a_date_is_text(tmp_path: Path) -> None:
    """As in YAML 1.2, which has no dates."""
    spec = read(tmp_path, GOOD.replace("{name: mlp}", "{name: 'a:b', params: {since: 2020-01-01}}")).spec
    assert spec.model.params == {"since": "2020-01-01"}


def test_a_step_that_misses_the_end_is_a_notice(tmp_path: Path) -> None:
    file = read(tmp_path, with_space("  accumulation_steps: {low: 1, high: 10, step: 4}"))
    assert file.notices == [
        f"{tmp_path}/study.yaml:7: search_space.accumulation_steps: high (10) is no step from low; "
        "the values are {1, 5, 9}"
    ]


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        pytest.param("  lr: {low: 1, high: 10}", "float", id="a-float-field-in-integers"),
        pytest.param("  batch_size: {low: 8, high: 64}", "int", id="an-integer-field"),
        pytest.param("  model.params.width: {low: 8, high: 64}", "int", id="a-free-parameter-in-integers"),
        pytest.param("  model.params.dropout: {low: 0.0, high: 1}", "float", id="a-free-parameter-in-floats"),
    ],
)
def test_the_field_decides_what_a_draw_is(tmp_path: Path, line: str, kind: str) -> None:
    (domain,) = read(tmp_path, with_space(line)).spec.search_space.values()
    assert isinstance(domain, RangeSpec)
    assert domain.kind == kind


def test_clipping_by_value_replaces_the_default_norm(tmp_path: Path) -> None:
    spec = read(tmp_path, GOOD.replace("max_epochs: 3", "max_grad_value: 0.5")).spec
    assert (spec.train.max_grad_norm, spec.train.max_grad_value) == (None, 0.5)


@pytest.mark.parametrize(("sampler", "notices"), [("gp", 1), ("cmaes", 1), ("nsga", 1), ("tpe", 0), ("qmc", 0)])
def test_a_sampler_that_does_not_see_pruned_trials_is_noticed(tmp_path: Path, sampler: str, notices: int) -> None:
    file = read(tmp_path, GOOD + f"sampler: {{name: {sampler}}}\n")
    assert len([n for n in file.notices if f"{sampler} does not look at pruned trials" in n]) == notices
    assert read(tmp_path, GOOD + f"sampler: {{name: {sampler}}}\npruner: {{name: none}}\n").notices == []


def test_the_environment_overrides_the_databases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWEEPER_STORAGE", "sqlite:///elsewhere.db")
    monkeypatch.setenv("SWEEPER_TRACKING_URI", "http://127.0.0.1:5000")
    spec = read(tmp_path, GOOD).spec
    assert (spec.storage, spec.tracking.uri) == ("sqlite:///elsewhere.db", "http://127.0.0.1:5000")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        pytest.param(None, "there is no such file", id="missing"),
        pytest.param(b"\xff\xfe", "is not UTF-8 text", id="not-text"),
        pytest.param(b"- a\n", "a study file holds keys and values, this one holds list", id="a-list"),
        pytest.param(b"", "study: is missing", id="empty"),
        pytest.param(b"[" * 3000, "cannot be read as a study", id="nested-without-end"),
        pytest.param(b"a: &a {<<: *a}\n", "cannot be read as a study|this is not YAML", id="a-merge-of-itself"),
        pytest.param(b"study: 1" + b"0" * 6000, "cannot be read as a study", id="a-number-without-end"),
    ],
)
def test_a_file_that_is_no_study_is_explained(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    path = tmp_path / "study.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SweeperError, match=sentence):
        read_study_file(path)


def test_the_shipped_studies_are_sound() -> None:
    for path in (Path(__file__).parent.parent / "studies").glob("*.yaml"):
        assert isinstance(read_study_file(path).spec, StudySpec)
