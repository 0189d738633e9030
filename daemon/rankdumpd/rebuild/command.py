"""`rankdumpd rebuild`: the ledger of an agent that has lost it."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from rankdump.contract.errors import ConfigError, ExhaustedError
from rankdump.contract.manifest import Manifest
from rankdump.contract.retired import Retired
from rankdumpd.agent.ledger.connection import connect, sole_owner
from rankdumpd.agent.rows import RECORD_PLACES
from rankdumpd.rebuild.rows import Found, SessionRows, session_rows
from rankdumpd.rebuild.tree import manifests_of, ordered_graphs, retired_of

_KEY = "--state-dir"
_NAME = "ledger.sqlite"
_Who: TypeAlias = "tuple[str, str]"
"""Folder of a rank, and session."""


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What stands in the new ledger."""

    sessions: int
    iterations: int
    records: int


def rebuild(tree: Path, state_dir: Path) -> Rebuilt:
    """Write the ledger of a tree to a folder that has none; it is there whole, or not at all.

    ConfigError for a folder with a ledger or with an agent, DamagedError for a manifest that
    cannot be read.
    """
    if (state_dir / _NAME).exists():
        raise ConfigError(_KEY, "", str(state_dir), "a folder without a ledger: move the old away")
    sessions = _sessions(tree)
    guard = sole_owner(state_dir)
    try:
        _write(state_dir, sessions)
    except sqlite3.Error as error:
        raise ExhaustedError(f"{state_dir}: {error}") from None
    finally:
        os.close(guard)
    return Rebuilt(
        len(sessions),
        sum(len(each.ends) for each in sessions),
        sum(len(each.records) for each in sessions),
    )


def _sessions(tree: Path) -> list[SessionRows]:
    whole, cut = _by_session(manifests_of(tree)), _by_session(manifests_of(tree, hidden=True))
    gone: defaultdict[_Who, list[Retired]] = defaultdict(list)
    for rank, line in retired_of(tree):
        gone[rank, line.session_id].append(line)
    root = os.path.realpath(tree)
    return [
        session_rows(
            Found(tuple(whole[who].values()), tuple(cut[who].values()), tuple(gone[who])),
            root=root,
            graphs=ordered_graphs(tree, who[0]),
        )
        for who in sorted({*whole, *cut, *gone})
    ]


def _by_session(
    manifests: Iterable[tuple[str, Manifest]],
) -> defaultdict[_Who, dict[int, Manifest]]:
    """Return the manifests of each session of a rank by iteration."""
    found: defaultdict[_Who, dict[int, Manifest]] = defaultdict(dict)
    for rank, manifest in manifests:
        found[rank, manifest.status.session_id][manifest.status.iteration] = manifest
    return found


def _write(state_dir: Path, sessions: list[SessionRows]) -> None:
    """Fill a file under another name, and give it its own when it is whole."""
    growing = state_dir / f".{_NAME}.tmp"
    growing.unlink(missing_ok=True)
    with contextlib.closing(connect(growing)) as base:
        base.execute("PRAGMA journal_mode = DELETE")
        base.execute("BEGIN IMMEDIATE")
        for each in sessions:
            base.execute(f"INSERT INTO sessions VALUES ({_places(10)})", each.session)
            base.executemany(f"INSERT INTO records VALUES {RECORD_PLACES}", each.records)
            base.executemany(f"INSERT INTO iterations VALUES ({_places(9)})", each.ends)
            base.executemany(f"INSERT INTO retired VALUES ({_places(6)})", each.retired)
        base.execute("COMMIT")
    growing.rename(state_dir / _NAME)


def _places(number: int) -> str:
    return ", ".join("?" * number)
