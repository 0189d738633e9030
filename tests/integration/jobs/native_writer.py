"""Copies a tree as MindSpore writes one, file by file: slowly, in pieces, by rename.

    python native_writer.py FROM TO SEED

Files are made read-only once they are whole; tables are opened and closed for every row. Prints how
many files it made: a table that was removed before its next row is made again.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path


def append(path: Path, row: bytes) -> bool:
    """Append a row to a table; return whether the table was made for it."""
    while True:
        made = True
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            made = False
            try:
                path.chmod(0o600)
                descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
            except FileNotFoundError:  # it was removed meanwhile
                continue
        with os.fdopen(descriptor, "ab") as file:
            file.write(row)
            os.fchmod(descriptor, 0o400)
        return made


def write(path: Path, data: bytes, chance: random.Random) -> int:
    """Write a file; return how often it was made."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.suffix == ".csv":
        return sum(append(path, row) for row in data.splitlines(keepends=True))
    how = chance.choice(["whole", "pieces", "moved"])
    target = path.with_name(f"{path.name[:200]}.part") if how == "moved" else path
    with target.open("wb", buffering=0) as file:
        step = max(1, len(data) // 7) if how == "pieces" else max(1, len(data))
        for at in range(0, len(data), step):
            file.write(data[at : at + step])
            os.sched_yield()
    target.chmod(0o400)
    if target != path:
        target.rename(path)
    return 1


def main() -> None:
    origin, target, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    chance = random.Random(seed)
    files = [path for path in sorted(origin.rglob("*")) if path.is_file()]
    chance.shuffle(files)
    print(
        sum(write(target / path.relative_to(origin), path.read_bytes(), chance) for path in files)
    )


main()
