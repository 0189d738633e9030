"""data_dump.json: loading, sections and the keys of common_dump_settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from suites.configurations import (
    COMMON,
    E2E,
    NOT_ARRAY,
    NOT_TEXT,
    NOT_UINT,
    load_body,
    load_common,
    load_text,
    refusal,
)

from rankdump.contract.dialect import load
from rankdump.contract.errors import MISSING, ConfigError
from rankdump.contract.plan import DumpPlan, Output, Selection


def test_a_plain_file_gives_the_whole_plan(tmp_path: Path):
    """Every field of the plan follows from the file."""
    plan = load_body(tmp_path, {"common_dump_settings": COMMON, "e2e_dump_settings": E2E})
    assert plan == DumpPlan(
        output=Output(root="/tmp/dump", net_name="LeNet"),
        selection=Selection(devices=(0, 1)),
        dialect="mindspore",
    )


# 1.1 loading

PLAIN = json.dumps({"common_dump_settings": COMMON})


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        "\ufeff" + PLAIN,
        " \r\n\t" + PLAIN + "\n",
        PLAIN + " trailing junk }{",
        PLAIN.encode() + b"\xff\xfe\x00",
        PLAIN.replace('"dump_mode"', '"dump_mode": "first", "dump_mode"'),
        json.dumps({"common_dump_settings": {**COMMON, "unknown": 1}, "async_dump_settings": 3}),
    ],
    ids=["plain", "bom", "blanks", "junk", "binary junk", "last key wins", "unknown keys"],
)
def test_lenient_like_mindspore(tmp_path: Path, text: str | bytes):
    """What MindSpore tolerates around and inside the value changes nothing."""
    assert load_text(tmp_path, text) == load_text(tmp_path, PLAIN)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "Expecting value"),
        ("{'a': 1}", "property name"),
        (PLAIN[:-1], "in line 1, column"),
        (PLAIN[:-1] + ",}", "in line 1, column"),
        ("// comment\n" + PLAIN, "Expecting value"),
        (PLAIN.replace("LeNet", "Le\nNet"), "control character"),
        (PLAIN.encode().replace(b"LeNet", b"Le\xffNet"), "not UTF-8"),
        (PLAIN.replace('"all"', "NaN"), "NaN"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_not_json(tmp_path: Path, text: str | bytes, cause: str):
    """A file that is no JSON is refused in one line that says where."""
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, text)
    assert cause in str(caught.value)
    assert "allowed: one JSON object in UTF-8" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("body", [{}, [], 1, "common_dump_settings", None, {"dump": {}}])
def test_no_known_dialect(tmp_path: Path, body: object):
    """A document of no dialect is refused with the dialects that are known."""
    error = refusal(tmp_path, body)
    assert (error.key, error.value) == ("common_dump_settings", MISSING)
    assert "MindSpore data_dump.json" in error.allowed


def test_no_readable_file(tmp_path: Path):
    """Missing, a folder, another suffix: each is said."""
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "plan.txt").write_text(PLAIN)
    for name, cause in [
        ("missing.json", "missing.json: missing"),
        ("folder.json", "Is a directory"),
        ("plan.txt", "ends in .json"),
        ("plan.JSON", "ends in .json"),
        ("nul\0.json", "null byte"),
    ]:
        with pytest.raises(ConfigError, match=name[:4]) as caught:
            load(tmp_path / name, {})
        assert cause in str(caught.value)


# 1.2 types, 1.3 keys

MANDATORY = ["dump_mode", "net_name", "iteration", "input_output", "kernels", "support_device"]


@pytest.mark.parametrize("index", range(len(MANDATORY)))
def test_mandatory_keys_in_order(tmp_path: Path, index: int):
    """Of several missing keys the first of MindSpore's order is named, before any bad value."""
    kept = dict.fromkeys(MANDATORY[:index], "bad")
    error = refusal(tmp_path, {"common_dump_settings": kept})
    assert (error.key, error.value) == (f"common_dump_settings.{MANDATORY[index]}", MISSING)
    assert "missing" in str(error)


REFUSED: list[tuple[str, tuple[object, ...], str]] = [
    ("dump_mode", (*NOT_UINT, 2, 3), "0 (every operator) or 1 (those in kernels)"),
    ("input_output", (*NOT_UINT, 3, 7), "0 (inputs and outputs), 1 (inputs) or 2 (outputs)"),
    (
        "net_name",
        (*NOT_TEXT, "", "a.b", "a b", "a/b", "../x", "n\n", "N\u00e9t"),
        "letters, digits",
    ),
    ("path", (*NOT_TEXT, "relative", "/a.b", "/a b", "/a:b", "~/x", "/\u00e9", "/a\n"), "absolute"),
    ("kernels", NOT_ARRAY, "an array of operator types"),
    ("support_device", NOT_ARRAY, "an array of device ids"),
    (
        "iteration",
        (*NOT_TEXT, "", "All", "0 | 5-8", "0,1", "0|all", "all|0", "\uff11", "1\n", "a"),
        '"all", or numbers and ranges',
    ),
    ("saved_data", (*NOT_TEXT, "statistic", "full", "Tensor", ""), '"tensor"'),
    ("op_debug_mode", (*NOT_UINT, 1, 2, 3, 4, 5), "0; overflow detection is not done"),
]


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [(key, value, allowed) for key, values, allowed in REFUSED for value in values],
)
def test_refused_in_common(tmp_path: Path, key: str, value: object, allowed: str):
    """The line names the file, the dotted key, the value and what is allowed."""
    error = refusal(tmp_path, {"common_dump_settings": {**COMMON, key: value}})
    assert error.key == f"common_dump_settings.{key}"
    assert error.value == value
    assert allowed in error.allowed
    assert f"{error.key}: {value!r} is not allowed; allowed: {error.allowed}" in str(error)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dump_mode", 1 << 32),
        ("input_output", 1 << 32),
        ("op_debug_mode", 0),
        ("saved_data", "tensor"),
        ("file_format", 7),
        ("statistic_category", "not even an array"),
        ("overflow_number", "x"),
        ("initial_iteration", -1),
        ("path", "/tmp/dump/"),
        ("path", "//tmp///dump"),
    ],
)
def test_no_effect(tmp_path: Path, key: str, value: object):
    """Keys that 2.3 does not read in this mode pass with any value; 64-bit numbers are cut."""
    assert load_common(tmp_path, **{key: value}) == load_common(tmp_path)


@pytest.mark.parametrize(
    ("value", "inputs", "outputs"), [(0, True, True), (1, True, False), (2, False, True)]
)
def test_input_output(tmp_path: Path, value: int, inputs: bool, outputs: bool):
    """0 is both sides, 1 inputs, 2 outputs."""
    selection = load_common(tmp_path, input_output=value).selection
    assert (selection.inputs, selection.outputs) == (inputs, outputs)


@pytest.mark.parametrize("section", ["common_dump_settings", "e2e_dump_settings", "rankdump"])
@pytest.mark.parametrize("value", [[], None, 1, "x"])
def test_section_is_no_object(tmp_path: Path, section: str, value: object):
    """A section that is no object is refused by its name."""
    error = refusal(tmp_path, {"common_dump_settings": COMMON, section: value})
    assert (error.key, error.value, error.allowed) == (section, value, "an object")
