"""Report as strict JSON: numbers are exact, NaN and infinities are null. Pure.

docs/comparing.md describes the keys.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields

from rankdump._analysis.compare.report import (
    ComparisonReport,
    ComparisonRow,
    ComparisonSettings,
    DifferenceMeasures,
    DivergenceOrigin,
    DumpedTensor,
    SuspectCall,
    TensorVerdict,
    get_dated_iteration,
)
from rankdump._analysis.compare.report_summary import count_verdicts

REPORT_VERSION = 2
"""Version of the keys, raised when a key changes its meaning, but not for new keys."""


def serialize_report(report: ComparisonReport) -> Iterator[str]:
    """Yield the JSON object in pieces with one row per line, so that a large report is never one
    text in memory.
    """
    head = json.dumps(_make_head(report), indent=1, allow_nan=False)
    yield f'{head[:-2]},\n "rows": ['
    for at, row in enumerate(report.rows):
        yield f"{',' if at else ''}\n  {json.dumps(_convert_row(row), allow_nan=False)}"
    yield "\n ]\n}\n"


def _make_head(report: ComparisonReport) -> dict[str, object]:
    counted = count_verdicts(report.rows)
    return {
        "version": REPORT_VERSION,
        "a": report.a,
        "b": report.b,
        "agrees": report.agrees,
        "seconds": _convert_number(report.seconds),
        "settings": _convert_settings(report.settings),
        "counts": {verdict.value: counted.get(verdict, 0) for verdict in TensorVerdict},
        "origins": list(map(_convert_origin, report.origins)),
        "rank_origins": list(map(_convert_origin, report.rank_origins)),
        "notes": list(report.notes),
        "cards": list(map(asdict, report.card_findings)),
    }


def _convert_settings(settings: ComparisonSettings) -> dict[str, object]:
    return {
        **asdict(settings.tolerances),
        "rules": settings.rules,
        "mapping": dict(settings.mapping),
        "msaccucmp": settings.msaccucmp,
        "noise": settings.noise,
        "tolerance": {each.pattern: each.error for each in settings.named},
        "by_rounding": settings.by_rounding,
    }


def _convert_origin(origin: DivergenceOrigin) -> dict[str, object]:
    return {
        "kind": origin.kind,
        "side": origin.side,
        "certain": origin.certain,
        "why": origin.ambiguity,
        "suspects": list(map(_convert_suspect, origin.suspects)),
    }


def _convert_suspect(suspect: SuspectCall) -> dict[str, object]:
    found: dict[str, object] = asdict(suspect)
    del found["row_place"]
    found["iteration"] = get_dated_iteration(suspect.iteration)
    if suspect.row_place is not None:
        rank, iteration = suspect.row_place
        found["row_place"] = [rank, get_dated_iteration(iteration)]
    return found


def _convert_row(row: ComparisonRow) -> dict[str, object]:
    result = row.outcome
    return {
        "rank": row.rank,
        "iteration": get_dated_iteration(row.iteration),
        "position": row.position,
        "rule": row.rule,
        "op_type": row.op_type,
        "name_a": row.name_a,
        "name_b": row.name_b,
        "backward": row.backward,
        "place": row.slot_name,
        "a": _convert_tensor(row.pair.a),
        "b": _convert_tensor(row.pair.b),
        "verdict": result.verdict.value,
        "findings": list(result.findings),
        "measures": _convert_measures(result.measures),
        "figures": _convert_numbers(result.statistic_differences),
        "extra": _convert_numbers(result.extra),
        "nonfinite_a": result.nonfinite_a,
        "nonfinite_b": result.nonfinite_b,
        "error_ratio": None if result.error_ratio is None else _convert_number(result.error_ratio),
    }


def _convert_tensor(tensor: DumpedTensor | None) -> dict[str, object] | None:
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
        "figures": _convert_numbers(tensor.statistics),
    }


def _convert_measures(measures: DifferenceMeasures | None) -> dict[str, float | None] | None:
    if measures is None:
        return None
    values = {field.name: getattr(measures, field.name) for field in fields(measures)}
    return _convert_numbers(values | {"close_share": measures.close_share})


def _convert_numbers(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _convert_number(value) for name, value in values.items()}


def _convert_number(value: float) -> float | None:
    return value if math.isfinite(value) else None
