"""Rebuild of a lost ledger: reads the manifests of a tree without following any link, and writes a
new ledger as a whole or not at all. Never overwrites a ledger.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from rankdump._core.manifest import RETIRED_FILE, Manifest, RetiredIteration, is_intact
from rankdump._layout.dump_folders import RANK_FOLDER_PATTERN
from rankdump._layout.tree_paths import EXECUTION_ORDER_FOLDER, MANIFEST_FOLDER, METADATA_FOLDER
from rankdump.errors import ConfigError, CorruptedError, ExhaustedError
from rankdumpd.agent.ledger.database import lock_ledger_folder, open_ledger_file
from rankdumpd.agent.ledger.rows import RECORD_PLACES
from rankdumpd.rebuild.ledger_rows import SessionLedgerRows, SessionManifests, build_session_rows

_ORDER_FILE_PATTERN = re.compile(r"ms_execution_order_graph_([0-9]{1,9})\.csv")
_MAX_FILE_BYTES = 1 << 30
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def read_manifests(root: Path, *, hidden: bool = False) -> Iterator[tuple[str, Manifest]]:
    """Yield the manifests of all ranks, each with the folder of its rank; with `hidden`, those of
    iterations that are being removed.

    CorruptedError when one cannot be read, because a ledger without it would be wrong.
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
            # After the last newline there may be a line that a crash cut off.
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
    """Return the names in a folder; none when it is missing or behind a link."""
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
        with os.fdopen(os.open(root / path, _READ_FLAGS), "rb") as file:
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
"""Folder of a rank, and session id."""


@dataclass(frozen=True, slots=True)
class RebuiltLedger:
    """Counts of the rows in the new ledger."""

    sessions: int
    iterations: int
    records: int


def rebuild_ledger(tree: Path, state_dir: Path) -> RebuiltLedger:
    """Write the ledger of a tree to a folder without one, whole or not at all.

    ConfigError for a folder with a ledger or with an agent, CorruptedError for a manifest that
    cannot be read.
    """
    if (state_dir / _LEDGER_FILE).exists():
        raise ConfigError(
            _STATE_DIR_OPTION,
            "",
            str(state_dir),
            "a folder without a ledger: move the existing one away",
        )
    sessions = _collect_sessions(tree)
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
    """Return the manifests of each session of a rank by iteration."""
    found: defaultdict[_SessionKey, dict[int, Manifest]] = defaultdict(dict)
    for rank, manifest in manifests:
        found[rank, manifest.status.session_id][manifest.status.iteration] = manifest
    return found


def _write_ledger(state_dir: Path, sessions: list[SessionLedgerRows]) -> None:
    """Fill a temporary file, and rename it when it is complete."""
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
        db.execute("COMMIT")
    temporary.rename(state_dir / _LEDGER_FILE)


def _build_placeholders(number: int) -> str:
    return ", ".join("?" * number)
