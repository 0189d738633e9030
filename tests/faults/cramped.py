"""One agent on small disks that fill up and are given room again; for `unshare -rm`.

python -m faults.cramped FOLDER CASE: prints what became of three iterations, of which the second
was dumped while there was no room.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from faults.space import Disk
from faults.stand import EACH, MIB, Stand, wait_until


def tree_full(stand: Stand, tree: Disk, state: Disk) -> Callable[[], object]:
    """No byte is left for the tree."""
    del state
    assert tree.take_bytes()
    return lambda: sum(stand.of(2).dropped.values()) == EACH


def tree_without_inodes(stand: Stand, tree: Disk, state: Disk) -> Callable[[], object]:
    """No file more can be made in the tree."""
    del state
    assert tree.take_inodes()
    return lambda: sum(stand.of(2).dropped.values()) == EACH


def state_full(stand: Stand, tree: Disk, state: Disk) -> Callable[[], object]:
    """No byte is left for the ledger."""
    del tree
    assert state.take_bytes()
    return lambda: len(list(stand.root.rglob("*.npy*"))) > EACH


CASES = {each.__name__: each for each in (tree_full, tree_without_inodes, state_full)}


def main() -> None:
    folder, case = Path(sys.argv[1]), CASES[sys.argv[2]]
    tree = Disk(folder / "tree", size_bytes=64 * MIB, inodes=4096)
    state = Disk(folder / "state", size_bytes=64 * MIB, inodes=64)
    tree.mount()
    state.mount()
    stand = Stand(folder)
    with stand.session() as session:
        stand.play(session, 1)
        session.step(2)
        stand.settled(1)
        has_come = case(stand, tree, state)
        stand.play(session, 2)
        session.step(3)
        wait_until(has_come)
        tree.give_back()
        state.give_back()
        stand.play(session, 3)
    views = stand.settled(3)
    stand.wait_manifests([1, 2, 3])
    told = {
        "kept": [each.kept_tensors for each in views],
        "dropped": [dict(each.dropped) for each in views],
        "stored": stand.stored(),
    }
    stand.close()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
