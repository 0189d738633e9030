"""A report as strict JSON: every number exact, NaN and infinities as null. Pure.

docs/comparing.md says what each key means.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields

from rankdump.diff.summary import counts
from rankdump.diff.values import (
    CONSTANTS,
    Measures,
    Origin,
    Report,
    Row,
    Settings,
    Suspect,
    Tensor,
    Verdict,
)

VERSION = 1
"""Rises when a key changes its meaning; new keys leave it."""


def text(report: Report) -> Iterator[str]:
    """Yield the object piece by piece, one row a line: a large report is never held as one text."""
    head = json.dumps(_head(report), indent=1, allow_nan=False)
    yield f'{head[:-2]},\n "rows": ['
    for at, row in enumerate(report.rows):
        yield f"{',' if at else ''}\n  {json.dumps(_row(row), allow_nan=False)}"
    yield "\n ]\n}\n"


def _head(report: Report) -> dict[str, object]:
    counted = counts(report.rows)
    return {
        "version": VERSION,
        "a": report.a,
        "b": report.b,
        "agrees": report.agrees,
        "seconds": _number(report.seconds),
        "settings": _settings(report.settings),
        "counts": {verdict.value: counted.get(verdict, 0) for verdict in Verdict},
        "origins": list(map(_origin, report.origins)),
        "rank_origins": list(map(_origin, report.rank_origins)),
        "notes": list(report.notes),
    }


def _settings(settings: Settings) -> dict[str, object]:
    return {
        "rtol": settings.tolerances.rtol,
        "atol": settings.tolerances.atol,
        "equal_nan": settings.tolerances.equal_nan,
        "rules": list(settings.rules),
        "mapping": dict(settings.mapping),
        "msaccucmp": settings.msaccucmp,
    }


def _origin(origin: Origin) -> dict[str, object]:
    return {
        "kind": origin.kind,
        "side": origin.side,
        "certain": origin.certain,
        "why": origin.why,
        "suspects": list(map(_suspect, origin.suspects)),
    }


def _suspect(suspect: Suspect) -> dict[str, object]:
    return {**asdict(suspect), "iteration": _iteration(suspect.iteration)}


def _iteration(number: int) -> int | None:
    return None if number == CONSTANTS else number


def _row(row: Row) -> dict[str, object]:
    result = row.outcome
    return {
        "rank": row.rank,
        "iteration": _iteration(row.iteration),
        "position": row.position,
        "rule": row.rule,
        "op_type": row.op_type,
        "name_a": row.name_a,
        "name_b": row.name_b,
        "backward": row.backward,
        "place": row.place,
        "a": _tensor(row.pair.a),
        "b": _tensor(row.pair.b),
        "verdict": result.verdict.value,
        "findings": list(result.findings),
        "measures": _measures(result.measures),
        "figures": _numbers(result.figures),
        "extra": _numbers(result.extra),
        "nonfinite_a": result.nonfinite_a,
        "nonfinite_b": result.nonfinite_b,
    }


def _tensor(tensor: Tensor | None) -> dict[str, object] | None:
    if tensor is None:
        return None
    entry = tensor.entry
    return {
        "argument": tensor.argument,
        "dtype": tensor.dtype,
        "shape": None if tensor.shape is None else list(tensor.shape),
        "digest": tensor.digest,
        "path": entry.relative if entry is not None else "",
        "member": entry.member if entry is not None else "",
        "figures": _numbers(tensor.figures),
    }


def _measures(measures: Measures | None) -> dict[str, float | None] | None:
    if measures is None:
        return None
    told = {field.name: getattr(measures, field.name) for field in fields(measures)}
    return _numbers(told | {"close_share": measures.close_share})


def _numbers(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _number(value) for name, value in values.items()}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
