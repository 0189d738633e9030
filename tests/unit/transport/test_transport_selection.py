"""Place of a granted slab: the agent's path, or beside the agent's socket."""

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
def test_slab_place_in_a_container_is_beside_the_socket(mounted: Path, form: str):
    granted = SlabPlace("/run/elsewhere/slabs/session.slab", 4096)
    found = resolve_slab_place(granted, form.format(mounted))
    assert found == SlabPlace(f"{mounted}/slabs/session.slab", 4096)


def test_slab_place_prefers_the_agents_path(mounted: Path, tmp_path: Path):
    own = tmp_path / "slabs/session.slab"
    own.parent.mkdir()
    own.touch()
    granted = SlabPlace(str(own), 4096)
    assert resolve_slab_place(granted, f"unix:{mounted}/agent.sock") == granted


@pytest.mark.parametrize("address", ["unix:/nowhere/agent.sock", "127.0.0.1:4000"])
def test_slab_place_that_does_not_exist_is_unchanged(address: str):
    granted = SlabPlace("/run/elsewhere/slabs/session.slab", 4096)
    assert resolve_slab_place(granted, address) == granted
