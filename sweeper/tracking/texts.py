"""Values as MLflow keeps them: texts, cut to length, without passwords, compared as what they mean."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

MAX_PARAM_LENGTH = 6000  # of MLflow 3
CUT_PARAMS = "sweeper.cut_params"

# Greedy up to the last @, because SQLAlchemy accepts an unescaped @ or / in a password: better too much than a part.
_PASSWORD_IN_URL = re.compile(r"(://[^\s/:@\"']*):[^\s\"']*@")
_PASSWORD_IN_QUERY = re.compile(r"([?&]password=)[^&\s\"']*")


def redact(text: str) -> str:
    """Every `://user:pass@` as `://user:***@`, every `?password=pass` as `?password=***`."""
    return _PASSWORD_IN_QUERY.sub(r"\1***", _PASSWORD_IN_URL.sub(r"\1:***@", text))


def as_text(value: Any) -> str:
    """Plain values as JSON writes them (`null`, `true`, `0.1`, `[1, 2]`), anything else as `str` does; no passwords."""
    is_plain = value is None or isinstance(value, bool | int | float | list | tuple | dict)
    return redact(json.dumps(value, default=str, ensure_ascii=False) if is_plain else str(value))


def same_value(first: str, second: str) -> bool:
    """Whether two texts mean the same: `0.1` and `1e-1` do."""
    if first == second:
        return True
    try:
        return float(first) == float(second)
    except ValueError:
        return False


def plan_params(
    values: Mapping[str, str], params: Mapping[str, str], tags: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """What to log of `values` on a run that has `params` and `tags` already: (new params, tags).

    MLflow never changes a param, so another value becomes a tag `changed.NAME`, from the first value to this one.
    What is longer than MLflow keeps is cut and named in the tag `sweeper.cut_params`.
    """
    new_params, new_tags, cut = {}, {}, []
    for name, value in values.items():
        if len(value) > MAX_PARAM_LENGTH:
            value = value[:MAX_PARAM_LENGTH]
            cut.append(name)
        changed = f"changed.{name}"
        if name not in params:
            new_params[name] = value
        elif changed in tags or not same_value(params[name], value):
            new_tags[changed] = f"{params[name]} -> {value}"
    if cut:
        new_tags[CUT_PARAMS] = ", ".join(cut)
    return new_params, new_tags


def nonfinite_tags(metrics: Mapping[str, float], step: int) -> dict[str, str]:
    """MLflow stores an infinity as the largest float, so a tag says what it was. NaN is stored as NaN."""
    return {f"nonfinite.{name}": f"{value} at step {step}" for name, value in metrics.items() if math.isinf(value)}
