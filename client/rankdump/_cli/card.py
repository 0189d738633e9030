"""Command `rankdump card`: run cards of a tree, with differences between ranks first."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click
import xxhash

from rankdump import reader
from rankdump._analysis.compare.card_findings import CardFinding, compare_ranks
from rankdump._analysis.reader.query import Query
from rankdump._analysis.reader.run_cards import FoundCards, RankCard
from rankdump._cli.options import SELECTION_OPTIONS, TREE_PATH
from rankdump._cli.output import TableColumn, number_columns, print_json, print_lines, print_rows
from rankdump._core.json_values import make_plain
from rankdump._core.plan import IterationSelection
from rankdump._core.record import sanitize_line
from rankdump._core.run_card import (
    BATCH_PREFIX,
    LEARNING_RATE_PREFIX,
    RANDOM_PREFIX,
    ModelSummary,
    RunCard,
)
from rankdump._core.units import format_count

_DEFAULT_ROWS = 20
_SHORT_DIGITS = 8
_NO_VALUE = "-"
_COLUMNS = (
    *number_columns("rank", "iteration"),
    TableColumn("batch"),
    TableColumn("random"),
    *number_columns("weights", "learning rate"),
    TableColumn("noted", is_flexible=True),
)


@click.command()
@click.argument("tree", type=TREE_PATH, default=".")
@SELECTION_OPTIONS["rank"]
@SELECTION_OPTIONS["iterations"]
@SELECTION_OPTIONS["job_id"]
@click.option(
    "--attempt",
    type=click.IntRange(min=0),
    help="Only this attempt of a job that was restarted; default: the last of each iteration.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=_DEFAULT_ROWS,
    help=f"Maximum number of iterations listed; 0 lists all; default: {_DEFAULT_ROWS}.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
def card(
    *,
    tree: Path,
    rank: int | None,
    iterations: IterationSelection | None,
    job_id: str,
    attempt: int | None,
    limit: int,
    as_json: bool,
) -> int:
    """Show what the iterations of a dump were computed from.

    A run card has the command line, versions, seeds and flags of a rank, and for each dumped
    iteration digests of the batch, of the random generators and of the weights before the step.
    What differs between ranks that should agree comes first. Exit code 1 when a card or a
    manifest cannot be read.
    """
    whole = reader.open(tree).of_job(job_id)
    dump = whole.matching(Query(rank=rank, iterations=iterations))
    found = (dump if attempt is None else dump.where(attempt=attempt)).found_cards
    findings = compare_ranks(found, None if found.cards else whole.found_cards)
    if as_json:
        print_json(_make_body(found, findings))
    else:
        print_lines(map(sanitize_line, _format_findings(found, findings)))
        print_lines(map(sanitize_line, _format_facts(found.cards)))
        _print_iterations(found.cards, limit)
    print_lines(found.unread, err=True)
    return 1 if found.problems or found.unread else 0


def _make_body(found: FoundCards, findings: Sequence[CardFinding]) -> dict[str, object]:
    return {
        "findings": findings,
        "cards": [
            {"rank": each.rank, "iteration": each.iteration, "attempt": each.attempt}
            | make_plain(each.card)
            for each in found.cards
        ],
        "without": found.without,
        "problems": list(found.problems),
    }


def _format_findings(found: FoundCards, findings: Sequence[CardFinding]) -> Iterator[str]:
    differences = [each.text for each in findings if each.is_difference]
    count = len({each.rank for each in found.cards})
    if differences:
        yield "differs between ranks:"
        yield from (f"  {text}" for text in differences)
    elif count > 1:
        yield f"{format_count(count, 'rank')} agree"
    yield from (each.text for each in findings if not each.is_difference)
    if found.cards and found.without:
        yield f"{format_count(found.without, 'iteration')} without a run card"


def _format_facts(cards: Sequence[RankCard]) -> Iterator[str]:
    """Yield lines about the processes, one block for all ranks with the same facts."""
    # Facts are taken from the first card of each rank; everything else is in the table.
    first = {each.rank: each.card for each in reversed(cards)}
    facts: dict[str, tuple[RunCard, list[int]]] = {}
    for rank in dict.fromkeys(each.rank for each in cards):
        own = replace(first[rank], numbers={}, digests={}, parameters={})
        facts.setdefault(json.dumps(own, default=make_plain), (own, []))[1].append(rank)
    for own, ranks in facts.values():
        yield ""
        yield f"rank {reader.ranges(ranks)}: {' '.join(own.command)}"
        yield from (f"  {line}" for line in _format_card_facts(own))


def _format_card_facts(own: RunCard) -> Iterator[str]:
    if own.revision:
        yield f"git revision: {own.revision}"
    for title, values in (
        ("versions", own.versions),
        ("settings", own.settings),
        ("environment", own.environment),
    ):
        if values:
            yield f"{title}: {_join_values(values)}"
    yield from map(_format_model, own.models)


def _join_values(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _format_model(model: ModelSummary) -> str:
    dtypes = ", ".join(f"{count:,} {dtype}" for dtype, count in model.dtypes.items())
    counts = f"{format_count(model.parameters, 'parameter')}, {model.elements:,} elements"
    return f"model {model.name}: {counts}; {dtypes}; names and shapes {model.digest}"


def _print_iterations(cards: Sequence[RankCard], limit: int) -> None:
    shown = cards[:limit] if limit else cards
    if not shown:
        return
    print_lines([""])
    print_rows(_COLUMNS, list(map(_format_row, shown)))
    left = len(cards) - len(shown)
    print_lines([f"... {format_count(left, 'more iteration')}: --limit 0"] if left else [])


def _format_row(each: RankCard) -> list[str]:
    own = each.card
    rates = [v for name, v in own.numbers.items() if name.startswith(LEARNING_RATE_PREFIX)]
    noted = {n: v for n, v in own.numbers.items() if not n.startswith(LEARNING_RATE_PREFIX)}
    return [
        str(each.rank),
        str(each.iteration),
        _shorten_digests(own.digests, BATCH_PREFIX),
        _shorten_digests(own.digests, RANDOM_PREFIX),
        f"{len(own.parameters):,}" if own.parameters else _NO_VALUE,
        ", ".join(dict.fromkeys(rates)) or _NO_VALUE,
        sanitize_line(_join_values(noted)) or _NO_VALUE,
    ]


def _shorten_digests(digests: Mapping[str, str], prefix: str) -> str:
    """Return a few digits of a digest over these digests; equal digests give equal digits."""
    own = sorted(item for item in digests.items() if item[0].startswith(prefix))
    if not own:
        return _NO_VALUE
    return xxhash.xxh3_64_hexdigest(repr(own).encode(errors="replace"))[:_SHORT_DIGITS]
