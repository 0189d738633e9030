"""What a tree says of iterations that were removed from it on purpose."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from rankdump.contract.errors import DamagedError
from rankdump.contract.layout.mindspore_sync import METADATA_FOLDER
from rankdump.contract.retired import RETIRED_FILE, Retired
from rankdump.reader.ranges import ranges


def read_retired(root: Path, ranks: Iterable[str], problems: list[str]) -> frozenset[Retired]:
    """Return what was removed from the folders of ranks; what cannot be read is a problem."""
    found: set[Retired] = set()
    for rank in ranks:
        path = root / rank / METADATA_FOLDER / RETIRED_FILE
        try:
            lines = path.read_bytes().decode(errors="replace").split("\n")
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(f"{path}: cannot be read: {error.strerror}")
            continue
        # Behind the last end of a line is nothing, or a line that is being written.
        for line in lines[:-1]:
            try:
                found.add(Retired.from_line(line))
            except DamagedError as error:
                problems.append(f"{path}: {error}")
    return frozenset(found)


def retired_sentences(gone: Iterable[tuple[int, int]]) -> list[str]:
    """Return what to say of ranks with iterations that were removed; ranks alike in one."""
    by_rank: defaultdict[int, list[int]] = defaultdict(list)
    for rank, iteration in gone:
        by_rank[rank].append(iteration)
    by_iterations: defaultdict[str, list[int]] = defaultdict(list)
    for rank, iterations in by_rank.items():
        by_iterations[ranges(iterations)].append(rank)
    return [
        f"rank {ranges(ranks)}: iteration {iterations} is retired: removed by age or for room"
        for iterations, ranks in sorted(by_iterations.items())
    ]
