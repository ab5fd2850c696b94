"""Imports only go down the floors, and the heavy libraries stay behind their walls. Lazy imports obey as well."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "sweeper"

# The longest prefix counts. `sweeper` itself opens only what its users ask for.
FLOORS = {
    "sweeper.errors": 0,
    "sweeper.records": 0,
    "sweeper.spec": 0,
    "sweeper.imports": 0,
    "sweeper.yamlfile": 0,
    "sweeper.faultwords": 0,
    "sweeper.data": 1,
    "sweeper.models": 1,
    "sweeper.tasks": 1,
    "sweeper.training": 1,
    "sweeper.training.session": 2,
    "sweeper.training.loop": 2,
    "sweeper.space": 2,
    "sweeper.searchspace_rules": 2,
    "sweeper.studyfile": 2,
    "sweeper.tracking": 2,
    "sweeper.storage": 2,
    "sweeper.owner": 2,
    "sweeper.ownership": 2,
    "sweeper.tables": 2,
    "sweeper.trial_params": 2,
    "sweeper.triallog": 2,
    "sweeper.room": 3,
    "sweeper.pruning": 3,
    "sweeper.quota": 3,
    "sweeper.attempt": 3,
    "sweeper.trial": 3,
    "sweeper.study": 5,
    "sweeper.views": 6,
    "sweeper.display": 7,
    "sweeper.cli": 7,
}
WALLS = {
    "mlflow": ("sweeper.tracking",),
    "torch": ("sweeper.training", "sweeper.data", "sweeper.models", "sweeper.tasks"),
    "torchvision": ("sweeper.data", "sweeper.models"),
    "optuna": (
        "sweeper.study",
        "sweeper.space",
        "sweeper.trial",
        "sweeper.attempt",
        "sweeper.pruning",
        "sweeper.quota",
        "sweeper.views",
        "sweeper.storage",
        "sweeper.ownership",
        "sweeper.tables",
    ),
    "click": ("sweeper.cli",),
    "rich": ("sweeper.display",),
}
MODULES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> list[str]:
    """Every imported module, with the names imported from it, wherever in the file the import stands."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def floor(name: str) -> int:
    while name not in FLOORS:
        assert "." in name, f"no floor for {name}: add it to the table"
        name = name.rpartition(".")[0]
    return FLOORS[name]


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_only_go_down(path: Path) -> None:
    name = module_name(path)
    if name == "sweeper":
        return
    upward = [
        target
        for target in imports_of(path)
        if target.startswith("sweeper.") and target != "sweeper.__version__" and floor(target) > floor(name)
    ]
    assert upward == []


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_libraries_stay_behind_their_walls(path: Path) -> None:
    name = module_name(path)
    escaped = [
        target
        for target in imports_of(path)
        for library, rooms in WALLS.items()
        if target.split(".")[0] == library and not name.startswith(rooms)
    ]
    assert escaped == []
