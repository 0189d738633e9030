"""Manifests of one session to the rows of a ledger. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import TypeAlias

from rankdump.contract.exchange import IterationEnd, SessionRequest
from rankdump.contract.layout.folders import folder_at
from rankdump.contract.manifest import Manifest, ManifestRecord
from rankdump.contract.plan import DumpPlan, Output
from rankdump.contract.plan_json import plan_to_json
from rankdump.contract.status import IterationStatus, SessionState
from rankdumpd.agent import rows
from rankdumpd.agent.values import Fate, Ticket

Row: TypeAlias = "tuple[str | int | bytes, ...]"


@dataclass(frozen=True, slots=True)
class SessionRows:
    """What the ledger says of one session."""

    session: Row
    records: tuple[Row, ...]
    ends: tuple[Row, ...]


def session_rows(manifests: Sequence[Manifest], *, root: str, graphs: Iterable[int]) -> SessionRows:
    """Return the rows of a session whose manifests these are.

    `graphs` are those whose program order is in the tree. A session of which the manifests do not
    say what an agent needs to go on with it stands there to be counted, and cannot come back.
    """
    ordered = sorted(manifests, key=_last_sequence)
    records: list[Row] = []
    ends: list[Row] = []
    spare = count(-1, -1)
    reached = 0
    for manifest in ordered:
        # Of before manifests said it: as if there had been nothing but its tensors.
        end = _last_sequence(manifest) or reached + len(manifest.records) + 1
        numbers = iter(range(reached + 1, end))
        for record, fate in _fates(manifest):
            # Rows of figures come many in a frame; no rank ever sends a number below 1.
            sequence = next(numbers, None) or next(spare)
            records.append(_record(manifest.status, sequence, record, fate))
        ends.append(_end(manifest, end))
        reached = max(reached, end)
    session = _session(ordered, root=root, watermark=reached, graphs=graphs)
    return SessionRows(session, tuple(records), tuple(ends))


def _last_sequence(manifest: Manifest) -> int:
    return manifest.session.last_sequence if manifest.session else 0


def _session(
    ordered: Sequence[Manifest], *, root: str, watermark: int, graphs: Iterable[int]
) -> Row:
    newest = ordered[-1]
    status, said = newest.status, newest.session
    plan = said.plan.encode() if said else plan_to_json(DumpPlan(Output(root)))
    request = SessionRequest(
        job_id=status.job_id,
        session_id=status.session_id,
        rank=status.rank,
        world_size=newest.world_size,
        device=newest.device,
        host=newest.host,
        pid=said.pid if said else 0,
        framework=said.framework if said else "",
        device_target=said.device_target if said else "",
        plan_json=plan,
        config_source=b"",
    )
    about = {k: v for k, v in asdict(request).items() if not isinstance(v, bytes)}
    # Nobody knows whether it said goodbye. Closed, it is not waited for, and may come back.
    state = SessionState.CLOSED.value
    how = (state, watermark, len(ordered), "[]", json.dumps(sorted(graphs)), "", 0)
    return (status.session_id, json.dumps(about), plan, *how)


def _fates(manifest: Manifest) -> Iterator[tuple[ManifestRecord, Fate]]:
    """Yield the records of a manifest with what became of them: as many of each as it says."""
    linked, degraded = manifest.status.linked, manifest.status.degraded
    for record in manifest.records:
        fate = Fate.STORED
        if record.path and not record.bytes_stored and linked:
            fate, linked = Fate.LINKED, linked - 1
        elif not record.path and degraded:
            fate, degraded = Fate.DEGRADED, degraded - 1
        yield record, fate


def _record(status: IterationStatus, sequence: int, record: ManifestRecord, fate: Fate) -> Row:
    folder = folder_at(record.path.rpartition("/")[0])
    return (
        status.session_id,
        sequence,
        folder.graph if folder is not None else 0,
        status.iteration,
        fate.value,
        "",
        record.path,
        record.op_type,
        record.op_name,
        record.argument,
        record.dtype,
        json.dumps(record.shape),
        record.bytes_in,
        record.bytes_stored,
        record.digest,
        record.timestamp_us,
        *("", ""),  # its row stands in its table
        record.member,
        *(0, "", ""),  # it is joined, or will never be
    )


def _end(manifest: Manifest, sequence: int) -> Row:
    status = manifest.status
    # It ended when its last tensor had come, or soon after: so old it is for who removes old ones.
    ended_us = max((record.timestamp_us for record in manifest.records), default=0)
    # What the agent dropped and what the rank did stand as one sum in a manifest.
    end = IterationEnd(
        status.iteration,
        status.expected,
        status.dropped,
        status.stall_us,
        status.first_position,
        status.last_position,
    )
    return (*rows.end_row(Ticket(status.session_id, sequence), end), ended_us)
