"""The ledger's tables, and how values stand in their rows. Pure."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from rankdump.contract.exchange import IterationEnd, SessionRequest
from rankdump.contract.manifest import ManifestRecord
from rankdump.contract.status import SessionState
from rankdumpd.agent.values import (
    Declared,
    Judged,
    KeptFrame,
    KeptRecord,
    Outcome,
    SessionRow,
    TableRow,
    Ticket,
)

VERSION = 3
"""Of the tables below, as the file's `user_version` says it; the first ones had none."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    session_id TEXT PRIMARY KEY,
    request TEXT NOT NULL,           -- JSON of what the rank said of itself
    plan BLOB NOT NULL,
    state TEXT NOT NULL,
    watermark INTEGER NOT NULL,      -- every frame up to here stands below; more may
    iterations_seen INTEGER NOT NULL,
    notes TEXT NOT NULL,             -- JSON list
    graphs TEXT NOT NULL             -- JSON list: graphs whose program order is in the tree
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS records (
    session_id TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    graph INTEGER NOT NULL,
    iteration INTEGER NOT NULL,
    fate TEXT NOT NULL,
    reason TEXT NOT NULL,
    path TEXT NOT NULL,
    op_type TEXT NOT NULL,
    op_name TEXT NOT NULL,
    argument TEXT NOT NULL,
    dtype TEXT NOT NULL,
    shape TEXT NOT NULL,             -- JSON list
    bytes_in INTEGER NOT NULL,
    bytes_stored INTEGER NOT NULL,
    digest TEXT NOT NULL,
    timestamp_us INTEGER NOT NULL DEFAULT 0,
    row_folder TEXT NOT NULL DEFAULT '',   -- where its line of statistic.csv belongs
    row TEXT NOT NULL DEFAULT '',          -- that line; empty when there is none
    PRIMARY KEY (session_id, sequence)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS records_by_iteration ON records (session_id, iteration);
CREATE TABLE IF NOT EXISTS figures (
    session_id TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    iteration INTEGER NOT NULL,
    fate TEXT NOT NULL,              -- of the rows that are kept
    kept INTEGER NOT NULL,           -- how many these are
    refused TEXT NOT NULL,           -- JSON: places of the others, by reason
    body BLOB NOT NULL,              -- the frame as it came
    PRIMARY KEY (session_id, sequence)
);
CREATE INDEX IF NOT EXISTS figures_by_iteration ON figures (session_id, iteration);
CREATE TABLE IF NOT EXISTS declarations (
    session_id TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    kind TEXT NOT NULL,
    body BLOB NOT NULL,              -- the frame as it came; empty once nobody needs it
    applied INTEGER NOT NULL,
    PRIMARY KEY (session_id, sequence)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS iterations (
    session_id TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    iteration INTEGER NOT NULL,
    expected INTEGER NOT NULL,
    dropped TEXT NOT NULL,           -- JSON: what the rank itself dropped, by reason
    stall_us INTEGER NOT NULL DEFAULT 0,
    first_position INTEGER NOT NULL DEFAULT 0,
    last_position INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (session_id, sequence)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS log (
    number INTEGER PRIMARY KEY AUTOINCREMENT,  -- of what the coordinator is told, for ever
    session_id TEXT NOT NULL,
    sequence INTEGER NOT NULL,       -- of the declaration it is about; 0: none
    kind TEXT NOT NULL,
    events INTEGER NOT NULL,
    bytes INTEGER NOT NULL,          -- what it keeps from being forgotten
    body BLOB NOT NULL               -- JSON; empty: the declaration's own
);
CREATE INDEX IF NOT EXISTS log_by_declaration ON log (session_id, sequence);
CREATE INDEX IF NOT EXISTS log_by_kind ON log (kind, number);
CREATE TABLE IF NOT EXISTS reporting (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    agent_id TEXT NOT NULL,
    acknowledged INTEGER NOT NULL,   -- the coordinator needs nothing up to here again
    lost_events INTEGER NOT NULL,
    lost_states INTEGER NOT NULL     -- items of any other kind
);
"""
MIGRATIONS = {
    0: """
ALTER TABLE records ADD COLUMN timestamp_us INTEGER NOT NULL DEFAULT 0;
ALTER TABLE records ADD COLUMN row_folder TEXT NOT NULL DEFAULT '';
ALTER TABLE records ADD COLUMN row TEXT NOT NULL DEFAULT '';
""",
    # Rows of figures came with a table of their own, which is made like any that is missing.
    1: "",
    # So did the log of what the coordinator is told.
    2: """
ALTER TABLE iterations ADD COLUMN stall_us INTEGER NOT NULL DEFAULT 0;
ALTER TABLE iterations ADD COLUMN first_position INTEGER NOT NULL DEFAULT 0;
ALTER TABLE iterations ADD COLUMN last_position INTEGER NOT NULL DEFAULT 0;
""",
}
"""What makes the tables of an older version those of the next one."""
SESSION_COLUMNS = "request, plan, state, watermark, iterations_seen, notes, graphs"
FRAME_COLUMNS = "sequence, body, refused"
KEPT_COLUMNS = (
    "sequence, graph, path, timestamp_us, op_type, op_name, argument, dtype, shape, bytes_in,"
    " bytes_stored, digest"
)
RECORD_PLACES = f"({', '.join('?' * 18)})"


def session_row(row: tuple[Any, ...]) -> SessionRow:
    """Return a session from the columns of SESSION_COLUMNS."""
    request, plan, state, watermark, seen, notes, graphs = row
    return SessionRow(
        request=SessionRequest(**json.loads(request), plan_json=plan, config_source=b""),
        state=SessionState(state),
        watermark=watermark,
        iterations_seen=seen,
        notes=tuple(json.loads(notes)),
        ordered_graphs=tuple(json.loads(graphs)),
    )


def record_row(outcome: Outcome) -> tuple[str | int, ...]:
    """Return a record's columns."""
    head, key = outcome.head, outcome.head.key
    row = outcome.row or TableRow("", "")
    return (
        outcome.ticket.session_id,
        outcome.ticket.sequence,
        key.graph,
        key.iteration,
        outcome.fate.value,
        outcome.reason,
        outcome.path,
        key.op_type,
        key.op_name,
        head.argument,
        head.dtype,
        _shape_text(head.shape),
        head.byte_count,
        outcome.bytes_stored,
        outcome.digest,
        key.timestamp_us,
        row.folder,
        row.text,
    )


def kept_record(row: tuple[Any, ...]) -> KeptRecord:
    """Return a record from the columns of KEPT_COLUMNS."""
    sequence, graph, path, timestamp_us, op_type, op_name, argument, dtype, shape, *rest = row
    bytes_in, bytes_stored, digest = rest
    record = ManifestRecord(
        path=path,
        timestamp_us=timestamp_us,
        op_type=op_type,
        op_name=op_name,
        argument=argument,
        dtype=dtype,
        shape=_shape_of(shape),
        bytes_in=bytes_in,
        bytes_stored=bytes_stored,
        digest=digest,
    )
    return KeptRecord(sequence, graph, record)


def kept_frame(row: tuple[Any, ...]) -> KeptFrame:
    """Return rows of figures from the columns of FRAME_COLUMNS."""
    sequence, raw, refused = row
    return KeptFrame(sequence, raw, json.loads(refused))


def figures_row(judged: Judged) -> tuple[str | int | bytes, ...]:
    """Return the columns of a frame of figures."""
    ticket = judged.ticket
    refused = {reason: list(places) for reason, places in judged.refused.items()}
    return (
        ticket.session_id,
        ticket.sequence,
        judged.rows.iteration,
        judged.fate.value,
        judged.kept,
        json.dumps(refused),
        judged.raw,
    )


def end_row(ticket: Ticket, end: IterationEnd) -> tuple[str | int, ...]:
    """Return the columns of the end of an iteration."""
    return (
        ticket.session_id,
        ticket.sequence,
        end.iteration,
        end.expected,
        json.dumps(dict(end.dropped)),
        end.stall_us,
        end.first_position,
        end.last_position,
    )


def declaration_row(declared: Declared) -> tuple[str | int | bytes, ...]:
    """Return a declaration's columns but the last, `applied`."""
    ticket = declared.ticket
    kind = type(declared.declaration).__name__
    return (ticket.session_id, ticket.sequence, kind, declared.raw)


@lru_cache(maxsize=1024)
def _shape_text(shape: tuple[int, ...]) -> str:
    return json.dumps(shape)


@lru_cache(maxsize=1024)
def _shape_of(text: str) -> tuple[int, ...]:
    return tuple(json.loads(text))
