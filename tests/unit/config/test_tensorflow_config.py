"""TF Adapter's `DumpConfig`: every check of its constructor's arguments, and the plans."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from rankdump._config.output_path import PathFacts
from rankdump._config.tensorflow_config import parse_dump_config
from rankdump._core.plan import (
    ContentSettings,
    IterationSelection,
    OperatorSelection,
    plan_from_json,
    plan_to_json,
)
from rankdump._session.rank_session import Session
from rankdump.errors import MISSING_VALUE, ConfigError
from rankdump.tf import DumpConfig

HERE = "/here"
PLACES = {
    HERE: PathFacts(HERE, exists=True, directory=True, accessible=True),
    "file": PathFacts("/file", exists=True),
    "locked": PathFacts("/locked", exists=True, directory=True),
    ".": PathFacts("/cwd", exists=True, directory=True, accessible=True),
}


def arguments(**changes: object) -> dict[str, object]:
    defaults = DumpConfig()
    values = {name: getattr(defaults, name) for name in DumpConfig.__dataclass_fields__}
    return {**values, **changes}


@dataclass(frozen=True)
class RejectedArguments:
    """A check of TF Adapter's, the arguments that fail it, and the text of the error."""

    source: str
    changes: Mapping[str, Any]
    key: str
    allowed: str
    enabled: bool = field(default=True)


PATH = "enabled without path"
REFUSED = [
    *(
        RejectedArguments(
            f"{PATH}: {enabled}, {path!r}",
            {enabled: True, "dump_path": path},
            "dump_path",
            "(E10058)",
            enabled=False,
        )
        for enabled in ("enable_dump", "enable_dump_debug")
        for path in (None, "")
    ),
    RejectedArguments("path is no text", {"dump_path": 7}, "dump_path", "a folder that exists"),
    RejectedArguments(
        "path unresolved", {"dump_path": "/not/there"}, "dump_path", "a folder that exists"
    ),
    RejectedArguments(
        "path not a directory", {"dump_path": "file"}, "dump_path", "a folder, not a file"
    ),
    RejectedArguments(
        "path without access", {"dump_path": "locked"}, "dump_path", "may read and write"
    ),
    *(
        RejectedArguments(f"dump_step: {words}", {"dump_step": steps}, "dump_step", allowed)
        for words, steps, allowed in (
            ("101 parts", "|".join(["1"] * 101), "at most 100 parts, not 101"),
            ("equal ends", "0|5-5", "smaller than its last, not '5-5'"),
            ("backwards", "9-5", "smaller than its last"),
            ("no text", 5, 'a text such as "0|5|10|50-100"'),
            ("empty", "", "numbers and ranges"),
            ("blank", "0 | 5", "numbers and ranges"),
            ("all", "all", "numbers and ranges"),
            ("comma", "0,5", "numbers and ranges"),
            ("half a range", "5-", "numbers and ranges"),
            ("three ends", "1-2-3", "numbers and ranges"),
            ("65 bits", str(1 << 64), "at most 64 bits"),
        )
    ),
    *(
        RejectedArguments(f"{key}: {value!r}", {key: value}, key, allowed)
        for key, values, allowed in (
            ("dump_mode", ("both", "", None, 1, "ALL"), '"input", "output" or "all"'),
            ("dump_debug_mode", ("on", None), '"aicore_overflow", "atomic_overflow" or "all"'),
            ("dump_data", ("statistic", "Tensor", None), '"tensor" or "stats"'),
            ("dump_layer", (["a"], 7), "names with blanks"),
            ("enable_dump", ("yes", 1, None), "True or False"),
            ("enable_dump_debug", (1,), "True or False"),
        )
        for value in values
    ),
    RejectedArguments(
        "both", {"enable_dump": True, "enable_dump_debug": True}, "enable_dump_debug", "(E10001)"
    ),
]


@pytest.mark.parametrize("row", REFUSED, ids=[row.source for row in REFUSED])
def test_dump_config_rejects_wrong_arguments(row: RejectedArguments):
    """Each error is one line with the argument, its value and what is allowed."""
    base = {"enable_dump": True, "dump_path": HERE} if row.enabled else {}
    values = arguments(**{**base, **row.changes})
    with pytest.raises(ConfigError) as caught:
        parse_dump_config(values, probe=lambda path: PLACES.get(path, PathFacts(path)))
    error = caught.value
    assert (error.file, error.key) == ("DumpConfig", row.key)
    assert error.value == (MISSING_VALUE if values[row.key] is None else values[row.key])
    assert row.allowed in error.allowed
    assert str(error).isprintable()


