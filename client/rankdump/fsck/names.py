"""Files that only a `mapping.csv` names, in a tree that no manifest speaks of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from rankdump.contract.layout.folders import Names
from rankdump.contract.layout.place import MAPPING_FILE
from rankdump.contract.layout.reading import absent_in
from rankdump.fsck.values import Damage, Kind, Seen
from rankdump.reader.names import long_names


def check_names(root: Path, everything: Iterable[Seen]) -> Iterator[Damage]:
    """Yield the files that are named and not there; DamagedError when the names cannot be read."""
    there: defaultdict[str, list[Seen]] = defaultdict(list)
    for seen in everything:
        there[seen.path.rpartition("/")[0]].append(seen)
    for where, files in there.items():
        mapping = next((seen for seen in files if seen.name == MAPPING_FILE), None)
        folder = mapping.folder if mapping is not None and mapping.regular else None
        if folder is not None and folder.names is not Names.NONE:
            names = long_names(root / where / MAPPING_FILE)
            for name in absent_in(folder, names, {seen.name for seen in files}):
                text = f"{where}/{MAPPING_FILE} names it, and it is not there"
                yield Damage(Kind.MISSING, f"{where}/{name}", text)
