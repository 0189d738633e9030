"""Check of the table of statistics: every page of its files, remains of killed writers, and whether
its rows are those of the manifests as they are now. Imports pyarrow only for a tree with a table.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rankdump._analysis.fsck.damage import DamageKind, FileDamage
from rankdump._core.tree_root import STATE_FOLDER

_ADVICE = "it can be removed, and `rankdump index` makes it again"


def check_statistics_table(root: Path) -> tuple[list[FileDamage], list[str]]:
    """Return the damage to the files of a table, and sentences about what it lacks."""
    if not (root / STATE_FOLDER / "table").is_dir():
        return [], []
    try:
        from rankdump._analysis.table_index import compare_with_tree
    except ModuleNotFoundError:
        return [], ["the table of statistics was not checked: pip install 'rankdump[table]'"]
    damages = [*_list_remains(root), *_list_damaged(root)]
    lag = str(compare_with_tree(root))
    return damages, [f"the table {lag}: run rankdump index {root}"] if lag else []


def _list_remains(root: Path) -> Iterator[FileDamage]:
    """Yield what killed writers left; nothing while another process writes the table."""
    from rankdump._analysis.table.table_files import list_table, lock_table
    from rankdump._analysis.table.tree_access import LocalTree
    from rankdump.errors import UnavailableError

    access = LocalTree(root)
    with suppress(UnavailableError, OSError), lock_table(access, patience_s=0):
        for path in list_table(access, [], now_s=time.time()).remains:
            text = "a writer of the table of statistics died, and its rows are in other files"
            yield FileDamage(DamageKind.LEFTOVER, path, text, mendable=True)


def _list_damaged(root: Path) -> Iterator[FileDamage]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from rankdump._analysis.table.table_files import list_table
    from rankdump._analysis.table.tree_access import LocalTree

    listing = list_table(LocalTree(root), problems := [])
    for file, problem in zip(listing.damaged, problems, strict=True):
        text = problem.removeprefix(f"{root / file.paths[0]}: ")
        yield FileDamage(DamageKind.TORN, file.paths[0], f"{text}; {_ADVICE}", mendable=True)
    for path in (path for file in listing.files for path in file.paths):
        try:
            with pq.ParquetFile(root / path, page_checksum_verification=True) as opened:
                for group in range(opened.num_row_groups):
                    opened.read_row_group(group)
        except (OSError, pa.ArrowException) as error:
            reason = str(error).partition("\n")[0]
            text = f"a page cannot be read: {reason}; {_ADVICE}"
            yield FileDamage(DamageKind.TORN, path, text, mendable=True)
