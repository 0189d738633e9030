"""Two agents on one folder: the second is rejected, or keeps the first one's files."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from faults.agent_rig import EACH, AgentRig
from integration.conftest import EmbeddedAgent, WireRank

from rankdump.errors import UnavailableError


def test_state_folder_has_one_agent(rig: AgentRig, tmp_path: Path):
    with pytest.raises(UnavailableError, match="used by another agent"):
        EmbeddedAgent(rig.folder)


def test_new_slab_is_kept_when_another_agent_starts(rig: AgentRig):
    """Law: agents with one folder for shared memory do not take each other's away."""
    rank = WireRank(rig.agent.address, rig.root, wants_slab=True)
    granted = Path(rank.open().slab.path)
    assert granted.exists()
    other = rig.folder / "other"
    other.mkdir()
    with contextlib.suppress(UnavailableError):
        EmbeddedAgent(other, runtime_dir=str(rig.folder), slab_bytes=1 << 20).stop()
    assert granted.exists()
    rank.close()
    with rig.session() as session:
        rig.play(session, 0)
    assert rig.settled(1)[0].kept_tensors == EACH