EVERY = OperatorSelection(spelt=True)
ACCEPTED: list[tuple[dict[str, Any], dict[str, object]]] = [
    (
        {},
        {
            "output.root": HERE,
            "output.layout": "cann",
            "output.net_name": "",
            "output.file_format": "bin",
            "dialect": "tf",
            "enabled": True,
            "warnings": (),
            "selection.inputs": False,
            "selection.outputs": True,
            "selection.operators": EVERY,
            "selection.iterations": IterationSelection(),
            "content": ContentSettings(),
        },
    ),
    ({"dump_mode": "input"}, {"selection.inputs": True, "selection.outputs": False}),
    ({"dump_mode": "all"}, {"selection.inputs": True, "selection.outputs": True}),
    (
        {"dump_step": "0|5|50-100"},
        {"selection.iterations": IterationSelection("0|5|50-100", ((0, 0), (5, 5), (50, 100)))},
    ),
    (
        {"dump_layer": " a/b  c a/b"},
        {
            "selection.operators": OperatorSelection(
                everything=False, names=("a/b", "c"), spelt=True
            )
        },
    ),
    ({"dump_layer": ""}, {"selection.operators": EVERY}),
    ({"dump_data": "stats"}, {"content.saved": "statistic", "content.tables": "operator"}),
    (
        {
            "enable_dump": False,
            "enable_dump_debug": True,
            "dump_mode": "input",
            "dump_layer": "a",
            "dump_data": "stats",
        },
        {
            "selection.trigger": "overflow",
            "selection.inputs": True,
            "selection.outputs": True,
            "selection.operators": OperatorSelection(),
            "content": ContentSettings(),
            "output.layout": "cann",
            "warnings": tuple(
                f"{argument} is ignored with enable_dump_debug: an operator with an overflow is "
                "dumped whole"
                for argument in ("dump_mode: 'input'", "dump_data: 'stats'", "dump_layer: 'a'")
            ),
        },
    ),
]


@pytest.mark.parametrize(("changes", "gives"), ACCEPTED)
def test_dump_config_accepts_valid_arguments(changes: dict[str, Any], gives: dict[str, object]):
    values = arguments(**{"enable_dump": True, "dump_path": HERE, **changes})
    plan = parse_dump_config(values, probe=PLACES.__getitem__)
    for path, value in gives.items():
        assert attrgetter(path)(plan) == value, path
    assert plan_from_json(plan_to_json(plan)) == plan


@pytest.mark.parametrize("mode", ["aicore_overflow", "atomic_overflow"])
def test_dump_config_notes_one_kind_of_overflow(mode: str):
    values = arguments(enable_dump_debug=True, dump_path=HERE, dump_debug_mode=mode)
    plan = parse_dump_config(values, probe=PLACES.__getitem__)
    assert plan.warnings == (
        f"dump_debug_mode: '{mode}' becomes \"all\": "
        "rankdump does not distinguish kinds of overflow",
    )


def test_dump_config_constructor_checks_nothing():
    """Nor does TF Adapter's; the arguments have its order and its defaults."""
    config = DumpConfig("no", 7, {}, [], "x", (), b"", 0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        config.plan()
    assert DumpConfig(True, "/p", "0", "all", False, "all", "tensor", "a b").dump_layer == "a b"


def test_dump_config_checks_the_folder_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dumps").mkdir()
    assert DumpConfig(enable_dump=True, dump_path="dumps").plan().output.root == f"{tmp_path}/dumps"
    for path in ("missing", "nul\0", "x" * 300):
        with pytest.raises(ConfigError, match="a folder that exists"):
            DumpConfig(enable_dump=True, dump_path=path).plan()


def test_dump_config_rejects_a_folder_without_access(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "locked"
    folder.mkdir()
    # Root may write anywhere, so the question itself is answered here.
    monkeypatch.setattr(os, "access", lambda path, mode: (Path(path).stat(), False)[1])
    assert stat.S_ISDIR(folder.stat().st_mode)
    with pytest.raises(ConfigError, match="read and write"):
        DumpConfig(enable_dump=True, dump_path=str(folder)).plan()


def test_dump_config_that_is_off_starts_nothing(tmp_path: Path):
    """With nothing enabled nothing is checked either."""
    session = Session(DumpConfig(dump_path="/not/there", dump_mode="x"))
    assert not session.active
    session.close()
