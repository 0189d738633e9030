"""Report as JSON: strict, complete, and with the keys of docs/comparing.md."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path

import jsonschema
from support.diff_reports import LAYERS, agreeing, layered, origin, outcome, report, row, suspect

from rankdump._analysis.compare.report import (
    CONSTANTS_ITERATION,
    DifferenceMeasures,
    DumpedTensor,
    PairOutcome,
    TensorPair,
    TensorVerdict,
)
from rankdump._analysis.compare.report_json import serialize_report
from rankdump._core.record import TensorKey, TensorSide
from rankdump.reader import Entry

PAGE = Path(__file__).parents[4] / "docs" / "comparing.md"
NUMBER = {"type": ["number", "null"]}
NUMBERS = {"type": "object", "additionalProperties": NUMBER}
TEXTS = {"type": "array", "items": {"type": "string"}}
WORDS = [verdict.value for verdict in TensorVerdict]


def exactly(**properties):
    """An object with these keys and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def listed(schema):
    return {"type": "array", "items": schema}


TEXT, WHOLE, YES_NO = ({"type": name} for name in ("string", "integer", "boolean"))
CALL = {
    "rank": WHOLE,
    "iteration": {"type": ["integer", "null"]},
    "position": WHOLE,
    "op_type": TEXT,
    "name_a": TEXT,
    "name_b": TEXT,
    "backward": YES_NO,
}
SUSPECT = exactly(
    **CALL,
    reason=TEXT,
    source=listed(exactly(file=TEXT, line=WHOLE, function=TEXT, code=TEXT)),
)
ORIGIN = exactly(
    kind={"enum": ["difference", "nonfinite"]},
    side={"enum": ["", "a", "b"]},
    certain=YES_NO,
    why=TEXT,
    suspects=listed(SUSPECT),
)
TENSOR = {
    "anyOf": [
        {"type": "null"},
        exactly(
            argument=TEXT,
            dtype=TEXT,
            shape={"type": ["array", "null"], "items": WHOLE},
            digest=TEXT,
            path=TEXT,
            member=TEXT,
            figures=NUMBERS,
        ),
    ]
}
MEASURES = exactly(
    **{field.name: NUMBER for field in fields(DifferenceMeasures)}, close_share={"type": "number"}
)
SCHEMA = exactly(
    version={"const": 2},
    a=TEXT,
    b=TEXT,
    agrees=YES_NO,
    seconds={"type": "number"},
    settings=exactly(
        rtol=NUMBER,
        atol=NUMBER,
        equal_nan=YES_NO,
        rules=TEXTS,
        mapping={"type": "object", "additionalProperties": TEXT},
        msaccucmp=YES_NO,
        noise=TEXTS,
        tolerance={"type": "object", "additionalProperties": NUMBER},
        by_rounding=YES_NO,
    ),
    counts=exactly(**dict.fromkeys(WORDS, WHOLE)),
    origins=listed(ORIGIN),
    rank_origins=listed(ORIGIN),
    notes=TEXTS,
    cards=listed(
        exactly(
            subject=TEXT,
            text=TEXT,
            is_difference=YES_NO,
            names=TEXTS,
            ranks=listed(WHOLE),
            iteration={"type": ["integer", "null"]},
        )
    ),
    rows=listed(
        exactly(
            **CALL,
            rule=TEXT,
            place=TEXT,
            a=TENSOR,
            b=TENSOR,
            verdict={"enum": WORDS},
            findings=TEXTS,
            measures={"anyOf": [{"type": "null"}, MEASURES]},
            figures=NUMBERS,
            extra=NUMBERS,
            nonfinite_a={"type": ["boolean", "null"]},
            nonfinite_b={"type": ["boolean", "null"]},
            error_ratio=NUMBER,
        )
    ),
)


def parsed(made):
    """The object, by a reader that knows JSON and nothing more."""

    def refuse(token):
        raise AssertionError(f"{token} is not JSON")

    return json.loads("".join(serialize_report(made)), parse_constant=refuse)


