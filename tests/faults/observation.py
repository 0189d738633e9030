"""Reader of the results of a run: journals, ledgers, trees, manifests."""

from __future__ import annotations

import csv
import json
import math
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from faults import rank_journal
from faults.tensor_content import name_of, tensor
from faults.values import (
    FoundTensor,
    IterationEndRow,
    LedgerContent,
    LedgerRow,
    ListedManifest,
    RankLife,
    RunObservation,
    TensorName,
)

from rankdump._cli.daemon_client import fetch_job_status
from rankdump.errors import RankdumpError
from rankdump.reader import Entry, Table, Tree, load, walk


def lives(folder: Path) -> tuple[RankLife, ...]:
    """Return every process of a rank that came to open a session."""
    found = map(rank_journal.read, sorted(folder.glob("*.journal")))
    return tuple(life for life in found if life is not None)


def ledger(folders: Iterable[Path], known: Iterable[RankLife]) -> LedgerContent:
    """Return what all ledgers below some folders say, as one."""
    ranks = {life.session_id: life.rank for life in known}
    rows: list[LedgerRow] = []
    ends: list[IterationEndRow] = []
    sequences: defaultdict[str, set[int]] = defaultdict(set)
    kept: Counter[tuple[str, int]] = Counter()
    refused: defaultdict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    folded: dict[tuple[str, int], Counter[str]] = {}
    for path in sorted(path for folder in folders for path in folder.rglob("ledger.sqlite")):
        base = sqlite3.connect(path)
        rows += _rows(base, ranks)
        for session, iteration, expected, dropped in base.execute(
            "SELECT session_id, iteration, expected, dropped FROM iterations"
        ):
            ends.append(IterationEndRow(session, iteration, expected, json.loads(dropped)))
        for table in ("records", "figures", "declarations"):
            for session, number in base.execute(f"SELECT session_id, sequence FROM {table}"):
                sequences[session].add(number)
        for session, iteration, count, places in base.execute(
            "SELECT session_id, iteration, kept, refused FROM figures"
        ):
            kept[session, iteration] += count
            refused[session, iteration].update(
                {reason: len(each) for reason, each in json.loads(places).items()}
            )
        for key, sums in _folded(base):
            folded[key] = sums
            # What is left of their numbers is that the end of the iteration is known.
            (last,) = base.execute(
                "SELECT MAX(sequence) FROM iterations WHERE session_id = ?", key[:1]
            ).fetchone()
            sequences[key[0]].update(range(1, (last or 0) + 1))
        base.close()
    numbers = {session: frozenset(each) for session, each in sequences.items()}
    return LedgerContent(tuple(rows), tuple(ends), numbers, kept, refused, folded)


def _rows(base: sqlite3.Connection, ranks: Mapping[str, int]) -> Iterator[LedgerRow]:
    query = (
        "SELECT session_id, sequence, iteration, op_name, fate, reason,"
        " CASE joined WHEN 0 THEN path ELSE whole END FROM records"
    )
    for session, sequence, iteration, op, fate, reason, path in base.execute(query):
        name = name_of(ranks.get(session, -1), iteration, op, 0)
        if name is not None:
            name = TensorName(name.rank, name.life, name.iteration, name.number, -1)
        yield LedgerRow(session, sequence, name, fate, reason, path)


def _folded(base: sqlite3.Connection) -> Iterator[tuple[tuple[str, int], Counter[str]]]:
    query = "SELECT session_id, iteration, fate, reason, records FROM tallies ORDER BY 1, 2"
    rows = base.execute(query).fetchall()
    for key, some in groupby(rows, key=lambda row: row[:2]):
        sums: Counter[str] = Counter()
        for _, _, fate, reason, count in some:
            sums[reason or fate] += count
        yield key, sums


def tree(root: Path) -> tuple[list[FoundTensor], list[ListedManifest], list[str]]:
    """Return the tensors and rows of a tree, its manifests, and what its reader found odd."""
    seen = walk(root)
    files = [FoundTensor(str(root), e.relative, *judged(e)) for e in seen.entries]
    for table in seen.tables:
        files += _figures(root, table)
    return files, [*_manifests(seen)], [*seen.problems]


def judged(entry: Entry) -> tuple[TensorName | None, str]:
    """Return which tensor a file is, and why it is not that one after all."""
    name = name_of(entry.key.rank, entry.key.iteration, entry.op_name, entry.key.slot)
    if name is None:
        return None, ""
    try:
        found = load(entry)
    except (RankdumpError, OSError) as error:
        return name, f"cannot be read: {error}"
    return name, compared(found, tensor(name), shaped=not entry.member)


def compared(found: np.ndarray, due: np.ndarray, *, shaped: bool = True) -> str:
    """Return how an array differs from the one it should be; empty where it does not."""
    if found.dtype != due.dtype or (shaped and found.shape != due.shape):
        return f"{found.dtype}{found.shape} where {due.dtype}{due.shape} was dumped"
    if found.tobytes() == due.tobytes():
        return ""
    return "other elements than were dumped"


def _figures(root: Path, table: Table) -> Iterator[FoundTensor]:
    with table.path.open(newline="") as file:
        for row in csv.DictReader(file):
            name = name_of(table.rank, table.iteration, row["Op Name"], int(row["Slot"]))
            fault = ""
            if name is not None and (due := tensor(name)).size:
                pairs = [(row["Max Value"], due.max()), (row["Min Value"], due.min())]
                if not all(math.isclose(float(a), float(b), rel_tol=1e-4) for a, b in pairs):
                    fault = f"figures {pairs}"
            yield FoundTensor(str(root), table.relative, name, fault, row=True)


def _manifests(seen: Tree) -> Iterator[ListedManifest]:
    for each in seen.manifests:
        status = each.status
        yield ListedManifest(
            status.session_id,
            status.iteration,
            status.expected,
            status.kept_tensors,
            status.dropped,
            tuple(record.path for record in each.records),
        )


def balances(address: str) -> dict[tuple[str, int], tuple[int, int, int]]:
    """Return what a coordinator knows of the iterations of all jobs."""
    return {
        (i.session_id, i.iteration): (i.expected, i.kept_tensors, sum(i.dropped.values()))
        for i in fetch_job_status(address).iterations
        if i.complete
    }


def seen(
    folder: Path,
    states: Iterable[Path],
    roots: Iterable[Path],
    told: Mapping[tuple[str, int], tuple[int, int, int]],
    complaints: Iterable[str] = (),
) -> RunObservation:
    """Return the observations of a run; journals are in the folder."""
    known = lives(folder)
    files: list[FoundTensor] = []
    manifests: list[ListedManifest] = []
    odd = list(complaints)
    there = [root for root in roots if root.is_dir()]
    # A Python of its own for each: threads of gRPC must not be forked.
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for some, listed, problems in pool.map(tree, there):
            files += some
            manifests += listed
            odd += problems
    return RunObservation(
        known, ledger(states, known), tuple(files), tuple(manifests), told, tuple(odd)
    )
