"""Findings from run cards: what differs between two dumps before the first operator, and what
differs between ranks of one dump that should agree. Pure.

Digests of parameters are merged over the ranks first: parts without common elements add up, and
copies of the same part must be equal. So a model on one rank compares with a sharded model.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from rankdump._analysis.reader.run_cards import FoundCards, RankCard
from rankdump._core.number_ranges import ranges
from rankdump._core.record import sanitize_line
from rankdump._core.run_card import (
    BATCH_PREFIX,
    LEARNING_RATE_PREFIX,
    LOCAL_VARIABLES,
    RANDOM_PREFIX,
    ModelSummary,
    ParameterDigest,
    RunCard,
    parse_parameter,
)
from rankdump._core.units import format_count

CardSubject = Literal[
    "ranks",
    "files",
    "microbatches",
    "batch",
    "parameters",
    "random",
    "learning_rate",
    "models",
    "versions",
    "settings",
    "environment",
    "revision",
    "command",
    "cards",
]
_Place: TypeAlias = "tuple[int, int]"
"""Rank and iteration of a run card."""
_DIGEST_RANGE = 1 << 64
_MAX_NAMES = 3
_MAX_ARGUMENTS = 4
_MAX_TEXT = 1000
_WORLD_SIZES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
_SEEDLESS_STATES = ("random.python", "random.numpy")
"""Generator states that differ by chance if the script neither seeds nor uses the generators."""
_ABSENT = "none"


@dataclass(frozen=True, slots=True)
class CardFinding:
    """A difference, or a remark about something that could not be compared."""

    subject: CardSubject
    text: str
    """The finding as one clause, such as `the batches differ from iteration 0 on`."""
    is_difference: bool = True
    """Whether the finding is a difference; if not, it is a remark."""
    names: tuple[str, ...] = ()
    """Names of everything that differs: parameters, tensors of the batch, modules or variables."""
    ranks: tuple[int, ...] = ()
    """Ranks that have the finding; empty if it is about whole dumps."""
    iteration: int | None = None
    """First iteration that has the finding; None for a fact that is the same in all iterations."""


class CardPair(NamedTuple):
    """Run cards of both sides that are compared with each other."""

    a: RankCard
    b: RankCard


def compare_cards(
    a: FoundCards,
    b: FoundCards,
    places: Iterable[tuple[_Place, _Place]],
    *,
    is_joined: bool = False,
) -> tuple[CardFinding, ...]:
    """Return what differs between the run cards of two dumps: first the causes of steps, by the
    first iteration in which they differ, then facts about processes, then remarks.

    `places` pairs rank and iteration of a with those of b. Parameters are merged over all ranks of
    an iteration, even if `places` lacks some of them. If ranks are joined, weights that first
    differ after a step are only a remark, because their digests differ as soon as one step is
    rounded differently.
    """
    remarks = [*_list_problems("a", a), *_list_problems("b", b)]
    without = [name for name, side in (("a", a), ("b", b)) if not side.cards]
    if without:
        which = "neither dump has any" if len(without) == 2 else f"{without[0]} has none"
        return _make_printable((*remarks, _remark(f"run cards were not compared: {which}")))
    cards_a = {(each.rank, each.iteration): each for each in a.cards}
    cards_b = {(each.rank, each.iteration): each for each in b.cards}
    pairs = [
        CardPair(cards_a[own], cards_b[other])
        for own, other in places
        if own in cards_a and other in cards_b
    ]
    if not pairs:
        text = "run cards were not compared: no rank and iteration has one in both dumps"
        return _make_printable((*remarks, _remark(text)))
    pairs.sort(key=lambda pair: (pair.a.iteration, pair.a.rank))
    iterations = dict.fromkeys((pair.a.iteration, pair.b.iteration) for pair in pairs)
    found = (
        *_compare_batches(pairs, a, b),
        *_compare_parameters(a, b, [*iterations], is_joined=is_joined),
        *_compare_random(pairs),
        *_compare_rates(pairs),
        *_compare_facts(pairs, a, b),
    )
    differences = [each for each in found if each.is_difference]
    # A later difference may follow from an earlier one; the stable sort keeps the order of equal
    # iterations.
    differences.sort(key=lambda each: math.inf if each.iteration is None else each.iteration)
    others = (each for each in found if not each.is_difference)
    return _make_printable((*differences, *others, *remarks))


def compare_ranks(found: FoundCards, others: FoundCards | None = None) -> tuple[CardFinding, ...]:
    """Return what differs between the ranks of one dump although it should agree.

    `others` contains the run cards of the whole tree, for the case that `found` has none.
    """
    problems = _list_problems("the tree", found)
    if not found.cards:
        return _make_printable((*problems, _explain_no_cards(others.cards if others else ())))
    findings = [*_compare_replicas(found.cards), *_compare_rank_rates(found.cards)]
    first: dict[int, RankCard] = {}
    for each in found.cards:
        first.setdefault(each.rank, each)
    cards = [*first.values()]
    for subject, list_values in _FACTS:
        # Models of pipeline stages differ, and their seeds may differ.
        if subject != "models":
            findings += _compare_rank_facts(subject, list_values, cards)
    findings += _describe_equal_batches(found.cards)
    return _make_printable((*findings, *problems))


def _explain_no_cards(others: Sequence[RankCard]) -> CardFinding:
    if not others:
        why = "an earlier release or another program wrote it, or its plan has card: false"
        return _remark(f"the tree has no run cards: {why}")
    ranks = ranges(each.rank for each in others)
    iterations = ranges(each.iteration for each in others)
    there = f"rank {ranks}, iteration {iterations}"
    return _remark(f"no run card matches; the tree has those of {there}")


# -- causes of a step


def _compare_batches(
    pairs: Sequence[CardPair], a: FoundCards, b: FoundCards
) -> Iterator[CardFinding]:
    count_a, count_b = (len({each.rank for each in side.cards}) for side in (a, b))
    if count_a == count_b:
        yield from _compare_digests(pairs, "batch", BATCH_PREFIX, "the batches differ")
        return
    names = (name for pair in pairs for each in pair for name in each.card.digests)
    if any(name.startswith(BATCH_PREFIX) for name in names):
        text = f"batches were not compared: a has {format_count(count_a, 'rank')}, b has {count_b}"
        yield CardFinding("batch", text, is_difference=False)


def _compare_random(pairs: Sequence[CardPair]) -> Iterator[CardFinding]:
    unused = {name for name in _SEEDLESS_STATES if not _is_advanced(pairs, name)}
    yield from _compare_digests(
        pairs, "random", RANDOM_PREFIX, "the states of random generators differ", unused
    )


def _is_advanced(pairs: Sequence[CardPair], name: str) -> bool:
    """Return whether a generator was used between iterations, on any rank of either side."""
    states: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    for pair in pairs:
        for side, each in (("a", pair.a), ("b", pair.b)):
            # The card of an iteration in which no model is called has no digests of generators.
            if name in each.card.digests:
                states[side, each.rank].add(each.card.digests[name])
    return any(len(each) > 1 for each in states.values())


def _compare_digests(
    pairs: Sequence[CardPair],
    subject: CardSubject,
    prefix: str,
    text: str,
    left_out: AbstractSet[str] = frozenset(),
) -> Iterator[CardFinding]:
    """Yield at most one finding about the digests whose names have this prefix and that both sides
    have.
    """
    compared: set[int] = set()
    differing: dict[int, set[str]] = {}
    ranks: set[int] = set()
    for pair in pairs:
        own, other = pair.a.card.digests, pair.b.card.digests
        both = (own.keys() & other.keys()) - left_out
        names = {name for name in both if name.startswith(prefix)}
        if names:
            compared.add(pair.a.iteration)
        unequal = {name for name in names if own[name] != other[name]}
        if unequal:
            differing.setdefault(pair.a.iteration, set()).update(unequal)
            ranks.add(pair.a.rank)
    if differing:
        names = sorted(set[str]().union(*differing.values()))
        where = f"{_describe_iterations(differing, compared)}: {_list_names(names)}"
        yield CardFinding(
            subject,
            f"{text} {where} (rank {ranges(ranks)})",
            names=tuple(names),
            ranks=tuple(sorted(ranks)),
            iteration=min(differing),
        )


def _compare_rates(pairs: Sequence[CardPair]) -> Iterator[CardFinding]:
    """Yield a finding for each learning rate that differs."""
    numbers = [(pair.a, pair.a.card.numbers, pair.b.card.numbers) for pair in pairs]
    names = {name for _, own, other in numbers for name in own.keys() & other.keys()}
    for name in sorted(name for name in names if name.startswith(LEARNING_RATE_PREFIX)):
        both = [
            (place, own[name], other[name])
            for place, own, other in numbers
            if name in own and name in other
        ]
        unequal = [(place, own, other) for place, own, other in both if own != other]
        if not unequal:
            continue
        first, own, other = unequal[0]
        ranks = sorted({place.rank for place, *_ in unequal})
        differing, compared = ([place.iteration for place, *_ in some] for some in (unequal, both))
        where = _describe_iterations(differing, compared)
        values = f"{_describe_parameter_group(name)} {own} against {other}"
        yield CardFinding(
            "learning_rate",
            f"the learning rates differ {where}: {values} (rank {ranges(ranks)})",
            names=(name,),
            ranks=tuple(ranks),
            iteration=first.iteration,
        )


def _describe_parameter_group(name: str) -> str:
    """Return which group of which optimizer a learning rate is of.

    >>> _describe_parameter_group("learning_rate.0"), _describe_parameter_group("learning_rate.1.0")
    ('group 0', 'group 0 of optimizer 1')
    """
    optimizer, _, group = name.removeprefix(LEARNING_RATE_PREFIX).rpartition(".")
    return f"group {group} of optimizer {optimizer}" if optimizer else f"group {group}"


# -- parameters


class MergedParameters(NamedTuple):
    """Digests of the parameters in one iteration, merged over all ranks."""

    whole: Mapping[str, ParameterDigest]
    """Digests of the parameters whose parts cover everything that is digested."""
    incomplete: tuple[str, ...]
    unequal: Mapping[str, tuple[int, ...]]
    """Ranks that have the same part of a parameter with different values, by parameter."""


def merge_parameters(cards: Iterable[RankCard]) -> MergedParameters:
    """Return the digests of logical parameters from the run cards of one iteration."""
    parts: defaultdict[str, list[tuple[int, ParameterDigest]]] = defaultdict(list)
    for each in cards:
        for name, text in each.card.parameters.items():
            parts[name].append((each.rank, parse_parameter(text)))
    whole: dict[str, ParameterDigest] = {}
    incomplete: list[str] = []
    unequal: dict[str, tuple[int, ...]] = {}
    for name, own in parts.items():
        distinct = {(found.dtype, found.part): found.digest for _, found in reversed(own)}
        apart = [rank for rank, f in own if distinct[f.dtype, f.part] != f.digest]
        if apart:
            unequal[name] = tuple(sorted({own[0][0], *apart}))
        dtypes = {dtype for dtype, _ in distinct}
        if len(dtypes) == 1 and _covers_all([part for _, part in distinct]):
            digest = sum(distinct.values()) % _DIGEST_RANGE
            whole[name] = ParameterDigest(dtypes.pop(), digest)
        else:
            incomplete.append(name)
    return MergedParameters(whole, tuple(incomplete), unequal)


def _covers_all(parts: Sequence[str]) -> bool:
    """Return whether the parts contain every element exactly once; a part that cannot be read
    contains none.
    """
    if parts == [""]:
        return True
    try:
        boxes = [_read_box(part) for part in parts]
    except ValueError:
        return False
    extents = {tuple(end for _, _, end in box) for box in boxes}
    held = sum(math.prod(stop - start for start, stop, _ in box) for box in boxes)
    return len(extents) == 1 and held == math.prod(extents.pop())


def _read_box(part: str) -> list[tuple[int, int, int]]:
    box: list[tuple[int, int, int]] = []
    for text in part.split(","):
        bounds, _, extent = text.partition("/")
        start, _, stop = bounds.partition(":")
        box.append((int(start), int(stop), int(extent)))
    return box


def _compare_parameters(
    a: FoundCards, b: FoundCards, iterations: Sequence[tuple[int, int]], *, is_joined: bool
) -> Iterator[CardFinding]:
    """Yield findings about the first iteration in which parameters or their types differ."""
    first, _ = min(iterations)
    not_compared: set[str] = set()
    for at, other in sorted(iterations):
        own, its = _merge_iteration(a, at), _merge_iteration(b, other)
        there = (own.whole.keys() | {*own.incomplete}) & (its.whole.keys() | {*its.incomplete})
        not_compared |= there & {*own.incomplete, *its.incomplete}
        whole = [
            (name, each, its.whole[name]) for name, each in own.whole.items() if name in its.whole
        ]
        types = [name for name, x, y in whole if x.dtype != y.dtype]
        unequal = [name for name, x, y in whole if x.dtype == y.dtype and x.digest != y.digest]
        if types:
            one = f"{own.whole[types[0]].dtype} against {its.whole[types[0]].dtype}"
            detail = f"{one}, {_list_names(types)}"
            yield _make_parameter_finding(
                "types of the weights differ", types, len(whole), at, detail
            )
        if unequal:
            found = _make_parameter_finding(
                "weights differ", unequal, len(whole) - len(types), at, _list_names(unequal)
            )
            yield replace(found, is_difference=at == first or not is_joined)
        if types or unequal:
            break
    if not_compared:
        count = format_count(len(not_compared), "parameter")
        text = f"{count} not compared: the cards do not have all parts of them"
        yield CardFinding("parameters", text, False, tuple(sorted(not_compared)))


def _merge_iteration(side: FoundCards, iteration: int) -> MergedParameters:
    return merge_parameters(each for each in side.cards if each.iteration == iteration)


def _make_parameter_finding(
    what: str,
    names: Sequence[str],
    compared: int,
    iteration: int,
    detail: str,
    ranks: Sequence[int] = (),
) -> CardFinding:
    count = f"{len(names):,} of {format_count(compared, 'parameter')}"
    text = f"the {what} before iteration {iteration}: {count} ({detail})"
    return CardFinding("parameters", text, True, tuple(names), tuple(ranks), iteration)


def _group_iterations(cards: Sequence[RankCard]) -> list[tuple[int, list[RankCard]]]:
    """Return the run cards of each iteration, the earliest iteration first."""
    found: defaultdict[int, list[RankCard]] = defaultdict(list)
    for each in cards:
        found[each.iteration].append(each)
    return sorted(found.items())


def _compare_replicas(cards: Sequence[RankCard]) -> Iterator[CardFinding]:
    for iteration, own in _group_iterations(cards):
        merged = merge_parameters(own)
        if merged.unequal:
            names, ranks = [*merged.unequal], sorted(set[int]().union(*merged.unequal.values()))
            total = len({name for each in own for name in each.card.parameters})
            detail = f"{_list_names(names)}; rank {ranges(ranks)}"
            yield _make_parameter_finding(
                "weights differ between ranks", names, total, iteration, detail, ranks
            )
            return


# -- facts about processes


def _list_variables(card: RunCard) -> dict[str, str]:
    return {name: text for name, text in card.environment.items() if name not in LOCAL_VARIABLES}


def _list_revision(card: RunCard) -> dict[str, str]:
    return {"git revision": card.revision[:12]} if card.revision else {}


def _list_models(card: RunCard) -> dict[str, str]:
    return {f"model {number}": _describe_model(each) for number, each in enumerate(card.models)}


def _describe_model(model: ModelSummary) -> str:
    dtypes = ", ".join(f"{count:,} {dtype}" for dtype, count in model.dtypes.items())
    counts = f"{format_count(model.parameters, 'parameter')}, {model.elements:,} elements"
    return f"{model.name} with {counts}, {dtypes}, names and shapes {model.digest}"


_FactLister: TypeAlias = "Callable[[RunCard], Mapping[str, str]]"
_FACTS: Sequence[tuple[CardSubject, _FactLister]] = (
    ("models", _list_models),
    ("versions", lambda card: card.versions),
    ("settings", lambda card: card.settings),
    ("environment", _list_variables),
    ("revision", _list_revision),
)


def _compare_facts(
    pairs: Sequence[CardPair], a: FoundCards, b: FoundCards
) -> Iterator[CardFinding]:
    """Yield findings about facts, from the first run card of each rank."""
    first: dict[int, CardPair] = {}
    for pair in pairs:
        first.setdefault(pair.a.rank, pair)
    for subject, list_values in _FACTS:
        ranks: defaultdict[tuple[str, str, str], list[int]] = defaultdict(list)
        for rank, pair in first.items():
            own, other = list_values(pair.a.card), list_values(pair.b.card)
            for name in sorted(own.keys() | other.keys()):
                own_value, its_value = own.get(name, _ABSENT), other.get(name, _ABSENT)
                if own_value != its_value:
                    ranks[name, own_value, its_value].append(rank)
        for (name, own_value, its_value), of_ranks in ranks.items():
            some = f" (rank {ranges(of_ranks)})" if len(of_ranks) < len(first) else ""
            text = f"{name} {own_value} against {its_value}{some}"
            yield CardFinding(
                subject,
                text,
                not _follows_from_layout(subject, name, (a, b)),
                names=(name,),
                ranks=tuple(of_ranks),
            )
    yield from _compare_commands(first)


def _follows_from_layout(subject: CardSubject, name: str, sides: Sequence[FoundCards]) -> bool:
    """Return whether a fact differs only because ranks share the job in another way. The number of
    ranks does, and so do models if they are stages of a pipeline.
    """
    if subject == "models":
        return any(len({str(_list_models(each.card)) for each in side.cards}) > 1 for side in sides)
    return name in _WORLD_SIZES


def _compare_commands(first: Mapping[int, CardPair]) -> Iterator[CardFinding]:
    for rank, pair in first.items():
        own, other = pair.a.card.command, pair.b.card.command
        if own != other:
            only_a, only_b = _list_rest(own, other), _list_rest(other, own)
            sides = [
                f"only in {side} {text}" for side, text in (("a", only_a), ("b", only_b)) if text
            ]
            order = "; ".join(sides) or "the same arguments in another order"
            yield CardFinding("command", f"the command lines differ: {order}", ranks=(rank,))
            return


def _list_rest(own: Sequence[str], other: Sequence[str]) -> str:
    left = [text for text in own if text not in other]
    more = f" and {len(left) - _MAX_ARGUMENTS} more" if len(left) > _MAX_ARGUMENTS else ""
    return " ".join(left[:_MAX_ARGUMENTS]) + more


def _compare_rank_facts(
    subject: CardSubject, list_values: _FactLister, cards: Sequence[RankCard]
) -> Iterator[CardFinding]:
    values = {each.rank: list_values(each.card) for each in cards}
    for name in sorted(set[str]().union(*values.values())):
        ranks: defaultdict[str, list[int]] = defaultdict(list)
        for rank, own in values.items():
            ranks[own.get(name, _ABSENT)].append(rank)
        if len(ranks) > 1:
            listed = [f"{value} on rank {ranges(of)}" for value, of in ranks.items()]
            text = f"{name} differs between ranks: {_list_names(listed)}"
            yield CardFinding(subject, text, names=(name,), ranks=tuple(sorted(values)))


def _compare_rank_rates(cards: Sequence[RankCard]) -> Iterator[CardFinding]:
    values: defaultdict[tuple[int, str], dict[int, str]] = defaultdict(dict)
    for each in cards:
        for name, value in each.card.numbers.items():
            if name.startswith(LEARNING_RATE_PREFIX):
                values[each.iteration, name][each.rank] = value
    for (iteration, name), by_rank in sorted(values.items()):
        if len(set(by_rank.values())) > 1:
            listed = _list_names([f"{value} on rank {rank}" for rank, value in by_rank.items()])
            text = f"the learning rates differ between ranks in iteration {iteration}: {listed}"
            ranks = tuple(sorted(by_rank))
            yield CardFinding(
                "learning_rate", text, names=(name,), ranks=ranks, iteration=iteration
            )
            return


def _describe_equal_batches(cards: Sequence[RankCard]) -> Iterator[CardFinding]:
    """Yield a remark if several ranks have the same batch, which is right for ranks that share a
    model and wrong for ranks that share the data.
    """
    alike: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for iteration, own in _group_iterations(cards):
        ranks: defaultdict[tuple[tuple[str, str], ...], list[int]] = defaultdict(list)
        for each in own:
            batch = [item for item in each.card.digests.items() if item[0].startswith(BATCH_PREFIX)]
            if batch:
                ranks[tuple(sorted(batch))].append(each.rank)
        for same in ranks.values():
            if len(same) > 1:
                alike[tuple(same)].append(iteration)
    for same, iterations in alike.items():
        text = (
            f"rank {ranges(same)} have the same batch in iteration {ranges(iterations)}: "
            "right for tensor or pipeline parallelism, wrong for data parallelism"
        )
        yield CardFinding("batch", text, is_difference=False, ranks=same, iteration=iterations[0])


# -- words


def _make_printable(findings: Iterable[CardFinding]) -> tuple[CardFinding, ...]:
    """Return findings with one-line texts, because names and values in a run card may
    be any text.
    """
    texts = [(each, sanitize_line(each.text)) for each in findings]
    return tuple(
        replace(each, text=text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}...")
        for each, text in texts
    )


def _remark(text: str) -> CardFinding:
    return CardFinding("cards", text, is_difference=False)


def _describe_iterations(differing: Iterable[int], compared: Iterable[int]) -> str:
    found, every = sorted(set(differing)), sorted(set(compared))
    if found == [each for each in every if each >= found[0]]:
        return f"from iteration {found[0]} on"
    return f"in iteration {ranges(found)}"


def _list_problems(side: str, found: FoundCards) -> list[CardFinding]:
    return [_remark(f"in {side}, {problem}") for problem in found.problems]


def _list_names(names: Sequence[str]) -> str:
    left = len(names) - _MAX_NAMES
    more = f" and {left:,} more" if left > 0 else ""
    return ", ".join(names[:_MAX_NAMES]) + more
