"""End of an iteration: operators are joined in batches, then order files and the manifest are
written, with records from the ledger.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rankdump._core.manifest import Manifest, ManifestRecord, ManifestSession
from rankdump._core.record import StatisticRows
from rankdump._core.run_card import MAX_CARD_BYTES, parse_card
from rankdump._core.session_protocol import IterationEnd
from rankdump._core.status import IterationStatus
from rankdump._layout.statistic_tables import StatisticRow
from rankdump._layout.tree_layouts import Layout
from rankdump.errors import CorruptedError
from rankdumpd.agent.declarations import reread_statistic_rows
from rankdumpd.agent.ledger.agent_ledger import AgentLedger
from rankdumpd.agent.ledger.rows import StoredRecord, StoredStatisticRows
from rankdumpd.agent.limits.usage import DumpUsage
from rankdumpd.agent.records import (
    FrameId,
    JoinedMember,
    MetadataFrame,
    OperatorMember,
    StatisticTableRow,
)
from rankdumpd.agent.session.rank_session import RankSession
from rankdumpd.agent.storage import rank_files
from rankdumpd.agent.storage.statistic_tables import make_row_record
from rankdumpd.server import state_files

MAX_BATCH_OPERATORS = 256
MAX_BATCH_BYTES = 64 << 20
"""Largest size of data that is on the disk twice: in the operators' files and in those of their
tensors.
"""

_logger = logging.getLogger(__name__)
_Row = TypeVar("_Row")


class IterationJoin:
    """The operators of an ended iteration, which are joined in batches."""

    def __init__(
        self,
        ledger: AgentLedger,
        session: RankSession,
        declared: MetadataFrame,
        end: IterationEnd,
        usage: DumpUsage,
    ) -> None:
        self.declared, self.end = declared, end
        self._groups = _join_groups(ledger, session, declared.frame_id, end.iteration, usage)

    def join_some(self) -> bool:
        """Join the next operators; return whether all are joined.

        A transient OSError or sqlite3.Error is raised, to be retried. After a permanent OSError the
        tensors stay in files of their own, as do tensors that arrive after their operator was
        joined.
        """
        return next(self._groups, True)


def _join_groups(
    ledger: AgentLedger, session: RankSession, end: FrameId, iteration: int, usage: DumpUsage
) -> Iterator[bool]:
    """Join one group of operators at each step, and yield whether it was the last group."""
    joiner, session_id = session.storage.joiner, end.session_id
    if joiner is None:
        return
    found = _group_by_operator(ledger.members(session_id, iteration, before=end.sequence))
    groups = list(_split_batches(found))
    for number, operators in enumerate(groups, start=1):
        shares: list[JoinedMember] = []
        done: list[OperatorMember] = []
        for members in operators:
            # An operator that was joined before a crash may still have the separate files of its
            # tensors.
            done += [member for member in members if member.joined]
            if not any(member.joined for member in members):
                mark = f"{session_id}-{members[0].sequence}"
                with _noting_failures(session, "tensors stay in files of their own"):
                    shares += joiner.join(members, mark=mark)
                    done += members
        if shares:
            ledger.mark_joined(session_id, shares, synced=session.storage.is_synced)
            more = _count_added_bytes(operators, shares)
            session.adjust_stored_bytes(iteration, more)
            usage.add(session.request.job_id, str(session.storage.tree.root), more)
        with _noting_failures(session, "files of joined tensors cannot be removed"):
            joiner.remove(done)
        yield number == len(groups)


def _group_by_operator(members: Iterable[OperatorMember]) -> list[list[OperatorMember]]:
    operators: defaultdict[str, list[OperatorMember]] = defaultdict(list)
    for member in members:
        operators[member.whole.path].append(member)
    return [*operators.values()]


def _split_batches(
    operators: Iterable[list[OperatorMember]],
) -> Iterator[list[list[OperatorMember]]]:
    some: list[list[OperatorMember]] = []
    left_bytes = MAX_BATCH_BYTES
    for members in operators:
        some.append(members)
        left_bytes -= sum(member.bytes_stored for member in members)
        if left_bytes <= 0 or len(some) >= MAX_BATCH_OPERATORS:
            yield some
            some, left_bytes = [], MAX_BATCH_BYTES
    if some:
        yield some


def _count_added_bytes(
    operators: Iterable[Sequence[OperatorMember]], shares: Iterable[JoinedMember]
) -> int:
    before = {each.sequence: each.bytes_stored for members in operators for each in members}
    return sum(share.bytes_stored - before[share.sequence] for share in shares)


@contextmanager
def _noting_failures(session: RankSession, what: str) -> Generator[None]:
    """Turn a permanent OSError of the block into a finding; raise a transient one, to
    be retried.
    """
    try:
        yield
    except OSError as error:
        if state_files.is_transient(error):
            raise
        rank = session.request.rank
        if session.add_finding(f"rank {rank}, {what}: {error.strerror or error}"):
            _logger.error("rank %d, %s", rank, what, exc_info=error)


def iter_committed_rows(
    found: Iterable[StatisticTableRow | StoredStatisticRows], session: RankSession
) -> Iterator[StatisticTableRow]:
    """Yield the rows of statistic tables in the order of their frames."""
    for piece in found:
        if isinstance(piece, StatisticTableRow):
            yield piece
        else:
            rows, table_format = reread_statistic_rows(piece.raw), session.storage.table_format
            yield from table_format.format_statistics(_list_kept(rows, piece), rows.iteration)


def make_manifest_records(
    kept: Iterable[StoredRecord | StoredStatisticRows], layout: Layout
) -> tuple[set[int], tuple[ManifestRecord, ...], list[tuple[int, bytes]]]:
    """Return the graphs and the manifest records of an iteration's stored tensors, and the
    fingerprints with the positions of their records.
    """
    graphs: set[int] = set()
    records: list[ManifestRecord] = []
    fingerprints: list[tuple[int, bytes]] = []
    has_members = layout.shares_timestamps
    for each in kept:
        if isinstance(each, StoredRecord):
            graphs.add(each.graph)
            fingerprints.append((len(records), each.fingerprint))
            records.append(each.record)
        else:
            rows = reread_statistic_rows(each.raw)
            kept_rows = _list_kept(rows, each)
            graphs.update([kind.graph for kind, _, _ in kept_rows])
            if rows.fingerprints:
                fingerprints += enumerate(_select_kept(rows.fingerprints, each), len(records))
            records += [
                make_row_record(kind, when_us, has_members) for kind, when_us, _ in kept_rows
            ]
    return graphs, tuple(records), [each for each in fingerprints if each[1]]


def _list_kept(rows: StatisticRows, frame: StoredStatisticRows) -> list[StatisticRow]:
    return _select_kept(zip(rows.kinds, rows.timestamps_us, rows.statistics, strict=True), frame)


def _select_kept(column: Iterable[_Row], frame: StoredStatisticRows) -> list[_Row]:
    """Return the values of the kept rows in a column."""
    if not frame.refused:
        return list(column)
    refused = {place for places in frame.refused.values() for place in places}
    return [row for place, row in enumerate(column) if place not in refused]


def write_iteration_files(
    ledger: AgentLedger,
    session: RankSession,
    status: IterationStatus,
    frame_id: FrameId,
    *,
    card: bytes = b"",
    repeated: bool,
) -> None:
    """Write the order files, the fingerprints and the manifest of the iteration that ended with the
    frame `frame_id` and has the run card `card`.

    With `repeated` some of these files may exist already.
    """
    request, storage, iteration = session.request, session.storage, status.iteration
    kept = ledger.kept(request.session_id, iteration)
    kept_graphs, records, fingerprints = make_manifest_records(kept, storage.layout)
    tree, layout = storage.tree, storage.layout
    folder, seal = layout.rank_folder(request.rank), None
    if layout.api_files is None:  # in an API tree the info file has the order
        graphs = session.program.graphs(iteration) | kept_graphs
        rank_files.write_program_order(tree, request.rank, session.program.unwritten(iteration))
        rank_files.append_iteration(tree, request.rank, graphs, iteration, repeated=repeated)
    if fingerprints:
        seal = rank_files.write_fingerprints(tree, folder, status, fingerprints)
    manifest = Manifest(
        status=status,
        world_size=request.world_size,
        device=request.device,
        host=request.host,
        records=records,
        session=ManifestSession(
            pid=request.pid,
            framework=request.framework,
            device_target=request.device_target,
            last_sequence=frame_id.sequence,
            plan=request.plan_json.decode(errors="replace"),
        ),
        fingerprints=seal,
        card=_read_card(session, iteration, card),
    )
    rank_files.write_manifest(tree, folder, manifest)


def _read_card(session: RankSession, iteration: int, data: bytes) -> object:
    """Return a run card as a JSON value; None if there is none, or if it is damaged."""
    if not data:
        return None
    try:
        if len(data) > MAX_CARD_BYTES:
            raise CorruptedError(f"run card has {len(data)} bytes, at most {MAX_CARD_BYTES}")
        parse_card(data)
        return json.loads(data)
    except CorruptedError as error:
        # The text does not name the iteration, because the rank may send a damaged card in each.
        rank = session.request.rank
        if session.add_finding(f"rank {rank}, a run card is left out: {error}"):
            _logger.warning("rank %d, iteration %d: %s", rank, iteration, error)
        return None