def test_json_keys_are_the_same_in_every_report():
    """Every kind of report has the same keys, and no other."""
    only = row(6, "output.0", PairOutcome(TensorVerdict.UNMATCHED), only="b")
    odd = PairOutcome(
        TensorVerdict.NAN, ("3 NaN in a",), None, {"max": math.nan}, {"X": math.inf}, True
    )
    ambiguous = origin(suspect(), suspect(4), why="two ranks disagree")
    for made in (
        report(),
        agreeing(),
        report([]),
        report([only, row(7, "input.1", odd)], origins=(ambiguous,), notes=("rank 2 in b only",)),
    ):
        jsonschema.validate(parsed(made), SCHEMA)


def test_json_has_the_whole_report():
    made = report()
    found = parsed(made)
    assert len(found["rows"]) == len(made.rows)
    assert found["counts"] == {**dict.fromkeys(WORDS, 0), "different": 10, "normal": 6, "same": 8}
    assert found["agrees"] is False
    assert found["origins"][0]["suspects"][0]["name_a"] == LAYERS[3]
    assert found["origins"][0]["suspects"][0]["source"][-1]["code"] == "x = layer(x)"
    assert [each["suspects"][0]["rank"] for each in found["rank_origins"]] == [0, 1]
    assert parsed(agreeing())["agrees"] is True


def test_json_numbers_are_exact_and_nan_is_null():
    error = 0.1 + 0.2
    result = outcome(TensorVerdict.DIFFERENT, error)
    assert result.measures is not None
    far = replace(result.measures, max_relative=math.inf)
    (found,) = parsed(report([row(0, "output.0", replace(result, measures=far))]))["rows"]
    assert found["measures"]["max_absolute"] == error
    assert found["measures"]["max_relative"] is None
    assert found["measures"]["kl_divergence"] is None
    assert found["measures"]["close_share"] == 0.5


def test_json_tensor_has_its_path_and_member():
    key = TensorKey(0, "Net", 0, 3, 1, "Linear", "fc", TensorSide.OUTPUT, 1)
    entry = Entry(Path("/tree"), "rank_0/Net/0/3/fc.bin", key, 80, member="output.1")
    held = DumpedTensor(
        TensorSide.OUTPUT, 1, "output.1", "bfloat16", None, "abc", entry, {"max": 2.5}
    )
    made = row(0, "output.1", outcome())._replace(pair=TensorPair(held, None))
    (found,) = parsed(report([made]))["rows"]
    assert found["a"] == {
        "argument": "output.1",
        "dtype": "bfloat16",
        "shape": None,
        "digest": "abc",
        "path": "rank_0/Net/0/3/fc.bin",
        "member": "output.1",
        "figures": {"max": 2.5},
    }
    assert found["b"] is None


def test_json_iteration_of_constants_is_null():
    made = report(
        [row(0, "output.0", outcome(TensorVerdict.DIFFERENT, 1.0), iteration=CONSTANTS_ITERATION)],
        origins=(origin(suspect(iteration=CONSTANTS_ITERATION)),),
    )
    found = parsed(made)
    assert found["rows"][0]["iteration"] is None
    assert found["origins"][0]["suspects"][0]["iteration"] is None


def test_json_has_one_row_per_line():
    """So a line of a large report can be looked for, and cut out."""
    lines = "".join(serialize_report(report())).splitlines()
    rows = [line.strip().rstrip(",") for line in lines if line.startswith('  {"rank"')]
    assert [json.loads(line)["place"] for line in rows] == [r.slot_name for r in layered()]


def test_json_keys_are_documented():
    keys: set[str] = set()

    def gather(schema):
        for each in (*schema.get("anyOf", ()), schema.get("items")):
            if each:
                gather(each)
        for name, inner in schema.get("properties", {}).items():
            keys.add(name)
            gather(inner)

    gather(SCHEMA)
    documented = set(re.findall(r"`([a-z_0-9]+)`", PAGE.read_text()))
    assert keys - documented == set()
