"""What is decided before anything goes to MLflow: texts, params, URIs, and what is struck out."""

from __future__ import annotations

from pathlib import Path, PureWindowsPath
from typing import Any

import pytest

from mlflow_side import settings_for
from sweeper.errors import SpecError
from sweeper.tracking import check_tracking, redact
from sweeper.tracking.texts import as_text, plan_params


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        pytest.param("postgresql://me:secret@host/db", "postgresql://me:***@host/db", id="user-and-password"),
        pytest.param("mysql+pymysql://me:p@ss/w@host/db", "mysql+pymysql://me:***@host/db", id="odd-password"),
        pytest.param("redis://:secret@host", "redis://:***@host", id="no-user"),
        pytest.param('{"a": "http://me:secret@h", "b": "c@d"}', '{"a": "http://me:***@h", "b": "c@d"}', id="json"),
        pytest.param("mysql://host/db?user=me&password=s", "mysql://host/db?user=me&password=***", id="query"),
        pytest.param("http://host:5000/path", "http://host:5000/path", id="a-port-is-no-password"),
        pytest.param("sqlite:///mlruns/mlflow.db", "sqlite:///mlruns/mlflow.db", id="a-file"),
    ],
)
def test_redact_strikes_out_passwords(text: str, redacted: str) -> None:
    assert redact(text) == redacted


@pytest.mark.parametrize(
    ("value", "text"),
    [
        pytest.param(None, "null", id="null"),
        pytest.param(True, "true", id="boolean"),
        pytest.param(0.1, "0.1", id="float"),
        pytest.param(1e-05, "1e-05", id="small-float"),
        pytest.param("off", "off", id="text"),
        pytest.param(["http://a:b@c", 2], '["http://a:***@c", 2]', id="list"),
        pytest.param(Path("a b"), "a b", id="path"),
    ],
)
def test_values_become_texts(value: Any, text: str) -> None:
    assert as_text(value) == text


@pytest.mark.parametrize(
    ("old", "new", "tags", "planned"),
    [
        pytest.param({}, {"lr": "0.1"}, {}, ({"lr": "0.1"}, {}), id="new"),
        pytest.param({"lr": "0.1"}, {"lr": "0.1"}, {}, ({}, {}), id="same"),
        pytest.param({"lr": "0.1"}, {"lr": "1e-1"}, {}, ({}, {}), id="same-number"),
        pytest.param({"n": "4"}, {"n": "2"}, {}, ({}, {"changed.n": "4 -> 2"}), id="changed"),
        pytest.param({"n": "4"}, {"n": "4"}, {"changed.n": "4 -> 2"}, ({}, {"changed.n": "4 -> 4"}), id="changed-back"),
        pytest.param({"n": "true"}, {"n": "1"}, {}, ({}, {"changed.n": "true -> 1"}), id="a-boolean-is-no-number"),
        pytest.param({"p": "p" * 6000}, {"p": "p" * 6001}, {}, ({}, {"sweeper.cut_params": "p"}), id="cut-again"),
    ],
)
def test_params_are_planned(old: dict[str, str], new: dict[str, str], tags: dict[str, str], planned: Any) -> None:
    assert plan_params(new, old, tags) == planned


@pytest.mark.parametrize(
    ("uri", "what"),
    [
        pytest.param("sqlite:///", "names no file", id="no-file"),
        pytest.param("sqlite:///:memory:", "names no file", id="memory"),
        pytest.param("sqlite:///{place}", "names a folder", id="a-folder"),
        pytest.param("sqlite:///{place}/text/mlflow.db", "which is no folder", id="below-a-file"),
        pytest.param("sqlite:///{place}/text", "no SQLite database", id="another-file"),
        pytest.param("http://", "has no usable host and port", id="no-host"),
        pytest.param("http://me:secret@host:99999", "has no usable host and port", id="no-port"),
    ],
)
def test_a_uri_that_cannot_work_is_said_so_before_anything_runs(uri: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a text", encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        check_tracking(uri.format(place=tmp_path))
    assert caught.value.fault.path == ("tracking", "uri")
    assert what in caught.value.fault.what
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "uri", ["sqlite:///{place}/new/folder/mlflow.db", "http://localhost:5000", "https://me:secret@host/prefix"]
)
def test_a_usable_uri_passes_and_nothing_is_created(uri: str, tmp_path: Path) -> None:
    check_tracking(uri.format(place=tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("folder", "location"),
    [
        pytest.param(Path("/data/my runs"), "file:///data/my%20runs", id="space"),
        pytest.param(PureWindowsPath("D:\\runs"), "file:///D:/runs", id="drive"),
        pytest.param(PureWindowsPath("D:/runs"), "file:///D:/runs", id="drive-with-slash"),
    ],
)
def test_the_artifact_folder_is_given_as_a_uri(folder: Path, location: str, tmp_path: Path) -> None:
    assert settings_for(tmp_path, "a", artifacts=folder).artifact_location == location
    assert settings_for(tmp_path, "a", artifacts=folder, uri="http://host:5000").artifact_location is None
