"""The README says what is true: its study file is the shipped one, every command and every section stands in it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from commands import sweep
from sweeper.cli import main
from sweeper.spec import StudySpec
from sweeper.studyfile import read_study_file

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_command_is_documented() -> None:
    assert all(f"`sweep {name} STUDY.yaml" in README for name in main.commands)


def test_every_section_is_documented() -> None:
    missing = [name for name in StudySpec.model_fields if f"`{name}" not in README and f"{name}:" not in README]
    assert missing == []


def test_the_study_file_is_the_shipped_one(tmp_path: Path) -> None:
    (block,) = [b for b in re.findall(r"```yaml\n(.*?)```", README, re.DOTALL) if b.startswith("study:")]
    path = tmp_path / "study.yaml"
    path.write_text(block)
    assert read_study_file(path).spec == read_study_file(ROOT / "studies/digits.yaml").spec


def test_the_first_command_finds_a_good_model(tmp_path: Path) -> None:
    study = str(ROOT / "studies/digits.yaml")
    done = sweep(tmp_path, "run", study)
    assert done.returncode == 0, done.stderr
    status = json.loads(sweep(tmp_path, "status", study, "--json").stdout)
    assert status["trials"]["complete"] + status["trials"]["pruned"] == 30
    assert status["best"]["value"] >= 0.985


def test_the_top_level_holds_what_was_agreed() -> None:
    agreed = {"pyproject.toml", "README.md", "sweeper", "studies", "mlruns", "tests", "docker"}
    built = {"build", "dist", "venv", "sweeper.egg-info"}  # by whoever works here, ignored by git
    assert {path.name for path in ROOT.iterdir() if not path.name.startswith(".")} - built <= agreed
