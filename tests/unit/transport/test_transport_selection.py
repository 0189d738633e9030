"""Where a rank finds the slab it was granted: as the agent says, or beside the agent's socket."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankdump._core.session_protocol import SlabPlace
from rankdump._transport.agent_client import resolve_slab_place


@pytest.fixture
def mounted(tmp_path: Path) -> Path:
    """The agent's runtime folder as a container sees it."""
    slab = tmp_path / "mounted/slabs/session.slab"
    slab.parent.mkdir(parents=True)
    slab.touch()
    return tmp_path / "mounted"


@pytest.mark.parametrize("form", ["unix:{}/agent.sock", "unix://{}/agent.sock"])
def test_a_container_sees_the_runtime_folder_elsewhere(mounted: Path, form: str):
    granted = SlabPlace("/run/elsewhere/slabs/session.slab", 4096)
    found = resolve_slab_place(granted, form.format(mounted))
    assert found == SlabPlace(f"{mounted}/slabs/session.slab", 4096)


def test_where_the_agent_says_comes_first(mounted: Path, tmp_path: Path):
    own = tmp_path / "slabs/session.slab"
    own.parent.mkdir()
    own.touch()
    granted = SlabPlace(str(own), 4096)
    assert resolve_slab_place(granted, f"unix:{mounted}/agent.sock") == granted


@pytest.mark.parametrize("address", ["unix:/nowhere/agent.sock", "127.0.0.1:4000"])
def test_a_slab_that_is_nowhere_keeps_its_name(address: str):
    granted = SlabPlace("/run/elsewhere/slabs/session.slab", 4096)
    assert resolve_slab_place(granted, address) == granted
