"""Ledger rows of one session, built from its manifests. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import count
from typing import TypeAlias

from rankdump._core.manifest import Manifest, ManifestRecord, RetiredIteration
from rankdump._core.plan import DumpPlan, OutputSettings, plan_to_json
from rankdump._core.session_protocol import IterationEnd, SessionRequest
from rankdump._core.status import IterationStatus, SessionState
from rankdump._layout.dump_folders import find_folder
from rankdumpd.agent.ledger import rows
from rankdumpd.agent.records import FrameId, RecordStatus

LedgerRow: TypeAlias = "tuple[str | int | bytes, ...]"


@dataclass(frozen=True, slots=True)
class SessionLedgerRows:
    """What the ledger says of one session."""

    session: LedgerRow
    records: tuple[LedgerRow, ...]
    ends: tuple[LedgerRow, ...]
    retired: tuple[LedgerRow, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionManifests:
    """What a tree says of one session; there is at least one of all."""

    manifests: tuple[Manifest, ...] = ()
    hidden: tuple[Manifest, ...] = ()
    """Of iterations whose removal was cut."""
    retired: tuple[RetiredIteration, ...] = ()


def build_session_rows(
    found: SessionManifests, *, root: str, graphs: Iterable[int]
) -> SessionLedgerRows:
    """Return the rows of a session.

    `graphs` are those whose program order is in the tree. A session of which the manifests do not
    say what an agent needs to go on with it stands there to be counted, and cannot come back.
    """
    ordered = sorted(found.manifests, key=_last_sequence)
    records: list[LedgerRow] = []
    ends: list[LedgerRow] = []
    spare = count(-1, -1)
    reached = 0
    for manifest in ordered:
        # Of before manifests said it: as if there had been nothing but its tensors.
        end = _last_sequence(manifest) or reached + len(manifest.records) + 1
        numbers = iter(range(reached + 1, end))
        for record, fate in _iter_record_fates(manifest):
            # Rows of figures come many in a frame; no rank ever sends a number below 1.
            sequence = next(numbers, None) or next(spare)
            records.append(_build_record_row(manifest.status, sequence, record, fate))
        ends.append(_build_end_row(manifest, end))
        reached = max(reached, end)
    request = _build_request(found, root)
    about = {k: v for k, v in asdict(request).items() if not isinstance(v, bytes)}
    # Nobody knows whether it said goodbye. Closed, it is not waited for, and may come back.
    state, graphs_json = SessionState.CLOSED.value, json.dumps(sorted(graphs))
    reached = max([reached, *map(_last_sequence, found.hidden)])
    how = (state, reached, len(ordered), "[]", graphs_json, "", 0)
    session = (request.session_id, json.dumps(about), request.plan_json, *how)
    return SessionLedgerRows(session, tuple(records), tuple(ends), tuple(_iter_retired_rows(found)))


def _last_sequence(manifest: Manifest) -> int:
    return manifest.session.last_sequence if manifest.session else 0


def _build_request(found: SessionManifests, root: str) -> SessionRequest:
    """Return how the rank introduced itself, as far as its newest manifest says it."""
    plan = plan_to_json(DumpPlan(OutputSettings(root)))
    every = sorted(found.manifests or found.hidden, key=_last_sequence)
    if not every:
        line = found.retired[-1]
        return SessionRequest(
            job_id=line.job_id,
            session_id=line.session_id,
            rank=line.rank,
            world_size=line.rank + 1,
            device=0,
            host="",
            pid=0,
            framework="",
            device_target="",
            plan_json=plan,
            config_source=b"",
        )
    newest = every[-1]
    status, said = newest.status, newest.session
    return SessionRequest(
        job_id=status.job_id,
        session_id=status.session_id,
        rank=status.rank,
        world_size=newest.world_size,
        device=newest.device,
        host=newest.host,
        pid=said.pid if said else 0,
        framework=said.framework if said else "",
        device_target=said.device_target if said else "",
        plan_json=said.plan.encode() if said else plan,
        config_source=b"",
    )


def _iter_retired_rows(found: SessionManifests) -> Iterator[LedgerRow]:
    """Yield the iterations that are gone, or of which the rest has to go."""
    there = {each.status.iteration for each in found.manifests}
    cut = {each.status.iteration for each in found.hidden}
    # A line may stand there twice.
    lines = {line.iteration: line for line in found.retired if line.iteration not in there}
    for iteration, line in sorted(lines.items()):
        about = {"job": line.job_id, "rank": line.rank, "iteration": iteration, "why": line.why}
        status = json.dumps({**about, "bytes": 0})
        # What it took is in no sum of this ledger, so nothing is to be taken off.
        yield (line.session_id, iteration, line.at_us, int(iteration not in cut), 0, status)


def _iter_record_fates(manifest: Manifest) -> Iterator[tuple[ManifestRecord, RecordStatus]]:
    """Yield the records of a manifest with what became of them: as many of each as it says."""
    linked, degraded = manifest.status.linked, manifest.status.degraded
    for record in manifest.records:
        fate = RecordStatus.STORED
        if record.path and not record.bytes_stored and linked:
            fate, linked = RecordStatus.LINKED, linked - 1
        elif not record.path and degraded:
            fate, degraded = RecordStatus.DEGRADED, degraded - 1
        yield record, fate


def _build_record_row(
    status: IterationStatus, sequence: int, record: ManifestRecord, fate: RecordStatus
) -> LedgerRow:
    folder = find_folder(record.path.rpartition("/")[0])
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


def _build_end_row(manifest: Manifest, sequence: int) -> LedgerRow:
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
    return (*rows.make_end_row(FrameId(status.session_id, sequence), end), ended_us)
