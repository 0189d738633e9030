"""Dumps of other tools that are no trees of folders: by what each is known, and who reads it.

A reader makes the same `Tree` as a walk, so that what follows does not know the difference. It is
asked only where a root has none of the folders of `_layout.dump_folders`. A new tool is one
`ForeignReader`.
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
"""Type, name and stack of each call, outermost line first."""


@dataclass(frozen=True, slots=True)
class ForeignReader:
    """What is read of the dumps of one tool."""

    tool: str
    table_noun: str
    """What its files with statistics are called in sentences."""
    recognises: Callable[[Path], bool]
    """Whether a file or folder is such a dump; it reads names and starts of files."""
    read_tree: Callable[[Path, Sequence[Query]], Tree]
    """Restricted to the places of the queries."""
    read_calls: Callable[[Table], list[ForeignCall]] | None = None
    """Calls in a file with statistics; None where the dump has no tensors."""
    find_stacks: Callable[[Path], list[tuple[Path, CallPlace]]] | None = None
    parse_stacks: Callable[[bytes], OperatorStacks] | None = None
    read_order: Callable[[Path], MergedCalls] | None = None
    """None where the order is that of the calls in the tables."""


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
    """Return who reads a file or folder; None where it is no dump of another tool."""
    return next((reader for reader in FOREIGN_READERS if reader.recognises(root)), None)


def get_foreign_reader(tool: str) -> ForeignReader:
    """Return the reader of a tool, as in `Tree.tool` and `Table.form`."""
    return _BY_TOOL[tool]


def read_foreign_tree(root: Path, queries: Sequence[Query]) -> Tree | None:
    """Return the tree of a dump of another tool; None where a root is none."""
    reader = find_foreign_reader(root)
    return None if reader is None else reader.read_tree(root, queries)


def check_foreign_request(root: Path, *, balances: bool, job_id: str, attempt: int | None) -> None:
    """Raise CorruptedError where that is asked for of another tool which only our trees have."""
    lacks = "balances of iterations" if balances else "jobs" if job_id else ""
    lacks = lacks or ("attempts" if attempt else "")
    reader = find_foreign_reader(root) if lacks else None
    if reader is not None:
        raise CorruptedError(
            f"{root}: a dump of {reader.tool} has no {lacks}: rankdump ls shows what it has"
        )


def read_foreign_rows(table: Table) -> Iterator[Figures]:
    """Yield the rows of a file of another tool; CorruptedError where it is damaged."""
    yield from make_rows(table, _read_calls(table))


def read_foreign_stacks(path: Path, tool: str) -> OperatorStacks:
    """Yield the calls of a file with their stacks; CorruptedError where it is damaged."""
    parse = get_foreign_reader(tool).parse_stacks
    with named_errors(path):
        yield from parse(path.read_bytes()) if parse is not None else ()


def read_foreign_order(root: Path) -> MergedCalls | None:
    """Return the merged order of a dump of another tool; None where a root is none."""
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
    # Members of a group other than the default one are not known.
    members = ranks if is_shared and not call.group else ()
    key = (kind, call.group) if is_shared else None
    return RankCall(call.op_name, kind, key, call.group, members)
