"""One agent on small disks that fill up and get space again; for `unshare -rm`.

python -m faults.full_disks FOLDER CASE: prints what became of three iterations, of which the second
was dumped while there was no space.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from faults.agent_rig import EACH, MIB, AgentRig, wait_until
from faults.shrinkable_disk import ShrinkableDisk


def tree_full(rig: AgentRig, tree: ShrinkableDisk, state: ShrinkableDisk) -> Callable[[], object]:
    """No byte is left for the tree."""
    del state
    assert tree.take_bytes()
    return lambda: sum(rig.of(2).dropped.values()) == EACH


def tree_without_inodes(
    rig: AgentRig, tree: ShrinkableDisk, state: ShrinkableDisk
) -> Callable[[], object]:
    """No file more can be made in the tree."""
    del state
    assert tree.take_inodes()
    return lambda: sum(rig.of(2).dropped.values()) == EACH


def state_full(rig: AgentRig, tree: ShrinkableDisk, state: ShrinkableDisk) -> Callable[[], object]:
    """No byte is left for the ledger."""
    del tree
    assert state.take_bytes()
    return lambda: len(list(rig.root.rglob("*.npy*"))) > EACH


CASES = {each.__name__: each for each in (tree_full, tree_without_inodes, state_full)}


def main() -> None:
    folder, case = Path(sys.argv[1]), CASES[sys.argv[2]]
    tree = ShrinkableDisk(folder / "tree", size_bytes=64 * MIB, inodes=4096)
    state = ShrinkableDisk(folder / "state", size_bytes=64 * MIB, inodes=64)
    tree.mount()
    state.mount()
    rig = AgentRig(folder)
    with rig.session() as session:
        rig.play(session, 1)
        session.step(2)
        rig.settled(1)
        has_come = case(rig, tree, state)
        rig.play(session, 2)
        session.step(3)
        wait_until(has_come)
        tree.give_back()
        state.give_back()
        rig.play(session, 3)
    views = rig.settled(3)
    rig.wait_manifests([1, 2, 3])
    told = {
        "kept": [each.kept_tensors for each in views],
        "dropped": [dict(each.dropped) for each in views],
        "stored": rig.stored(),
    }
    rig.close()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
