"""Comparison of two trees without tensors by their columns: the verdicts of all pairs are computed
at once, and each pair gets the row that the comparison of programs would give it.

Programs with the same structure (the same operators with tensors of the same shapes, in the same
order) are paired only once. The tensors in a row have neither fingerprint nor record, because both
have been used already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from rankdump._analysis.compare.fingerprint_comparison import (
    ESTIMATE_FINDING,
    ESTIMATED_ERROR,
    ESTIMATED_RMSE,
    OTHER_DIGESTS_FINDING,
    VERDICTS,
    judge_sketches,
)
from rankdump._analysis.compare.pair_comparison import (
    NOTHING_KNOWN_FINDING,
    decide_without_reading,
)
from rankdump._analysis.compare.programs import build_program
from rankdump._analysis.compare.report import (
    NO_STATISTICS,
    ComparisonRow,
    ComparisonSettings,
    DumpedProgram,
    DumpedTensor,
    ElementTolerances,
    PairingRule,
    PairOutcome,
    TensorPair,
    TensorVerdict,
)
from rankdump._analysis.compare.tensor_pairs import pair_program_tensors
from rankdump._analysis.compare.tree_columns import CodedColumn, TreeColumns
from rankdump._analysis.reader.fingerprints import RecordedFingerprint
from rankdump._analysis.reader.tree import NONFINITE_COUNT_ITEMS
from rankdump._analysis.table.table_files import ColumnPlace
from rankdump._core.record import TensorSide
from rankdump._kernels.shard_fingerprint import SKETCH_BUCKETS

_Numbers: TypeAlias = "npt.NDArray[np.int64]"
_Flags: TypeAlias = "npt.NDArray[np.bool_]"
_FixedParts: TypeAlias = "tuple[TensorSide, int, str, str, tuple[int, ...]]"
"""Fields that tensors at the same place of equal structures have in common."""
_CallFacts: TypeAlias = "tuple[int, PairingRule, str, str, str, bool]"
"""Fields of a row about its calls, from `ComparisonRow.position` to `backward`."""
_SIDES = (TensorSide.INPUT, TensorSide.OUTPUT)
_STRUCTURE = ("name", "op_type", "argument", "dtype", "shape", "layout")
_WORD_BITS = 62
_FINITENESS: tuple[bool | None, ...] = (False, True, None)
_UNKNOWN_FINITENESS = 2


class StatisticRow(Mapping[str, float]):
    """Statistics of one tensor, or differences of a pair, which are read from columns."""

    __slots__ = ("_columns", "_row")

    def __init__(self, columns: StatisticColumns, row: int) -> None:
        self._columns, self._row = columns, row

    def __getitem__(self, item: str) -> float:
        if not self._columns.is_known[item][self._row]:
            raise KeyError(item)
        return float(self._columns.values[item][self._row])

    def __iter__(self) -> Iterator[str]:
        return (item for item, known in self._columns.is_known.items() if known[self._row])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


@dataclass(frozen=True, slots=True)
class StatisticColumns:
    """Numbers of many tensors, by name of the statistic."""

    values: Mapping[str, npt.NDArray[np.float64]]
    is_known: Mapping[str, _Flags]


class _CallType(NamedTuple):
    op_type: str


class _PairingPlan(NamedTuple):
    """Pairs of tensors for two structures: their positions in both programs, -1 for no tensor."""

    calls: list[_CallFacts]
    a: _Numbers
    b: _Numbers


def compare_columns(
    a: TreeColumns,
    b: TreeColumns,
    places: Sequence[tuple[ColumnPlace, ColumnPlace]],
    settings: ComparisonSettings,
) -> list[ComparisonRow]:
    """Return the comparison rows of pairs of programs."""
    sides = _ColumnSide(a), _ColumnSide(b)
    known: dict[tuple[bytes, bytes], _PairingPlan] = {}
    plans: list[_PairingPlan] = []
    for own, other in places:
        key = sides[0].find_structure(own), sides[1].find_structure(other)
        if key not in known:
            known[key] = _plan_pairs(
                sides[0].build_program(own), sides[1].build_program(other), settings
            )
        plans.append(known[key])
    rows_a = _place_rows(
        [(plan.a, own.start) for plan, (own, _) in zip(plans, places, strict=True)]
    )
    rows_b = _place_rows(
        [(plan.b, its.start) for plan, (_, its) in zip(plans, places, strict=True)]
    )
    outcomes = iter(_judge_pairs(*sides, rows_a, rows_b, settings))
    rows: list[ComparisonRow] = []
    for (own, other), plan in zip(places, plans, strict=True):
        left, right = sides[0].build_tensors(own), sides[1].build_tensors(other)
        at: tuple[list[int], list[int]] = plan.a.tolist(), plan.b.tolist()
        pairs = zip(plan.calls, *at, strict=True)
        rows += [
            ComparisonRow(
                own.rank,
                own.iteration,
                *facts,
                TensorPair(left[at_a] if at_a >= 0 else None, right[at_b] if at_b >= 0 else None),
                next(outcomes),
            )
            for facts, at_a, at_b in pairs
        ]
    return rows


def _place_rows(parts: Sequence[tuple[_Numbers, int]]) -> _Numbers:
    """Return the rows for positions in programs, each of which begins at its own row; -1 for no
    tensor.
    """
    placed = [np.where(places < 0, -1, places + start) for places, start in parts]
    return np.concatenate([np.zeros(0, np.int64), *placed])


def _plan_pairs(a: DumpedProgram, b: DumpedProgram, settings: ComparisonSettings) -> _PairingPlan:
    rows = pair_program_tensors([(a, b)], settings)
    seen = [
        [-1 if tensor is None else tensor.seen_order for tensor in (row.pair.a, row.pair.b)]
        for row in rows
    ]
    both = np.array(seen, np.int64).reshape(-1, 2)
    return _PairingPlan([row[2:8] for row in rows], both[:, 0], both[:, 1])


class _ColumnSide:
    """One of the two trees, with what was computed from its columns."""

    def __init__(self, columns: TreeColumns) -> None:
        self.columns = columns
        self.statistics = StatisticColumns(columns.statistics, columns.is_known)
        self._words = _pack_structure(columns)
        self._structures: dict[ColumnPlace, bytes] = {}
        self._fixed: dict[bytes, list[_FixedParts]] = {}

    def find_structure(self, place: ColumnPlace) -> bytes:
        """Return a digest that is equal for programs with the same structure."""
        if place not in self._structures:
            part = np.ascontiguousarray(self._words[place.start : place.stop])
            self._structures[place] = xxhash.xxh3_128_digest(part.view(np.uint8).data)
        return self._structures[place]

    def build_program(self, place: ColumnPlace) -> DumpedProgram:
        """Return a program, of which only the structure matters."""
        rows = slice(place.start, place.stop)
        types = map(_CallType, self._decode_values("op_type", rows))
        named = zip(
            self._decode_values("name", rows), types, self.build_tensors(place), strict=True
        )
        return build_program((place.rank, place.iteration), ((0, *each) for each in named))

    def build_tensors(self, place: ColumnPlace) -> list[DumpedTensor]:
        """Return the tensors of a program, in order."""
        structure, rows = self.find_structure(place), slice(place.start, place.stop)
        if structure not in self._fixed:
            self._fixed[structure] = self._build_fixed_parts(rows)
        digests = _decode_values(self.columns.digests, rows)
        has_statistics = bool(self.columns.statistics)
        statistics = (
            StatisticRow(self.statistics, row) if has_statistics else NO_STATISTICS
            for row in range(place.start, place.stop)
        )
        return [
            DumpedTensor(side, slot, argument, dtype, shape, digest, None, known, seen)
            for seen, ((side, slot, argument, dtype, shape), digest, known) in enumerate(
                zip(self._fixed[structure], digests, statistics, strict=True)
            )
        ]

    def _build_fixed_parts(self, rows: slice) -> list[_FixedParts]:
        numbers: list[int] = self.columns.sides[rows].tolist()
        sides = [_SIDES[number] for number in numbers]
        texts = [self._decode_values(name, rows) for name in ("argument", "dtype", "shape")]
        return [*zip(sides, self.columns.slots[rows].tolist(), *texts, strict=True)]

    def build_measured_tensor(self, row: int, sketch: npt.NDArray[np.float32]) -> DumpedTensor:
        """Return the tensor in a row, with its fingerprint."""
        place = ColumnPlace(0, 0, row, row + 1)
        (tensor,) = self.build_tensors(place)
        if not self.columns.has_fingerprint[row]:
            return tensor
        digest = int(self.columns.fingerprints[row])
        return tensor._replace(fingerprint=RecordedFingerprint(digest, sketch.tobytes()))

    def list_finiteness(self, rows: _Numbers) -> list[int]:
        """Return for each row an index into _FINITENESS, which says whether its tensor has NaN or
        infinity; a row of -1 has no tensor.
        """
        return np.where(rows < 0, _UNKNOWN_FINITENESS, self._find_finiteness()[rows]).tolist()

    def _find_finiteness(self) -> _Numbers:
        columns = self.columns
        found = np.full(len(columns), _UNKNOWN_FINITENESS)
        known, values = columns.is_known, columns.statistics
        extremes = [item for item in ("max", "min") if item in values]
        if len(extremes) == 2:
            found[known["max"] & known["min"]] = 0
        for item in extremes:
            found[known[item] & ~np.isfinite(values[item])] = 1
        if all(item in values for item in NONFINITE_COUNT_ITEMS):
            counted = np.logical_and.reduce([known[item] for item in NONFINITE_COUNT_ITEMS])
            total = np.sum([values[item] for item in NONFINITE_COUNT_ITEMS], axis=0)
            found[counted] = (total > 0)[counted]
        dtypes = columns.coded["dtype"]
        is_bool = np.array([each == "bool" for each in dtypes.values])
        found[is_bool[dtypes.codes]] = 0
        return found

    def _decode_values(self, name: str, rows: slice) -> list[Any]:
        return _decode_values(self.columns.coded[name], rows)


def _decode_values(column: CodedColumn, rows: slice) -> list[Any]:
    return [column.values[code] for code in column.codes[rows].tolist()]


def _pack_structure(columns: TreeColumns) -> _Numbers:
    """Return a few numbers for each row, which are equal if and only if the structures of the rows
    are.
    """
    parts = [(columns.sides, 2), (columns.slots, int(columns.slots.max(initial=0)) + 1)]
    parts += [(columns.coded[name].codes, len(columns.coded[name].values)) for name in _STRUCTURE]
    words: list[_Numbers] = []
    bits = _WORD_BITS + 1
    for codes, count in parts:
        width = max(1, int(count - 1).bit_length())
        if bits + width > _WORD_BITS:
            words.append(codes.astype(np.int64))
            bits = width
        else:
            words[-1] = words[-1] << width | codes
            bits += width
    return np.stack(words, axis=1)


def _translate(a: CodedColumn, b: CodedColumn) -> _Numbers:
    """Return the codes of b translated to those of a; -1 for values that a does not have."""
    numbers = {value: code for code, value in enumerate(a.values)}
    codes = np.array([numbers.get(value, -1) for value in b.values], np.int64)
    return codes[b.codes]


def _judge_pairs(
    a: _ColumnSide, b: _ColumnSide, rows_a: _Numbers, rows_b: _Numbers, settings: ComparisonSettings
) -> list[PairOutcome]:
    """Return the outcome of each pair."""
    finite_a: list[int] = a.list_finiteness(rows_a)
    finite_b: list[int] = b.list_finiteness(rows_b)
    both = (rows_a >= 0) & (rows_b >= 0)
    same_type, same_digest = _compare_facts(a.columns, b.columns, rows_a, rows_b)
    is_equal = both & same_type & same_digest
    outcomes = _list_plain_outcomes(is_equal.tolist(), finite_a, finite_b)
    suspects = np.flatnonzero(both & ~is_equal)
    usual, others = suspects[same_type[suspects]], suspects[~same_type[suspects]]
    judged = _judge_suspects(a, b, rows_a[usual], rows_b[usual], settings.tolerances)
    for at, (verdict, findings, differences) in zip(usual.tolist(), judged, strict=True):
        number: int = at
        finite = _FINITENESS[finite_a[number]], _FINITENESS[finite_b[number]]
        outcomes[at] = PairOutcome(verdict, findings, None, differences, NO_STATISTICS, *finite)
    for at, outcome in _judge_others(a, b, rows_a, rows_b, others, settings):
        outcomes[at] = outcome
    return outcomes


def _list_plain_outcomes(
    is_equal: list[bool], finite_a: list[int], finite_b: list[int]
) -> list[PairOutcome]:
    """Return the outcomes of equal pairs; all other pairs get the outcome of a tensor without a
    partner. Equal outcomes are one object.
    """
    numbers = range(len(_FINITENESS))
    known = {
        (equal, own, other): PairOutcome(
            TensorVerdict.SAME if equal else TensorVerdict.UNMATCHED,
            nonfinite_a=_FINITENESS[own],
            nonfinite_b=_FINITENESS[other],
        )
        for equal, own, other in product((True, False), numbers, numbers)
    }
    return [known[each] for each in zip(is_equal, finite_a, finite_b, strict=True)]


def _compare_facts(
    a: TreeColumns, b: TreeColumns, rows_a: _Numbers, rows_b: _Numbers
) -> tuple[_Flags, _Flags]:
    """Return which pairs have the same type and shape, and which pairs have an equal digest."""
    same_type = np.ones(len(rows_a), np.bool_)
    for name in ("dtype", "shape"):
        own, other = a.coded[name].codes[rows_a], _translate(a.coded[name], b.coded[name])[rows_b]
        same_type &= own == other
    same_type &= a.coded["dtype"].codes[rows_a] > 0
    digests = a.digests.codes[rows_a]
    same = (digests > 0) & (digests == _translate(a.digests, b.digests)[rows_b])
    known = a.has_fingerprint[rows_a] & b.has_fingerprint[rows_b]
    return same_type, same | known & (a.fingerprints[rows_a] == b.fingerprints[rows_b])


_Judged: TypeAlias = "tuple[TensorVerdict, tuple[str, ...], Mapping[str, float]]"


def _judge_suspects(
    a: _ColumnSide,
    b: _ColumnSide,
    rows_a: _Numbers,
    rows_b: _Numbers,
    tolerances: ElementTolerances,
) -> Iterator[_Judged]:
    """Yield the outcomes of pairs that have the same type and shape and are not known
    to be equal.
    """
    differences, verdicts = _compare_statistics(
        a.statistics, b.statistics, rows_a, rows_b, tolerances
    )
    has_print = a.columns.has_fingerprint[rows_a] & b.columns.has_fingerprint[rows_b]
    at = np.flatnonzero(has_print)
    shapes = a.columns.coded["shape"]
    counts = np.array([prod(shape) for shape in shapes.values], np.int64)[shapes.codes[rows_a[at]]]
    found = judge_sketches(
        a.columns.load_sketches(rows_a[at]),
        b.columns.load_sketches(rows_b[at]),
        counts,
        tolerances,
        np.zeros(len(at)),
    )
    verdicts[at] = found.decide(verdicts[at], has_other_digest=True)
    estimated = np.zeros(len(rows_a), np.bool_)
    estimated[at] = ~np.isnan(found.rmse)
    estimates = np.zeros((2, len(rows_a)))
    estimates[:, at] = found.rmse, found.relative
    columns = StatisticColumns(
        {
            **differences.values,
            **dict(zip((ESTIMATED_RMSE, ESTIMATED_ERROR), estimates, strict=True)),
        },
        {**differences.is_known, ESTIMATED_RMSE: estimated, ESTIMATED_ERROR: estimated},
    )
    told = np.where(estimated, 1, np.where(has_print, 2, 0))
    told[~has_print & (verdicts == VERDICTS.index(TensorVerdict.UNKNOWN))] = 3
    findings = (), (ESTIMATE_FINDING,), (OTHER_DIGESTS_FINDING,), (NOTHING_KNOWN_FINDING,)
    for row, (verdict, finding) in enumerate(zip(verdicts.tolist(), told.tolist(), strict=True)):
        yield VERDICTS[verdict], findings[finding], StatisticRow(columns, row)


def _compare_statistics(
    a: StatisticColumns,
    b: StatisticColumns,
    rows_a: _Numbers,
    rows_b: _Numbers,
    tolerances: ElementTolerances,
) -> tuple[StatisticColumns, _Numbers]:
    """Return the differences and the verdicts as `compare_statistics` computes them; verdicts are
    indexes into VERDICTS.
    """
    count = len(rows_a)
    found, known_of = dict[str, Any](), dict[str, Any]()
    is_known, is_equal, is_nan, is_close = (np.full(count, value) for value in (0, 1, 0, 1))
    for item in a.values.keys() & b.values.keys():
        left, right = a.values[item][rows_a], b.values[item][rows_b]
        known = a.is_known[item][rows_a] & b.is_known[item][rows_b]
        known &= ~(np.isnan(left) & np.isnan(right))
        with np.errstate(invalid="ignore"):
            difference = np.where(left == right, 0.0, np.abs(left - right))
            bound = tolerances.atol + tolerances.rtol * np.abs(right)
            is_close &= ~known | (difference <= bound)
        is_known |= known
        is_equal &= ~known | (left == right)
        is_nan |= known & (left != right) & ~(np.isfinite(left) & np.isfinite(right))
        found[item], known_of[item] = difference, known
    verdicts = np.select(
        [is_known == 0, is_equal > 0, is_nan > 0, is_close > 0],
        [
            VERDICTS.index(each)
            for each in (
                TensorVerdict.UNKNOWN,
                TensorVerdict.SAME,
                TensorVerdict.NAN,
                TensorVerdict.NORMAL,
            )
        ],
        VERDICTS.index(TensorVerdict.DIFFERENT),
    )
    return StatisticColumns(found, known_of), verdicts


def _judge_others(
    a: _ColumnSide,
    b: _ColumnSide,
    rows_a: _Numbers,
    rows_b: _Numbers,
    places: _Numbers,
    settings: ComparisonSettings,
) -> Iterator[tuple[int, PairOutcome]]:
    """Yield the outcomes of pairs with different types or shapes, one by one, because there are
    few.
    """
    sketches = [
        _load_known_sketches(side.columns, rows[places])
        for side, rows in ((a, rows_a), (b, rows_b))
    ]
    for number, at in enumerate(places.tolist()):
        own = a.build_measured_tensor(int(rows_a[at]), sketches[0][number])
        other = b.build_measured_tensor(int(rows_b[at]), sketches[1][number])
        outcome = decide_without_reading(TensorPair(own, other), settings)
        # None would mean that a file has to be read, and there are no files
        assert outcome is not None
        yield at, outcome


def _load_known_sketches(columns: TreeColumns, rows: _Numbers) -> npt.NDArray[np.float32]:
    found = np.zeros((len(rows), SKETCH_BUCKETS), np.float32)
    known = columns.has_fingerprint[rows]
    found[known] = columns.load_sketches(rows[known])
    return found
