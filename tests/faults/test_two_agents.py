"""Two agents at one folder: the second one refuses, or leaves alone what is the first one's."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from faults.stand import EACH, Stand
from integration.conftest import Embedded, Rank

from rankdump.errors import ConfigError


def test_state_folder_has_one_agent(stand: Stand, tmp_path: Path):
    with pytest.raises(ConfigError, match="no other agent"):
        Embedded(stand.folder)


def test_new_slab_is_kept_when_another_agent_starts(stand: Stand):
    """Law: agents with one folder for shared memory do not take each other's away."""
    rank = Rank(stand.agent.address, stand.root, wants_slab=True)
    granted = Path(rank.open().slab.path)
    assert granted.exists()
    other = stand.folder / "other"
    other.mkdir()
    with contextlib.suppress(ConfigError):
        Embedded(other, runtime_dir=str(stand.folder), slab_bytes=1 << 20).stop()
    assert granted.exists()
    rank.close()
    with stand.session() as session:
        stand.play(session, 0)
    assert stand.settled(1)[0].kept_tensors == EACH
