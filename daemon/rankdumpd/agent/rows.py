"""How values stand in the rows of the ledger's tables. Pure."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from rankdump.contract.errors import DamagedError
from rankdump.contract.exchange import IterationEnd, SessionRequest
from rankdump.contract.layout.place import Place
from rankdump.contract.manifest import ManifestRecord
from rankdump.contract.status import SessionState
from rankdumpd.agent.members import BinTensor, Member, Membership, member_place
from rankdumpd.agent.values import (
    Declared,
    Judged,
    KeptFrame,
    KeptRecord,
    Outcome,
    SessionRow,
    Ticket,
)

SESSION_COLUMNS = "request, plan, state, watermark, iterations_seen, notes, graphs, secret_hash"
FRAME_COLUMNS = "sequence, body, refused"
KEPT_COLUMNS = (
    "sequence, graph, CASE joined WHEN 0 THEN path ELSE whole END, timestamp_us, op_type, op_name,"
    " argument, dtype, shape, bytes_in, bytes_stored, digest, member"
)
MEMBER_COLUMNS = (
    "sequence, path, whole, whole_name, head_bytes, bytes_stored, joined, timestamp_us, op_name,"
    " member, dtype, shape, bytes_in"
)
RECORD_PLACES = f"({', '.join('?' * 22)}, 0)"
_NO_MEMBER = Membership("")
_LIMIT = 1 << 63


def number(value: object) -> int:
    """Return what stands in a column of numbers; DamagedError when it is none."""
    if not isinstance(value, int) or not 0 <= value < _LIMIT:
        raise DamagedError(f"ledger with {value!r:.40} in the place of a number")
    return value


def session_row(row: tuple[Any, ...]) -> SessionRow:
    """Return a session from the columns of SESSION_COLUMNS; DamagedError when it is none."""
    request, plan, state, watermark, seen, notes, graphs, secret_hash = row
    try:
        about, secret = json.loads(request), bytes.fromhex(secret_hash)
        return SessionRow(
            request=SessionRequest(**about, plan_json=plan, config_source=b"", secret=secret),
            state=SessionState(state),
            watermark=number(watermark),
            iterations_seen=number(seen),
            notes=tuple(json.loads(notes)),
            ordered_graphs=tuple(map(number, json.loads(graphs))),
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedError(f"ledger with a session that is none: {error}") from None


def record_row(outcome: Outcome) -> tuple[str | int, ...]:
    """Return a record's columns."""
    head, kind = outcome.head, outcome.head.kind
    row, member = outcome.row, outcome.membership or _NO_MEMBER
    return (
        outcome.ticket.session_id,
        outcome.ticket.sequence,
        kind.graph,
        head.iteration,
        outcome.fate.value,
        outcome.reason,
        outcome.path,
        kind.op_type,
        kind.op_name,
        kind.argument,
        kind.dtype,
        _shape_text(kind.shape),
        kind.byte_count,
        outcome.bytes_stored,
        outcome.digest,
        head.timestamp_us,
        row.table.path if row else "",
        row.text if row else "",
        member.member,
        member.head_bytes,
        member.whole.path if member.whole else "",
        member.whole.mapped_from if member.whole else "",
    )


def kept_record(row: tuple[Any, ...]) -> KeptRecord:
    """Return a record from the columns of KEPT_COLUMNS."""
    sequence, graph, path, timestamp_us, op_type, op_name, argument, dtype, shape, *rest = row
    bytes_in, bytes_stored, digest, member = rest
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
        member=member,
    )
    return KeptRecord(sequence, graph, record)


def member(row: tuple[Any, ...]) -> Member:
    """Return a tensor of an operator from the columns of MEMBER_COLUMNS."""
    sequence, path, whole, whole_name, head_bytes, bytes_stored, joined, *about = row
    timestamp_us, op_name, place, dtype, shape, bytes_in = about
    return Member(
        sequence=sequence,
        path=path,
        whole=place_of(whole, whole_name),
        head_bytes=head_bytes,
        bytes_stored=bytes_stored,
        joined=bool(joined),
        timestamp_us=timestamp_us,
        op_name=op_name,
        tensor=BinTensor(*member_place(place), dtype, _shape_of(shape), bytes_in),
    )


def place_of(path: str, mapped_from: str = "") -> Place:
    """Return a place from its path."""
    folder, _, name = path.rpartition("/")
    return Place(folder, name, mapped_from)


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
