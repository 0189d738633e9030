"""Pairs of calls of two programs. Each rule pairs calls that the earlier rules have left unpaired.
Pure.

A rule that depends on the order works only between calls that are already paired and have the same
order on both sides. So it never pairs a call that one side lacks with a new call far away on the
other side. The cost of a rule is about linear in the number of calls.

The longest common subsequence is exact and needs little memory. One row of the classic table is one
integer with a bit for each element of the other list (H. Hyyro, "Bit-parallel LCS-length
computation revisited", 2004), so 64 cells cost one operation of the processor. The list is halved
recursively (D. Hirschberg, 1975), so two rows are kept in place of all rows. Two programs of 20,000
calls in any order take some tenths of a second.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from rankdump._analysis.compare.call_names import (
    OperatorFamily,
    get_operator_family,
    is_numbered_call,
    list_call_shapes,
    list_call_spellings,
    list_partner_names,
    parse_module_path,
    strip_sharded_classes,
)
from rankdump._analysis.compare.report import (
    CallPair,
    ComparisonSettings,
    DumpedCall,
    DumpedProgram,
    PairingRule,
)
from rankdump._core.record import sanitize_name
from rankdump.errors import ConfigError

UnpairedSegment: TypeAlias = "tuple[list[DumpedCall], list[DumpedCall]]"

_MAX_TABLE_CELLS = 1 << 22
"""Number of cells up to which a table, of half a megabyte then, is kept as a whole."""
PAIRING_RULES: tuple[PairingRule, ...] = tuple(rule for rule in get_args(PairingRule) if rule)
"""Allowed values in `ComparisonSettings.rules`."""


@dataclass(slots=True)
class PairingState:
    """Pairs of calls found so far."""

    a: DumpedProgram
    b: DumpedProgram
    partners_of_a: dict[int, tuple[int, PairingRule]] = field(
        default_factory=dict[int, "tuple[int, PairingRule]"]
    )
    """Position in b and the rule of each paired call, by its position in a."""
    paired_b: set[int] = field(default_factory=set[int])
    """Positions in b that have a partner."""

    def add_pair(self, a: DumpedCall, b: DumpedCall, rule: PairingRule) -> None:
        """Pair a call of a with a call of b by a rule."""
        self.partners_of_a[a.position] = b.position, rule
        self.paired_b.add(b.position)

    @property
    def unpaired_a(self) -> list[DumpedCall]:
        """Calls of a without a partner."""
        return [call for call in self.a.calls if call.position not in self.partners_of_a]

    @property
    def unpaired_b(self) -> list[DumpedCall]:
        """Calls of b without a partner."""
        return [call for call in self.b.calls if call.position not in self.paired_b]

    def pair_equal_names(self, key: Callable[[DumpedCall], Hashable]) -> None:
        """Pair unpaired calls with the same key, in order; calls whose key is None are skipped."""
        waiting = _group_calls(self.unpaired_b, key)
        for call in self.unpaired_a:
            own = key(call)
            others = waiting.get(own)
            if own is not None and others:
                self.add_pair(call, others.pop(), "exact")

    def segments(self) -> Iterator[UnpairedSegment]:
        """Yield the unpaired calls between paired calls that have the same order on both sides."""
        left_a, left_b = self.unpaired_a, self.unpaired_b
        if not (left_a and left_b):
            return
        anchors = [*_find_longest_rise(sorted((a, b) for a, (b, _) in self.partners_of_a.items()))]
        edges = [*anchors, (len(self.a.calls), len(self.b.calls))]
        at_a = at_b = 0
        for edge_a, edge_b in edges:
            next_a = _find_edge(left_a, at_a, edge_a)
            next_b = _find_edge(left_b, at_b, edge_b)
            if next_a > at_a and next_b > at_b:
                yield left_a[at_a:next_a], left_b[at_b:next_b]
            at_a, at_b = next_a, next_b

    def list_call_pairs(self) -> list[CallPair]:
        """Return all calls in the execution order of a; an unpaired call of b comes after its
        predecessor.
        """
        place = {b: a for a, (b, _) in self.partners_of_a.items()}
        alone: defaultdict[int, list[CallPair]] = defaultdict(list)
        behind = -1
        for call in self.b.calls:
            if call.position in place:
                behind = place[call.position]
            else:
                alone[behind].append(CallPair(None, call))
        lines = alone[-1]
        for call in self.a.calls:
            other, rule = self.partners_of_a.get(call.position, (None, ""))
            b = self.b.calls[other] if other is not None else None
            lines.append(CallPair(call, b, rule))
            if call.position in alone:
                lines += alone[call.position]
        return lines


def _group_calls(
    calls: Iterable[DumpedCall], key: Callable[[DumpedCall], Hashable]
) -> defaultdict[Hashable, list[DumpedCall]]:
    """Return the calls with each key, in reverse order."""
    found: defaultdict[Hashable, list[DumpedCall]] = defaultdict(list)
    for call in calls:
        found[key(call)].append(call)
    for group in found.values():
        group.reverse()
    return found


def _find_edge(calls: Sequence[DumpedCall], at: int, edge: int) -> int:
    return bisect_left(calls, edge, lo=at, key=lambda call: call.position)


def _find_longest_rise(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return pairs whose second numbers are a longest increasing subsequence."""
    ends: list[int] = []
    last: list[int] = []
    before: list[int] = []
    for at, (_, b) in enumerate(pairs):
        length = bisect_left(ends, b)
        before.append(last[length - 1] if length else -1)
        ends[length : length + 1] = [b]
        last[length : length + 1] = [at]
    found: list[tuple[int, int]] = []
    at = last[-1] if last else -1
    while at >= 0:
        found.append(pairs[at])
        at = before[at]
    return found[::-1]


