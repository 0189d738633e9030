"""Dumps of other tools, which are no trees of folders like ours: how each is recognised, and which
reader it has.

A reader makes the same `Tree` as reading our trees does, so that later code need not tell them
apart. A reader is tried only if a root has none of the folders in `_layout.dump_folders`. A new
tool is one more `ForeignReader`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankdump._analysis.reader import debug_log_tree, flight_dumps, msprobe_tree
from rankdump._analysis.reader.call_order import MergedCalls, RankCall, merge_iterations
from rankdump._analysis.reader.file_errors import named_errors
from rankdump._analysis.reader.foreign_files import make_rows
from rankdump._analysis.reader.query import Query
from rankdump._analysis.reader.tree import Figures, Table, Tree
from rankdump._core.events import EventKind
from rankdump._core.graph import SourceLine
from rankdump._layout.debug_log import parse_debug_stacks
from rankdump._layout.foreign_calls import CallPlace, ForeignCall, find_collective_kind
from rankdump._layout.msprobe_dump import parse_stack_file
from rankdump._layout.tree_paths import PARAMETER_OP_TYPE
from rankdump.errors import CorruptedError

OperatorStacks = Iterator[tuple[str, str, tuple[SourceLine, ...]]]
"""Type, name and stack of each call; the outermost line of a stack is first."""


@dataclass(frozen=True, slots=True)
class ForeignReader:
    """Functions that read the dumps of one tool."""

    tool: str
    table_noun: str
    """Name of the tool's files with statistics in sentences."""
    recognises: Callable[[Path], bool]
    """Returns whether a file or folder is such a dump; it reads only names and the beginnings of
    files.
    """
    read_tree: Callable[[Path, Sequence[Query]], Tree]
    """Reads the tree, restricted to the places that the queries select."""
    read_calls: Callable[[Table], list[ForeignCall]] | None = None
    """Reads the calls in a file with statistics; None if the dumps have no tensors."""
    find_stacks: Callable[[Path], list[tuple[Path, CallPlace]]] | None = None
    parse_stacks: Callable[[bytes], OperatorStacks] | None = None
    read_order: Callable[[Path], MergedCalls] | None = None
    """Reads the merged order; None if the order is that of the calls in the tables."""


FOREIGN_READERS = (
    ForeignReader(
        tool=msprobe_tree.MSPROBE,
        table_noun="dump.json file",
        recognises=msprobe_tree.is_msprobe_dump,
        read_tree=msprobe_tree.read_msprobe_tree,
        read_calls=msprobe_tree.read_msprobe_calls,
        find_stacks=msprobe_tree.find_stack_files,
        parse_stacks=parse_stack_file,
    ),
    ForeignReader(
        tool=debug_log_tree.DEBUG_MODE,
        table_noun="log",
        recognises=debug_log_tree.is_debug_log_tree,
        read_tree=debug_log_tree.read_debug_log_tree,
        read_calls=debug_log_tree.read_debug_log_calls,
        find_stacks=debug_log_tree.find_debug_logs,
        parse_stacks=parse_debug_stacks,
    ),
    ForeignReader(
        tool=flight_dumps.FLIGHT_RECORDER,
        table_noun="dump",
        recognises=flight_dumps.is_flight_folder,
        read_tree=flight_dumps.reject_flight_tree,
        read_order=flight_dumps.read_flight_order,
    ),
)
_BY_TOOL = {reader.tool: reader for reader in FOREIGN_READERS}


def find_foreign_reader(root: Path) -> ForeignReader | None:
    """Return the reader for a file or folder; None if it is no dump of another tool."""
    return next((reader for reader in FOREIGN_READERS if reader.recognises(root)), None)


def get_foreign_reader(tool: str) -> ForeignReader:
    """Return the reader of a tool by its name, as in `Tree.tool` and `Table.form`."""
    return _BY_TOOL[tool]


def read_foreign_tree(root: Path, queries: Sequence[Query]) -> Tree | None:
    """Return the tree of a dump of another tool; None if a root is no such dump."""
    reader = find_foreign_reader(root)
    return None if reader is None else reader.read_tree(root, queries)


def check_foreign_request(root: Path, *, balances: bool, job_id: str, attempt: int | None) -> None:
    """Raise a CorruptedError if something is requested of another tool's dump that only our trees
    have.
    """
    lacks = "balances of iterations" if balances else "jobs" if job_id else ""
    lacks = lacks or ("attempts" if attempt else "")
    reader = find_foreign_reader(root) if lacks else None
    if reader is not None:
        raise CorruptedError(
            f"{root}: a dump of {reader.tool} has no {lacks}: rankdump ls shows what it has"
        )


def read_foreign_rows(table: Table) -> Iterator[Figures]:
    """Yield the rows of another tool's file; CorruptedError if the file is damaged."""
    yield from make_rows(table, _read_calls(table))


def read_foreign_stacks(path: Path, tool: str) -> OperatorStacks:
    """Yield the calls in another tool's file with their stacks; CorruptedError if the file is
    damaged.
    """
    parse = get_foreign_reader(tool).parse_stacks
    with named_errors(path):
        yield from parse(path.read_bytes()) if parse is not None else ()


def read_foreign_order(root: Path) -> MergedCalls | None:
    """Return the merged order of another tool's dump; None if a root is no such dump."""
    reader = find_foreign_reader(root)
    if reader is None:
        return None
    if reader.read_order is not None:
        return reader.read_order(root)
    tree = reader.read_tree(root, ())
    programs = {
        (table.iteration, table.rank): [
            _make_rank_call(call, tree.ranks)
            for call in _read_calls(table)
            if call.op_type != PARAMETER_OP_TYPE
        ]
        for table in tree.tables
    }
    note = f"from the order of the calls in each {reader.table_noun}, which has no times"
    return merge_iterations(programs, (note,))


def _read_calls(table: Table) -> list[ForeignCall]:
    read = get_foreign_reader(table.form).read_calls
    return read(table) if read is not None else []


def _make_rank_call(call: ForeignCall, ranks: tuple[int, ...]) -> RankCall:
    kind = find_collective_kind(call.op_type) if call.is_collective else EventKind.OPERATOR
    is_shared = kind.is_collective
    # Only the members of the default group are known.
    members = ranks if is_shared and not call.group else ()
    key = (kind, call.group) if is_shared else None
    return RankCall(call.op_name, kind, key, call.group, members)
