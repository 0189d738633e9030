"""data_dump.json: what iteration, path, support_device, kernels and e2e_dump_settings mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from suites.configurations import (
    ABSENT,
    COMMON,
    E2E,
    NOT_TEXT,
    NOT_UINT,
    changed,
    load_body,
    load_common,
    refusal,
)

from rankdump.contract.errors import MISSING
from rankdump.contract.plan import Iterations, Operators

# 1.4 iterations


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("all", None),
        ("0", ((0, 0),)),
        ("02", ((2, 2),)),
        ("0|5-8|100-120", ((0, 0), (5, 8), (100, 120))),
        ("0|0", ((0, 0), (0, 0))),
        ("0|1-3|2", ((0, 0), (1, 3), (2, 2))),
        ("1||2", ((1, 1), (2, 2))),
        ("|1|", ((1, 1),)),
        ("4-4", ((4, 4),)),
        ("5-3", ()),
        ("0-|-3|-|0--3|1-2-3", ()),
        ("|", ()),
        ("18446744073709551616|7", ((7, 7),)),
        ("18446744073709551615", ((2**64 - 1, 2**64 - 1),)),
        ("9" * 5000 + "|" + "0" * 5000 + "3", ((3, 3),)),
    ],
)
def test_iteration_grammar(tmp_path: Path, text: str, spans: tuple[tuple[int, int], ...] | None):
    """Segments that no iteration can match are accepted and match nothing."""
    assert load_common(tmp_path, iteration=text).selection.iterations == Iterations(text, spans)


# 1.5 path

FROM_ENVIRONMENT = {"MS_DIAGNOSTIC_DATA_PATH": "/diagnostic"}


@pytest.mark.parametrize(
    ("path", "environ", "root"),
    [
        ("/a", {}, "/a"),
        ("/", {}, "/"),
        ("/a", FROM_ENVIRONMENT, "/a"),
        (ABSENT, FROM_ENVIRONMENT, "/diagnostic/debug_dump"),
        ("", FROM_ENVIRONMENT, "/diagnostic/debug_dump"),
        (ABSENT, {"MS_DIAGNOSTIC_DATA_PATH": "/d/"}, "/d/debug_dump"),
        ("/a", {"RANKDUMP_OUTPUT": "/over ridden/x.y"}, "/over ridden/x.y"),
        ("/a", {"RANKDUMP_OUTPUT": ""}, "/a"),
        (ABSENT, {"RANKDUMP_OUTPUT": "/b/"}, "/b"),
        (ABSENT, FROM_ENVIRONMENT | {"RANKDUMP_OUTPUT": "/b"}, "/b"),
    ],
)
def test_root(tmp_path: Path, path: object, environ: dict[str, str], root: str):
    """RANKDUMP_OUTPUT has the last word, then path, then MS_DIAGNOSTIC_DATA_PATH."""
    body = {"common_dump_settings": changed(COMMON, "path", path)}
    assert load_body(tmp_path, body, environ).output.root == root


@pytest.mark.parametrize(
    ("path", "environ", "key", "value"),
    [
        (ABSENT, {}, "common_dump_settings.path", MISSING),
        ("", {}, "common_dump_settings.path", ""),
        (ABSENT, {"MS_DIAGNOSTIC_DATA_PATH": ""}, "common_dump_settings.path", MISSING),
        (ABSENT, {"MS_DIAGNOSTIC_DATA_PATH": "rel"}, "MS_DIAGNOSTIC_DATA_PATH", "rel"),
        (ABSENT, {"MS_DIAGNOSTIC_DATA_PATH": "/a.b"}, "MS_DIAGNOSTIC_DATA_PATH", "/a.b"),
        ("/a", {"RANKDUMP_OUTPUT": "rel"}, "RANKDUMP_OUTPUT", "rel"),
        ("/a.b", {"RANKDUMP_OUTPUT": "/c"}, "common_dump_settings.path", "/a.b"),
    ],
)
def test_no_root(tmp_path: Path, path: object, environ: dict[str, str], key: str, value: object):
    """Where a root is missing or wrong, the key or the variable at fault is named."""
    error = refusal(tmp_path, {"common_dump_settings": changed(COMMON, "path", path)}, environ)
    assert (error.key, error.value) == (key, value)
    assert "an absolute folder" in error.allowed


# 1.6 devices


@pytest.mark.parametrize(
    ("items", "devices"),
    [([], ()), ([3, 3, 0], (3, 0)), ([1.9], (1,)), ([-1], (2**32 - 1,)), ([2**32], (0,))],
)
def test_devices(tmp_path: Path, items: list[float], devices: tuple[int, ...]):
    """Repeated ids count once; fractions are cut and negatives wrap."""
    assert load_common(tmp_path, support_device=items).selection.devices == devices


@pytest.mark.parametrize("item", ["0", None, True, [0], {}])
def test_no_device(tmp_path: Path, item: object):
    """An element that is no number is named by its index."""
    body = {"common_dump_settings": {**COMMON, "support_device": [0, item]}}
    error = refusal(tmp_path, body)
    assert (error.key, error.value) == ("common_dump_settings.support_device[1]", item)
    assert error.allowed == "a device id"


# 1.7 kernels


@pytest.mark.parametrize(
    ("items", "operators"),
    [
        (["Conv2D", "relu"], Operators(False, types=("Conv2D", "relu"))),
        (["Default/a/Conv2D-op1"], Operators(False, names=("Default/a/Conv2D-op1",))),
        (["Conv2D-op0"], Operators(False, names=("Conv2D-op0",))),
        (["name-regex(.*op[0-9]+)"], Operators(False, patterns=(".*op[0-9]+",))),
        ([r"name-regex(.*op\d)"], Operators(False, patterns=(r".*op\d",))),
        (["Name-Regex(a/b)"], Operators(False, names=("Name-Regex(a/b)",))),
        (["name-regex(a"], Operators(False, types=("name-regex(a",))),
        ([" Conv 2D ", 'a"b'], Operators(False, types=("Conv2D", "ab"))),
        ([1, True, None], Operators(False, types=("1", "true", "null"))),
        (["", '"', " "], Operators(False)),
        ([], Operators(False)),
        (["a", "a"], Operators(False, types=("a",))),
    ],
)
def test_kernels(tmp_path: Path, items: list[object], operators: Operators):
    """Each entry has one class: expression, full scope name or type."""
    plan = load_common(tmp_path, dump_mode=1, kernels=items)
    assert plan.selection.operators == operators


@pytest.mark.parametrize("pattern", ["(", "[", "a**", "(?P<x>a)(?P<x>b)", "[[:alpha:]]", r"\p"])
def test_invalid_expression(tmp_path: Path, pattern: str):
    """An invalid expression, or one that re would read in its own way, is refused."""
    kernels = ["a", f"name-regex({pattern})"]
    error = refusal(
        tmp_path, {"common_dump_settings": {**COMMON, "dump_mode": 1, "kernels": kernels}}
    )
    assert (error.key, error.value) == ("common_dump_settings.kernels", kernels)
    assert "a valid regular expression" in error.allowed
    assert repr(pattern) in error.allowed


def test_kernels_do_not_matter_in_mode_0(tmp_path: Path):
    """With dump_mode 0 everything is selected, whatever kernels say."""
    plan = load_common(tmp_path, dump_mode=0, kernels=["name-regex(()", "Conv2D"])
    assert plan.selection.operators == Operators()


# 1.8 e2e_dump_settings

E2E_REFUSED: list[tuple[str, tuple[Any, ...], str]] = [
    ("enable", (0, "true", None), "true or false"),
    ("enable", (False,), "true; asynchronous dump is not done"),
    ("trans_flag", (1, "x", None), "true or false"),
    ("save_kernel_args", ("x", 1, None), "true or false"),
    ("save_kernel_args", (True,), "false; saving arguments is not done"),
    ("sample_mode", (*NOT_UINT, 1, 2), "0; sampling is not done"),
    ("stat_calc_mode", (*NOT_TEXT, "bogus"), '"host" or "device"'),
]


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [(key, value, allowed) for key, values, allowed in E2E_REFUSED for value in values],
)
def test_refused_in_e2e(tmp_path: Path, key: str, value: object, allowed: str):
    """Types are checked, and what this version does not do is said."""
    body = {"common_dump_settings": COMMON, "e2e_dump_settings": {**E2E, key: value}}
    error = refusal(tmp_path, body)
    assert (error.key, error.value) == (f"e2e_dump_settings.{key}", value)
    assert allowed in error.allowed


@pytest.mark.parametrize("key", ["enable", "trans_flag"])
def test_e2e_mandatory(tmp_path: Path, key: str):
    """2.3 asks for both flags once the section is there, before it looks at the other section."""
    body = {"common_dump_settings": {}, "e2e_dump_settings": changed(E2E, key, ABSENT)}
    error = refusal(tmp_path, body)
    assert (error.key, error.value) == (f"e2e_dump_settings.{key}", MISSING)


@pytest.mark.parametrize(
    "extra",
    [
        {"trans_flag": False},
        {"save_kernel_args": False},
        {"sample_mode": 0, "sample_num": 0},
        {"stat_calc_mode": "device"},
        {"device_stat_precision_mode": "bogus"},
    ],
)
def test_e2e_without_effect(tmp_path: Path, extra: dict[str, object]):
    """Settings that change nothing for tensors of this version are accepted."""
    body = {"common_dump_settings": COMMON, "e2e_dump_settings": {**E2E, **extra}}
    assert load_body(tmp_path, body) == load_common(tmp_path)