def find_common_subsequence(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Return the positions of a longest common subsequence, ascending in both lists."""
    numbers: dict[Hashable, int] = {}
    first = [numbers.setdefault(token, len(numbers)) for token in a]
    second = [numbers.setdefault(token, len(numbers)) for token in b]
    return list(_yield_common_pairs(first, second, 0, 0))


def _yield_common_pairs(
    a: list[int], b: list[int], at_a: int, at_b: int
) -> Iterator[tuple[int, int]]:
    """Yield the pairs of two parts of the lists, which begin at the positions `at_a` and `at_b`."""
    head = _count_common_prefix(a, b)
    tail = _count_common_prefix(a[head:][::-1], b[head:][::-1])
    inner_a, inner_b = a[head : len(a) - tail], b[head : len(b) - tail]
    yield from ((at_a + at, at_b + at) for at in range(head))
    if inner_a and inner_b:
        yield from _yield_inner_pairs(inner_a, inner_b, at_a + head, at_b + head)
    end_a, end_b = at_a + len(a) - tail, at_b + len(b) - tail
    yield from ((end_a + at, end_b + at) for at in range(tail))


def _count_common_prefix(a: list[int], b: list[int]) -> int:
    """Return the length of the common prefix."""
    for at, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return at
    return min(len(a), len(b))


def _yield_inner_pairs(
    a: list[int], b: list[int], at_a: int, at_b: int
) -> Iterator[tuple[int, int]]:
    if len(a) == 1 or len(a) * len(b) <= _MAX_TABLE_CELLS:
        yield from ((at_a + i, at_b + j) for i, j in _trace_whole_table(a, b))
        return
    middle = len(a) // 2
    before = _compute_lengths(a[:middle], b)
    behind = _compute_lengths(a[middle:][::-1], b[::-1])[::-1]
    cut = int(np.argmax(before + behind))
    yield from _yield_common_pairs(a[:middle], b[:cut], at_a, at_b)
    yield from _yield_common_pairs(a[middle:], b[cut:], at_a + middle, at_b + cut)


def _yield_table_rows(a: list[int], b: list[int]) -> Iterator[int]:
    """Yield the rows of the table; in each, a bit that is 0 marks a position where the length
    increases.
    """
    places: dict[int, int] = {}
    for at, token in enumerate(b):
        places[token] = places.get(token, 0) | 1 << at
    mask = (1 << len(b)) - 1
    row = mask
    for token in a:
        hits = row & places.get(token, 0)
        row = ((row + hits) | (row - hits)) & mask
        yield row


def _compute_lengths(a: list[int], b: list[int]) -> npt.NDArray[np.int64]:
    """Return the length of the longest common subsequence of a and each prefix of b."""
    row = deque(_yield_table_rows(a, b), maxlen=1).pop()
    packed = np.frombuffer(row.to_bytes(len(b) // 8 + 1, "little"), np.uint8)
    flat = np.unpackbits(packed, count=len(b), bitorder="little")
    return np.concatenate(([0], np.cumsum(1 - flat.astype(np.int64))))


def _trace_whole_table(a: list[int], b: list[int]) -> list[tuple[int, int]]:
    """Return the pairs of two lists, found by tracing their whole table from its end."""
    rows = list(_yield_table_rows(a, b))
    found: list[tuple[int, int]] = []
    i, j = len(a), len(b)
    while i and j:
        if rows[i - 1] >> (j - 1) & 1:
            j -= 1
            continue
        i -= 1
        if i == 0 or rows[i - 1] >> (j - 1) & 1:
            j -= 1
            found.append((i, j))
    return found[::-1]


def pair_calls(a: DumpedProgram, b: DumpedProgram, settings: ComparisonSettings) -> list[CallPair]:
    """Return the paired calls of two programs with the rules, in the execution order of a.

    Calls without a partner are listed at the position where they ran.
    """
    pairing = PairingState(a, b)
    for rule in settings.rules:
        if rule == "exact":
            _pair_same_names(pairing)
        elif rule == "mapping":
            _pair_mapped_names(pairing, settings)
        elif rule == "type":
            _pair_by_type(pairing)
        elif rule == "sequence":
            _pair_by_sequence(pairing)
    return pairing.list_call_pairs()


def check_pairing_rules(rules: Iterable[str]) -> tuple[PairingRule, ...]:
    """Return the rules with these names; ConfigError for an unknown rule or an empty list."""
    known: dict[str, PairingRule] = {rule: rule for rule in PAIRING_RULES}
    found = tuple(rules)
    for rule in found:
        if rule not in known:
            raise ConfigError("match", "rule", rule, ", ".join(PAIRING_RULES))
    if not found:
        raise ConfigError("match", "", "", ", ".join(PAIRING_RULES))
    return tuple(known[rule] for rule in found)


def _pair_same_names(pairing: PairingState) -> None:
    """Pair calls with the same name, the nth call with the nth.

    For calls that have no partner otherwise, the class prefixes that sharding added are ignored.
    Names with a running number of an API's calls are shifted when one side has an extra call, so
    they are used only for families that have the same names on both sides.
    """
    names_a, names_b = _list_numbered_names(pairing.a), _list_numbered_names(pairing.b)
    alike = {kind for kind, names in names_a.items() if names_b.get(kind) == names}

    def named(name: Callable[[DumpedCall], Hashable]) -> Callable[[DumpedCall], Hashable]:
        return lambda call: (
            None
            if is_numbered_call(call) and get_operator_family(call) not in alike
            else (name(call), call.backward)
        )

    pairing.pair_equal_names(named(lambda call: (call.graph, call.op_name)))
    pairing.pair_equal_names(named(lambda call: call.op_name))
    pairing.pair_equal_names(named(lambda call: sanitize_name(call.op_name)))
    pairing.pair_equal_names(named(lambda call: strip_sharded_classes(sanitize_name(call.op_name))))


def _list_numbered_names(program: DumpedProgram) -> dict[OperatorFamily, list[str]]:
    """Return the names of numbered calls by family, sorted."""
    found: dict[OperatorFamily, list[str]] = {}
    for call in program.calls:
        if is_numbered_call(call):
            found.setdefault(get_operator_family(call), []).append(call.op_name)
    return {kind: sorted(names) for kind, names in found.items()}


def _pair_mapped_names(pairing: PairingState, settings: ComparisonSettings) -> None:
    """Pair calls whose names the user's mapping makes equal."""
    waiting: dict[tuple[str, bool, bool], list[DumpedCall]] = {}
    for call in reversed(pairing.unpaired_b):
        for name in list_call_spellings(call):
            waiting.setdefault((name, call.backward, call.recomputed), []).append(call)
    for call in pairing.unpaired_a:
        for name in list_partner_names(call, settings.mapping):
            others = waiting.get((name, call.backward, call.recomputed), [])
            while others and others[-1].position in pairing.paired_b:
                others.pop()
            if others:
                pairing.add_pair(call, others.pop(), "mapping")
                break


def _make_path_and_shapes_key(call: DumpedCall) -> Hashable:
    return _make_path_key(call), list_call_shapes(call)


def _make_path_key(call: DumpedCall) -> Hashable:
    return get_operator_family(call), parse_module_path(call.op_name)


def _make_shapes_key(call: DumpedCall) -> Hashable:
    return get_operator_family(call), list_call_shapes(call)


def _pair_by_type(pairing: PairingState) -> None:
    """Pair calls of a family in order, if both sides made equally many of them."""
    keys = (_make_path_and_shapes_key, _make_path_key, _make_shapes_key, get_operator_family)
    for key in keys:
        for left_a, left_b in list(pairing.segments()):
            waiting_a, waiting_b = _group_calls(left_a, key), _group_calls(left_b, key)
            for own, calls in waiting_a.items():
                others = waiting_b.get(own, ())
                if len(calls) == len(others):
                    for call, other in zip(calls, others, strict=True):
                        pairing.add_pair(call, other, "type")


def _pair_by_sequence(pairing: PairingState) -> None:
    """Pair the calls of a longest common subsequence: first by type and shapes, then by
    type alone.
    """
    for key in (_make_path_and_shapes_key, _make_shapes_key, get_operator_family):
        for left_a, left_b in list(pairing.segments()):
            tokens = [key(call) for call in left_a], [key(call) for call in left_b]
            for at_a, at_b in find_common_subsequence(*tokens):
                pairing.add_pair(left_a[at_a], left_b[at_b], "sequence")
