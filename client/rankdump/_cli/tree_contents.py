"""Tensors of a tree as text: an overview of ranks and iterations, tables of tensors, and sentences
about a tree. Prints nothing; reads the tree, and the headers of files that no manifest describes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import TypeAlias

from rankdump import reader
from rankdump._analysis.reader.foreign_dumps import get_foreign_reader
from rankdump._analysis.reader.query import Named, Query
from rankdump._analysis.reader.run_cards import read_model_names
from rankdump._analysis.reader.tensor_loader import Facts, facts
from rankdump._analysis.reader.tree import Entries, Entry, Tree
from rankdump._analysis.reader.tree_status import count_losses, split_attempts
from rankdump._cli.output import (
    TableColumn,
    format_ratio,
    format_shape,
    format_table,
    list_first,
    number_columns,
    without_attempts,
)
from rankdump._core.manifest import ManifestRecord
from rankdump._core.number_ranges import ranges
from rankdump._core.record import (
    BUFFER_ARGUMENT,
    TensorKey,
    TensorSide,
    format_slot,
    name_argument,
)
from rankdump._core.scope_names import format_scope_name, name_models
from rankdump._core.units import format_bytes, format_count
from rankdump._layout.dump_folders import ROOT_FORMS
from rankdump._layout.tree_paths import PARAMETER_OP_TYPE
from rankdump.errors import CorruptedError

MAX_GROUPS_SHOWN = 40
_MAX_OPERATORS_NAMED = 3
_OVERVIEW_COLUMNS = (
    *number_columns("rank", "attempt", "iteration", "operators", "inputs", "outputs"),
    *number_columns("bytes in", "on disk", "ratio"),
    TableColumn("state"),
)
_TENSOR_COLUMNS = (
    TableColumn("operator", is_flexible=True),
    TableColumn("side"),
    *number_columns("slot"),
    TableColumn("dtype"),
    *number_columns("shape", "size"),
)
_RECORD_COLUMNS: Mapping[str, Callable[[ManifestRecord], str]] = {
    "name": lambda record: name_argument(record.argument),
    "micro-batch": lambda record: "" if record.microbatch is None else str(record.microbatch),
    "phase": lambda record: record.phase,
    "layout": lambda record: str(record.layout or ""),
    "file": lambda record: "in baseline" if record.same_as else "",
}
"""Columns that are shown if any tensor of the listing has a value in them."""
_DIGEST_COLUMNS = (TableColumn("digest"), TableColumn("same"))
_DIGEST_DIGITS = 12
_EMPTY_QUERY = Query()
TensorContent: TypeAlias = "tuple[str, str, tuple[int, ...]]"
"""Digest, element type and shape, which are equal for tensors with the same content."""


@dataclass(frozen=True, slots=True)
class ListedTensor:
    """One tensor of a listing, with its facts."""

    entry: Entry
    facts: Facts | None
    """Facts about the tensor; None if its file is damaged."""
    damage: str = ""


def describe_entries(entries: Iterable[Entry]) -> list[ListedTensor]:
    """Return the entries with their facts; a damaged file has `damage` in place of facts."""
    rows: list[ListedTensor] = []
    for entry in entries:
        try:
            rows.append(ListedTensor(entry, facts(entry)))
        except CorruptedError as error:
            rows.append(ListedTensor(entry, None, str(error)))
    return rows


def format_overview(tree: Tree, *, width: int) -> list[str]:
    """Return one line per rank and iteration; if there are too many iterations, one
    line per rank.
    """
    complete = count_losses(tree)
    places = tree.entries.by_place()
    parts = [
        (place.rank, attempt, entries)
        for place, whole in places.items()
        for attempt, entries in split_attempts(tree, whole)
    ]
    groups: dict[tuple[int, ...], list[Entries]] = {}
    for number, (rank, attempt, entries) in enumerate(parts):
        own = (number,) if len(parts) <= MAX_GROUPS_SHOWN else ()
        groups.setdefault((rank, attempt, *own), []).append(entries)
    shown = sorted(groups.items())[:MAX_GROUPS_SHOWN]
    rows = [
        [str(rank), str(attempt), *_overview_cells(chain(*own), complete[rank, attempt])]
        for (rank, attempt, *_), own in shown
    ]
    for row in rows if tree.tool else ():
        row[-1] = tree.tool  # nothing tells whether a dump of another tool is complete
    for row in () if tree.is_recorded or tree.tool else rows:
        row[-1] = "unknown"
    if len(groups) > MAX_GROUPS_SHOWN:
        rows.append(["..." for _ in _OVERVIEW_COLUMNS])
    return format_table(*without_attempts(_OVERVIEW_COLUMNS, rows, tree.attempts), width=width)


def format_tensors(
    tree: Tree,
    rows: Sequence[ListedTensor],
    *,
    width: int,
    marks: Mapping[TensorContent, str] | None = None,
) -> list[str]:
    """Return one line per tensor, below a line for each rank, attempt and iteration.

    With `marks`, lines also show the digest and the mark of the content.
    """
    extra = [
        (TableColumn(title), get_text)
        for title, get_text in _RECORD_COLUMNS.items()
        if any(get_text(record) for row in rows if (record := row.entry.record))
    ]
    columns = (
        *_TENSOR_COLUMNS,
        *(column for column, _ in extra),
        *(_DIGEST_COLUMNS if marks is not None else ()),
    )
    lines: list[str] = []
    models = name_tree_models(tree.root, ((row.entry.key.graph, row.entry.op_name) for row in rows))
    for where, group in groupby(rows, key=lambda row: format_place(row.entry.key, tree, models)):
        if lines:
            lines.append("")
        lines.append(where)
        cells = [
            [
                *_tensor_row(row),
                *(get_text(row.entry.record) if row.entry.record else "" for _, get_text in extra),
                *_digest_cells(row.entry, marks),
            ]
            for row in group
        ]
        lines += format_table(columns, cells, width=width)
    return lines


def name_tree_models(root: Path, named: Iterable[tuple[int, str]]) -> dict[int, str]:
    """Return the names of models by graph: the names under which they were attached if a run card
    has them, else their classes. Empty if there is only one model.
    """
    pairs = dict.fromkeys(named)
    found = name_models(pairs)
    known = read_model_names(root) if found else {}
    # A model that is not a module has no entry in a run card, which would shift the numbers of
    # others.
    return name_models(pairs, known) if len(known) > max(found, default=0) else found


def mark_same_contents(entries: Iterable[Entry]) -> dict[TensorContent, str]:
    """Return a mark for each content that several entries share, in the order of appearance."""
    counts = Counter(content for entry in entries if (content := _content_of(entry)))
    several = (content for content, count in counts.items() if count > 1)
    return {content: f"={number}" for number, content in enumerate(several, start=1)}


def count_same_contents(entries: Iterable[Entry], marks: Mapping[TensorContent, str]) -> str:
    """Return one sentence about the number of entries whose content other entries share."""
    marked = sum(_content_of(entry) in marks for entry in entries)
    return f"{format_count(marked, 'tensor')} with a mark, {len(marks):,} different"


def format_place(key: TensorKey, tree: Tree, models: Mapping[int, str] | None = None) -> str:
    """Return rank, attempt, iteration, net and graph of a tensor, as the heading of its group.

    `models` contains names of models by graph, if there are several.
    """
    when = "constants" if key.constant else f"iteration {key.iteration}"
    net = f", net {key.net_name}, graph {key.graph}" if key.net_name else ""
    model = (models or {}).get(key.graph, "")
    attempt = f", attempt {tree.find_attempt(key)}" if any(tree.attempts) else ""
    return f"rank {key.rank}{attempt}, {when}{net}{f', model {model}' if model else ''}"


def read_tree(
    root: Path,
    query: Query = _EMPTY_QUERY,
    job_id: str = "",
    attempt: int | None = None,
    *,
    balances_only: bool = False,
) -> Tree:
    """Return the tree in a folder, restricted to a query, a job and an attempt.

    CorruptedError when the folder is not a tree, or does not contain the job or the attempt.
    """
    tree = reader.walk(root, query, balances_only=balances_only, job_id=job_id, attempt=attempt)
    if not (tree.entries or tree.tables or tree.manifests):
        reader.check_ours(root)
    if not tree.ranks:
        why = "".join(f"; {problem}" for problem in tree.problems)
        raise CorruptedError(f"{tree.root}: not a dump tree: expected {ROOT_FORMS}{why}")
    return tree


def describe_jobs(tree: Tree) -> list[str]:
    """Return a sentence if tensors of several jobs are listed together."""
    count = 0 if tree.job_id else len(tree.jobs)
    return [f"the tree has {count} jobs: --job selects one"] if count > 1 else []


def name_tables(tree: Tree) -> str:
    """Return the noun for the tables of a tree: their file name if all have the same one."""
    if tree.tool:
        return get_foreign_reader(tree.tool).table_noun
    if all(table.info for table in tree.tables):
        return "info file"
    of_operators = any(table.operator is not None for table in tree.tables)
    return "table" if of_operators else "statistic.csv file"


def explain_no_match(held: Iterable[Named]) -> str:
    """Return one sentence for a filter that matches nothing, with the existing values."""
    places = set[tuple[int, int, int | None]]()
    names: dict[str, None] = {}
    for tensor in held:
        key = tensor.key
        places.add((key.rank, key.graph, None if key.constant else key.iteration))
        names[tensor.op_name] = None
    iterations = ranges(at for _, _, at in places if at is not None)
    named = list_first(names, _MAX_OPERATORS_NAMED, format_scope_name)
    return (
        f"no tensor matches; the tree has rank {ranges(rank for rank, _, _ in places)}, "
        f"graph {ranges(graph for _, graph, _ in places)}, iteration {iterations or '-'}, "
        f"{format_count(len(names), 'operator')}: {named}"
    )


def _overview_cells(group: Iterable[Entry], complete: Mapping[int, int]) -> list[str]:
    """Return the cells of a row after rank and attempt.

    `complete` contains the number of lost tensors of each complete iteration.
    """
    iterations: set[int] = set()
    operators: set[tuple[int | None, str]] = set()
    count = inputs = bytes_in = stored = 0
    known = True
    for entry in group:
        key, length = entry.key, entry.bytes_in
        operators.add((None if key.constant else key.iteration, entry.op_name))
        if not key.constant:
            iterations.add(key.iteration)
        count += 1
        inputs += key.side is TensorSide.INPUT
        known = known and length is not None
        bytes_in += length or 0
        stored += entry.taken_bytes
    unfinished = [i for i in iterations if i not in complete]
    return [
        ranges(iterations) or "constants",
        f"{len(operators):,}",
        f"{inputs:,}",
        f"{count - inputs:,}",
        format_bytes(bytes_in) if known else "-",
        format_bytes(stored),
        format_ratio(bytes_in, stored) if known else "-",
        _format_state(iterations, unfinished, sum(complete.get(i, 0) for i in iterations)),
    ]


def _format_state(iterations: set[int], unfinished: list[int], lost: int) -> str:
    missing = f"{lost:,} dropped" if lost else ""
    if not unfinished:
        # An iteration counts as complete only if all tensors of the plan are there.
        return missing or ("complete" if iterations else "-")
    state = "incomplete" if len(iterations) == 1 else f"incomplete: {ranges(unfinished)}"
    return ", ".join(filter(None, (state, missing)))


def _tensor_row(row: ListedTensor) -> list[str]:
    entry, known = row.entry, row.facts
    dtype, extents, length = (
        (known.dtype, format_shape(known.shape), format_bytes(known.bytes_in))
        if known
        else ("damaged", "", "")
    )
    key = entry.key
    argument = entry.record.argument if entry.record else ""
    name = format_operator(entry.op_type, entry.op_name, argument)
    return [name, key.side.value, format_slot(key), dtype, extents, length]


def _content_of(entry: Entry) -> TensorContent | None:
    record = entry.record
    return (record.digest, record.dtype, record.shape) if record and record.digest else None


def _digest_cells(entry: Entry, marks: Mapping[TensorContent, str] | None) -> list[str]:
    if marks is None:
        return []
    content = _content_of(entry)
    return [content[0][:_DIGEST_DIGITS], marks.get(content, "")] if content else ["-", ""]


def describe_parallelism(record: ManifestRecord) -> dict[str, object]:
    """Return the JSON fields about micro-batch, phase and layout that a record has."""
    fields = {"microbatch": record.microbatch, "phase": record.phase, "layout": record.layout}
    return {name: value for name, value in fields.items() if value not in (None, "")}


def describe_key(tensor: Named, tree: Tree) -> dict[str, object]:
    """Return the key of a tensor in JSON form, with raw names."""
    key = tensor.key
    return {
        "rank": key.rank,
        "attempt": tree.find_attempt(key),
        "net_name": key.net_name,
        "graph": key.graph,
        "iteration": None if key.constant else key.iteration,
        "timestamp_us": key.timestamp_us,
        "op_type": tensor.op_type,
        "op_name": tensor.op_name,
        "side": key.side.value,
        "slot": key.slot,
    }


def format_operator(op_type: str, op_name: str, argument: str = "") -> str:
    """Return the name of an operator, with its type unless the name contains it.

    In a tree, a buffer has the type of parameters, so it is recognised by its argument.
    """
    if op_type == PARAMETER_OP_TYPE and argument == BUFFER_ARGUMENT:
        op_type = "Buffer"
    name = format_scope_name(op_name)
    # Without a manifest, a name has `_` in place of each `/` of the scope.
    has_type = name.rpartition("/")[2].startswith(op_type) or f"_{op_type}-" in name
    return name if has_type else f"{op_type} {name}"
