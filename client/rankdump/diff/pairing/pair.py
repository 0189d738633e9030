"""Two programs to pairs of calls: the rules in turn, each on what the ones before it left.

Pure. A rule that goes by order looks only between calls that are paired already and stand in the
same order on both sides, so a call that is gone here and another that is new there do not meet
across the whole program. Every rule costs about as much as there are calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import get_args

from rankdump.contract.errors import ConfigError
from rankdump.contract.key import sanitised
from rankdump.diff.pairing.common import common
from rankdump.diff.pairing.kinds import Family, family, numbered, scope, shapes
from rankdump.diff.pairing.mapping import Mapped
from rankdump.diff.pairing.state import Pairing
from rankdump.diff.values import Call, PairedCalls, Program, Rule, Settings

RULES: tuple[Rule, ...] = tuple(rule for rule in get_args(Rule) if rule)
"""What `Settings.rules` may hold."""


def pair(a: Program, b: Program, settings: Settings) -> list[PairedCalls]:
    """Return the calls of two programs in pairs, in execution order of a.

    Each says the rule that paired it. Calls without a partner stand where they ran.
    """
    pairing = Pairing(a, b)
    for rule in settings.rules:
        _apply(rule, pairing, settings)
    return pairing.result()


def check_rules(rules: Iterable[str]) -> tuple[Rule, ...]:
    """Return rules that somebody named; ConfigError for one that there is not, or none."""
    known: dict[str, Rule] = {rule: rule for rule in RULES}
    found = tuple(rules)
    for rule in found:
        if rule not in known:
            raise ConfigError("match", "rule", rule, ", ".join(RULES))
    if not found:
        raise ConfigError("match", "", "", ", ".join(RULES))
    return tuple(known[rule] for rule in found)


def _apply(rule: Rule, pairing: Pairing, settings: Settings) -> None:
    if rule == "exact":
        _exact(pairing)
    elif rule == "mapping":
        _mapping(pairing, settings)
    elif rule == "type":
        _by_type(pairing)
    elif rule == "sequence":
        _by_sequence(pairing)


def _exact(pairing: Pairing) -> None:
    """Pair the same names, the nth call of a name with the nth.

    A name that counts the calls of an API says nothing when one side has a call more of it, so
    such names count only where both sides have the same ones of a family.
    """
    alike = _alike(pairing)

    def named(name: Callable[[Call], Hashable]) -> Callable[[Call], Hashable]:
        return lambda call: (
            None if numbered(call) and family(call) not in alike else (name(call), call.backward)
        )

    pairing.join_equal("exact", named(lambda call: (call.graph, call.op_name)))
    pairing.join_equal("exact", named(lambda call: call.op_name))
    pairing.join_equal("exact", named(lambda call: sanitised(call.op_name)))


def _alike(pairing: Pairing) -> set[Family]:
    """Return the families whose numbered calls have the same names on both sides."""
    names_a, names_b = _names(pairing.a), _names(pairing.b)
    return {kind for kind, names in names_a.items() if names_b.get(kind) == names}


def _names(program: Program) -> dict[Family, list[str]]:
    found: dict[Family, list[str]] = {}
    for call in program.calls:
        if numbered(call):
            found.setdefault(family(call), []).append(call.op_name)
    return {kind: sorted(names) for kind, names in found.items()}


def _mapping(pairing: Pairing, settings: Settings) -> None:
    """Pair the names that the user's file says are one."""
    mapped = Mapped(settings.mapping)
    waiting: dict[tuple[str, bool, bool], list[Call]] = {}
    for call in reversed(pairing.left_b):
        for name in mapped.names(call):
            waiting.setdefault((name, call.backward, call.recomputed), []).append(call)
    for call in pairing.left_a:
        for name in mapped.wanted(call):
            others = waiting.get((name, call.backward, call.recomputed), [])
            while others and others[-1].position in pairing.taken:
                others.pop()
            if others:
                pairing.join(call, others.pop(), "mapping")
                break


def _by_type(pairing: Pairing) -> None:
    """Pair calls of one family that both sides made equally often, in their order."""
    keys: Sequence[Callable[[Call], Hashable]] = (
        lambda call: (family(call), scope(call.op_name), shapes(call)),
        lambda call: (family(call), scope(call.op_name)),
        lambda call: (family(call), shapes(call)),
        family,
    )
    for key in keys:
        for left_a, left_b in list(pairing.segments()):
            _in_order(pairing, left_a, left_b, key)


def _in_order(
    pairing: Pairing, left_a: list[Call], left_b: list[Call], key: Callable[[Call], Hashable]
) -> None:
    keys_a, keys_b = [key(call) for call in left_a], [key(call) for call in left_b]
    often_a, often_b = Counter(keys_a), Counter(keys_b)
    waiting: dict[Hashable, list[Call]] = {}
    for call, own in zip(reversed(left_b), reversed(keys_b), strict=True):
        waiting.setdefault(own, []).append(call)
    for call, own in zip(left_a, keys_a, strict=True):
        if often_a[own] == often_b[own]:
            pairing.join(call, waiting[own].pop(), "type")


def _by_sequence(pairing: Pairing) -> None:
    """Pair what stands in a longest common subsequence: with shapes first, then without."""
    keys: Sequence[Callable[[Call], Hashable]] = (
        lambda call: (family(call), scope(call.op_name), shapes(call)),
        lambda call: (family(call), shapes(call)),
        family,
    )
    for key in keys:
        for left_a, left_b in list(pairing.segments()):
            tokens = [key(call) for call in left_a], [key(call) for call in left_b]
            for at_a, at_b in common(*tokens):
                pairing.join(left_a[at_a], left_b[at_b], "sequence")
