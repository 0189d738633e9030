"""Rebuild of an agent's lost ledger from the manifests of a tree: reads them without following any
link, and writes a new ledger as a whole or not at all. Never overwrites a ledger. Uses the tables
of the agent's ledger, and none of the agent's components.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import TypeAlias

from rankdump._codec.zstd_frames import compute_stored_bytes
from rankdump._core.drop_reasons import BUFFER_FULL, STEP_OVERHEAD
from rankdump._core.element_types import ELEMENT_TYPES
from rankdump._core.manifest import (
    RETIRED_FILE,
    Manifest,
    ManifestRecord,
    RetiredIteration,
    is_intact,
)
from rankdump._core.npy_format import compute_npy_sizes
from rankdump._core.plan import DumpPlan, OutputSettings, plan_to_json
from rankdump._core.record import TensorKind, TensorSide
from rankdump._core.session_protocol import IterationEnd, RecordHead, SessionRequest
from rankdump._core.status import IterationStatus, SessionState
from rankdump._core.tree_root import READ_FLAGS
from rankdump._layout.dump_folders import RANK_FOLDER_PATTERN, find_folder
from rankdump._layout.file_name import PACKED_SUFFIX
from rankdump._layout.tree_paths import EXECUTION_ORDER_FOLDER, MANIFEST_FOLDER, METADATA_FOLDER
from rankdump.errors import ConfigError, CorruptedError, ExhaustedError
from rankdumpd.agent.ledger import rows
from rankdumpd.agent.ledger.database import lock_ledger_folder, open_ledger_file
from rankdumpd.agent.ledger.rows import RECORD_PLACES
from rankdumpd.agent.records import (
    BaselineMatch,
    BaselineVerdict,
    FrameId,
    OperatorMembership,
    RecordOutcome,
    RecordStatus,
    TreeFile,
)

_ORDER_FILE_PATTERN = re.compile(r"ms_execution_order_graph_([0-9]{1,9})\.csv")
_MAX_FILE_BYTES = 1 << 30


def read_manifests(root: Path, *, hidden: bool = False) -> Iterator[tuple[str, Manifest]]:
    """Yield the manifests of all ranks, each with the folder of its rank. With `hidden`, yield
    instead the manifests of iterations that are being removed.

    CorruptedError when a manifest cannot be read, because a ledger without it would be wrong.
    """
    for rank in _list_rank_folders(root):
        folder = f"{rank}/{MANIFEST_FOLDER}"
        for name in _list_names(root, folder):
            if name.endswith(".json") and name.startswith(".") == hidden:
                yield rank, _read_manifest(root, f"{folder}/{name}")


def read_retired_iterations(root: Path) -> Iterator[tuple[str, RetiredIteration]]:
    """Yield the removed iterations of all ranks, each with the folder of its rank."""
    for rank in _list_rank_folders(root):
        if RETIRED_FILE not in _list_names(root, f"{rank}/{METADATA_FOLDER}"):
            continue
        path = f"{rank}/{METADATA_FOLDER}/{RETIRED_FILE}"
        try:
            # The text after the last newline may be a line that a crash cut off.
            for line in _read_bytes(root, path).decode(errors="replace").split("\n")[:-1]:
                yield rank, RetiredIteration.from_line(line)
        except CorruptedError as error:
            raise CorruptedError(f"{root / path}: {error}") from None


def list_ordered_graphs(root: Path, rank: str) -> list[int]:
    """Return the graphs whose program order is written in the folder of a rank."""
    found = map(
        _ORDER_FILE_PATTERN.fullmatch, _list_names(root, f"{rank}/{EXECUTION_ORDER_FOLDER}")
    )
    return [int(each[1]) for each in found if each]


def _list_rank_folders(root: Path) -> list[str]:
    return list(filter(RANK_FOLDER_PATTERN.fullmatch, _list_names(root, "")))


def _list_names(root: Path, folder: str) -> list[str]:
    """Return the names in a folder; none if the folder is missing or behind a link."""
    path = root
    for part in folder.split("/") if folder else ():
        path = path / part
        if path.is_symlink():
            return []
    try:
        return sorted(each.name for each in path.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CorruptedError(f"{path}: cannot be read: {error.strerror}") from None


def _read_bytes(root: Path, path: str) -> bytes:
    try:
        with os.fdopen(os.open(root / path, READ_FLAGS), "rb") as file:
            return file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise CorruptedError(f"cannot be read: {error.strerror}") from None


def _read_manifest(root: Path, path: str) -> Manifest:
    try:
        data = _read_bytes(root, path)
        if not is_intact(data):
            raise CorruptedError("its checksum does not match its content")
        return Manifest.from_json(data)
    except CorruptedError as error:
        raise CorruptedError(f"{root / path}: {error}") from None


_STATE_DIR_OPTION = "--state-dir"
_LEDGER_FILE = "ledger.sqlite"
_SessionKey: TypeAlias = "tuple[str, str]"
"""Folder of a rank, and the id of one of its sessions."""


@dataclass(frozen=True, slots=True)
class RebuiltLedger:
    """Number of rows in the new ledger, by kind."""

    sessions: int
    iterations: int
    records: int


def rebuild_ledger(tree: Path, state_dir: Path) -> RebuiltLedger:
    """Write the ledger of a tree to a folder that has none, as a whole or not at all.

    ConfigError for a folder with a ledger and for a tree without manifests, UnavailableError for a
    folder that an agent uses, CorruptedError for a manifest that cannot be read.
    """
    if (state_dir / _LEDGER_FILE).exists():
        raise ConfigError(
            _STATE_DIR_OPTION,
            "",
            str(state_dir),
            "a folder without a ledger: move the existing one away",
        )
    sessions = _collect_sessions(tree)
    if not sessions:
        # An empty ledger would prevent a second call with the right tree.
        allowed = f"a dump tree with manifests (rank_*/{MANIFEST_FOLDER}/*.json)"
        raise ConfigError("TREE", "", str(tree), allowed)
    lock_fd = lock_ledger_folder(state_dir)
    try:
        _write_ledger(state_dir, sessions)
    except sqlite3.Error as error:
        raise ExhaustedError(f"{state_dir}: {error}") from None
    finally:
        os.close(lock_fd)
    return RebuiltLedger(
        len(sessions),
        sum(len(each.ends) for each in sessions),
        sum(len(each.records) for each in sessions),
    )


def _collect_sessions(tree: Path) -> list[SessionLedgerRows]:
    whole, cut = (
        _group_by_session(read_manifests(tree)),
        _group_by_session(read_manifests(tree, hidden=True)),
    )
    retired: defaultdict[_SessionKey, list[RetiredIteration]] = defaultdict(list)
    for rank, line in read_retired_iterations(tree):
        retired[rank, line.session_id].append(line)
    root = os.path.realpath(tree)
    return [
        build_session_rows(
            SessionManifests(
                tuple(whole[key].values()), tuple(cut[key].values()), tuple(retired[key])
            ),
            root=root,
            graphs=list_ordered_graphs(tree, key[0]),
        )
        for key in sorted({*whole, *cut, *retired})
    ]


def _group_by_session(
    manifests: Iterable[tuple[str, Manifest]],
) -> defaultdict[_SessionKey, dict[int, Manifest]]:
    """Return the manifests of each session by iteration."""
    found: defaultdict[_SessionKey, dict[int, Manifest]] = defaultdict(dict)
    for rank, manifest in manifests:
        found[rank, manifest.status.session_id][manifest.status.iteration] = manifest
    return found


def _write_ledger(state_dir: Path, sessions: list[SessionLedgerRows]) -> None:
    """Write all rows to a temporary file, and rename it when it is complete."""
    temporary = state_dir / f".{_LEDGER_FILE}.tmp"
    temporary.unlink(missing_ok=True)
    with contextlib.closing(open_ledger_file(temporary)) as db:
        db.execute("PRAGMA journal_mode = DELETE")
        db.execute("BEGIN IMMEDIATE")
        for each in sessions:
            db.execute(f"INSERT INTO sessions VALUES ({_build_placeholders(10)})", each.session)
            db.executemany(f"INSERT INTO records VALUES {RECORD_PLACES}", each.records)
            db.executemany("INSERT OR IGNORE INTO layouts VALUES (?, ?)", each.layouts)
            db.executemany(
                "INSERT INTO unpacked (session_id, iteration, sequence) VALUES (?, ?, ?)",
                each.unpacked,
            )
            db.executemany(f"INSERT INTO iterations VALUES ({_build_placeholders(9)})", each.ends)
            db.executemany(f"INSERT INTO retired VALUES ({_build_placeholders(6)})", each.retired)
        # The tree does not tell which iterations the table of statistics has. All are queued for it
        # again; its writer skips those that it has already.
        db.execute(
            "INSERT INTO unindexed (session_id, iteration, records, since_us)"
            " SELECT DISTINCT session_id, iteration, 0, 0 FROM iterations"
        )
        db.execute("COMMIT")
    temporary.rename(state_dir / _LEDGER_FILE)


def _build_placeholders(number: int) -> str:
    return ", ".join("?" * number)


LedgerRow: TypeAlias = "tuple[str | int | bytes | None, ...]"


@dataclass(frozen=True, slots=True)
class SessionLedgerRows:
    """Ledger rows of one session."""

    session: LedgerRow
    records: tuple[LedgerRow, ...]
    ends: tuple[LedgerRow, ...]
    retired: tuple[LedgerRow, ...] = ()
    layouts: tuple[LedgerRow, ...] = ()
    unpacked: tuple[LedgerRow, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionManifests:
    """Manifests and retired iterations of one session; at least one manifest or retired iteration
    exists.
    """

    manifests: tuple[Manifest, ...] = ()
    hidden: tuple[Manifest, ...] = ()
    """Manifests of iterations whose removal was interrupted."""
    retired: tuple[RetiredIteration, ...] = ()


def build_session_rows(
    found: SessionManifests, *, root: str, graphs: Iterable[int]
) -> SessionLedgerRows:
    """Return the ledger rows of one session.

    `graphs` lists the graphs whose program order is in the tree. If the manifests lack the data
    that an agent needs to resume the session, it is only counted and cannot be resumed.
    """
    ordered = sorted(found.manifests, key=_last_sequence)
    # A link has no size of its own, so links to unpacked files are found by their digests.
    unpacked_digests = {each.digest for m in ordered for each in m.records if _is_unpacked(each)}
    numbering = _FrameNumbering()
    records: list[LedgerRow] = []
    ends: list[LedgerRow] = []
    unpacked: list[LedgerRow] = []
    for manifest in ordered:
        numbers, end = numbering.number_frames(manifest)
        for outcome in _make_outcomes(manifest, numbers):
            records.append(rows.make_record_row(outcome))
            if outcome.path and outcome.digest in unpacked_digests:
                session_id, sequence = outcome.frame_id
                unpacked.append((session_id, outcome.head.iteration, sequence))
        ends.append(_build_end_row(manifest, end))
    layouts = {each.layout for m in ordered for each in m.records if each.layout is not None}
    return SessionLedgerRows(
        _build_session_row(found, root, graphs, numbering.last),
        tuple(records),
        tuple(ends),
        tuple(_iter_retired_rows(found)),
        tuple(map(rows.make_layout_row, layouts)),
        tuple(unpacked),
    )


class _FrameNumbering:
    """Assigns sequence numbers to the frames of a session; manifests contain only the
    last number.
    """

    def __init__(self) -> None:
        self.last = 0
        """Highest number of the manifests that were numbered so far."""
        self._spare = count(-1, -1)

    def number_frames(self, manifest: Manifest) -> tuple[list[int], int]:
        """Return a number for each record of the next manifest, and the number of its iteration
        end.

        Several rows of statistics share a frame, so there may be more records than free numbers
        before the end; the remaining records get numbers below 1, which ranks never send.
        """
        # A manifest of an older agent has no last sequence number: assume that only tensors were
        # sent.
        end = _last_sequence(manifest) or self.last + len(manifest.records) + 1
        free = iter(range(self.last + 1, end))
        numbers = [next(free, None) or next(self._spare) for _ in manifest.records]
        self.last = max(self.last, end)
        return numbers, end


def _build_session_row(
    found: SessionManifests, root: str, graphs: Iterable[int], last: int
) -> LedgerRow:
    request = _build_request(found, root)
    fields = {k: v for k, v in asdict(request).items() if not isinstance(v, bytes)}
    # Manifests do not tell whether the session was closed. It is marked as closed, because a closed
    # session can be reopened, and nothing waits for it.
    state, graphs_json = SessionState.CLOSED.value, json.dumps(sorted(graphs))
    watermark = max([last, *map(_last_sequence, found.hidden)])
    progress = (state, watermark, len(found.manifests), "[]", graphs_json, "", 0)
    return (request.session_id, json.dumps(fields), request.plan_json, *progress)


def _last_sequence(manifest: Manifest) -> int:
    return manifest.session.last_sequence if manifest.session else 0


def _build_request(found: SessionManifests, root: str) -> SessionRequest:
    """Return the session request of the rank, as far as its newest manifest has the fields."""
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
    status, session = newest.status, newest.session
    return SessionRequest(
        job_id=status.job_id,
        session_id=status.session_id,
        rank=status.rank,
        world_size=newest.world_size,
        device=newest.device,
        host=newest.host,
        pid=session.pid if session else 0,
        framework=session.framework if session else "",
        device_target=session.device_target if session else "",
        plan_json=session.plan.encode() if session else plan,
        config_source=b"",
        attempt=status.attempt,
    )


def _iter_retired_rows(found: SessionManifests) -> Iterator[LedgerRow]:
    """Yield the iterations that were removed, or whose removal has to be completed."""
    present = {each.status.iteration for each in found.manifests}
    cut = {each.status.iteration for each in found.hidden}
    # One iteration may have several lines, of which the last one counts.
    lines = {line.iteration: line for line in found.retired if line.iteration not in present}
    for iteration, line in sorted(lines.items()):
        fields = {"job": line.job_id, "rank": line.rank, "iteration": iteration, "why": line.why}
        status = json.dumps({**fields, "bytes": 0})
        # No sum of this ledger contains the bytes of the iteration, so 0 bytes must be subtracted.
        yield (line.session_id, iteration, line.at_us, int(iteration not in cut), 0, status)


def _iter_record_statuses(
    manifest: Manifest,
) -> Iterator[tuple[ManifestRecord, RecordStatus, str]]:
    """Yield each record of a manifest with a status and a reason, which occur as often as the
    manifest counts them.
    """
    status = manifest.status
    linked = status.linked
    # Manifests of older agents give no reasons: these agents degraded records only when a buffer
    # was full.
    left = Counter(status.degraded_by or {BUFFER_FULL: status.degraded})
    left.subtract(STEP_OVERHEAD for each in manifest.records if _is_sample(each))
    reasons = (+left).elements()
    for record in manifest.records:
        if _is_sample(record):
            yield record, RecordStatus.DEGRADED, STEP_OVERHEAD
        elif record.same_as:
            linked -= 1
            yield record, RecordStatus.SAME_AS_BASELINE, ""
        elif record.path and not record.bytes_stored and linked:
            linked -= 1
            yield record, RecordStatus.LINKED, ""
        else:
            reason = "" if record.path else next(reasons, "")
            yield record, RecordStatus.DEGRADED if reason else RecordStatus.STORED, reason


def _is_sample(record: ManifestRecord) -> bool:
    return record.layout is not None and record.layout.is_sample


def _is_unpacked(record: ManifestRecord) -> bool:
    """Return whether a file has the size of a frame that packs nothing, because an agent stored it
    unpacked under pressure and did not pack it later.
    """
    element = ELEMENT_TYPES.get(record.dtype)
    if element is None or not record.path.endswith(f".npy{PACKED_SUFFIX}"):
        return False
    stored = compute_stored_bytes(compute_npy_sizes(element.descr, record.shape))
    return record.bytes_stored == stored


def _make_outcomes(manifest: Manifest, numbers: Iterable[int]) -> Iterator[RecordOutcome]:
    """Yield the outcome of each record of a manifest, given the numbers of their frames."""
    status = manifest.status
    for number, (record, outcome, reason) in zip(
        numbers, _iter_record_statuses(manifest), strict=True
    ):
        yield _make_outcome(status, FrameId(status.session_id, number), record, outcome, reason)


def _make_outcome(
    status: IterationStatus,
    frame_id: FrameId,
    record: ManifestRecord,
    outcome: RecordStatus,
    reason: str,
) -> RecordOutcome:
    """Return the outcome of a record as its ledger row stores it.

    The outcome has no row of statistics, which is in its table, and no fingerprint, which is in the
    file that the manifest names. The record is already joined with its operator, or never will be.
    """
    folder = find_folder(record.path.rpartition("/")[0])
    kind = TensorKind(
        folder.graph if folder is not None else 0,
        record.op_type,
        record.op_name,
        TensorSide.OUTPUT,
        0,
        record.dtype,
        record.shape,
        record.bytes_in,
        argument=record.argument,
        layout=record.layout,
        microbatch=record.microbatch,
        phase=record.phase,
    )
    file = TreeFile(record.baseline, record.same_as)
    return RecordOutcome(
        frame_id,
        RecordHead(kind, status.iteration, record.timestamp_us),
        outcome,
        reason,
        record.path,
        record.digest,
        record.bytes_stored,
        membership=OperatorMembership(record.member),
        baseline=BaselineMatch(BaselineVerdict.SAME, file) if record.same_as else None,
    )


def _build_end_row(manifest: Manifest, sequence: int) -> LedgerRow:
    status = manifest.status
    # The age of the iteration, which decides about its retention, is that of its newest tensor.
    ended_us = max((record.timestamp_us for record in manifest.records), default=0)
    # A manifest has only the sum of the records that the agent and the rank dropped.
    end = IterationEnd(
        status.iteration,
        status.expected,
        status.dropped,
        status.stall_us,
        status.first_position,
        status.last_position,
    )
    return (*rows.make_end_row(FrameId(status.session_id, sequence), end), ended_us)
