"""Which way frames go after each answer of the agent: its slab, or the stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rankdump.contract.errors import RankdumpError
from rankdump.contract.exchange import SessionGrant, SlabPlace
from rankdump.ship.depot import Depot
from rankdump.ship.ring import Ring


class Way:
    """Opens and gives up slabs; for the thread that connects."""

    def __init__(
        self, depot: Depot, address: str, *, wanted: bool, on_stream: Callable[[str], None]
    ) -> None:
        self._depot, self._address = depot, address
        self._wanted = wanted
        self._on_stream = on_stream
        self._given_up: set[tuple[int, int]] = set()
        self._avoid = ""

    def choose(self, grant: SessionGrant) -> None:
        """Go on with the slab in use, or move what is not accounted for to where it goes now."""
        ring, place = self._depot.ring, grant.slab and seen_from_here(grant.slab, self._address)
        if ring is not None and place is not None and not self._avoid and ring.is_at(place):
            if not ring.broken_for(grant.acknowledged):
                return
            self._avoid = "the agent began anew inside a large tensor"
        if ring is not None:
            self._given_up.add(ring.identity)
        self._depot.give_up_ring()
        reason = self._take(place, had_one=ring is not None) if self._wanted else ""
        if reason:
            self._on_stream(reason)

    def avoid_slabs(self, reason: str) -> None:
        """Use the stream from the next connection on."""
        self._avoid = reason

    def _take(self, place: SlabPlace | None, *, had_one: bool) -> str:
        """Return what there is to say of the stream's being used; empty when there is nothing."""
        if self._avoid:
            return self._avoid
        if place is None:
            # An agent that never has any is as its owner wants it.
            return "the agent grants none any more" if had_one else ""
        try:
            ring = Ring(place)
        except (OSError, RankdumpError) as error:
            return str(error)
        if ring.identity in self._given_up:
            # Its lock would end with the last view of the earlier mapping.
            ring.close()
            return f"{place.path} was given up before"
        self._depot.take_ring(ring)
        return ""


def seen_from_here(place: SlabPlace, address: str) -> SlabPlace:
    """Return where this process finds a slab, given where it found the agent's socket.

    A container may see the agent's runtime folder, with socket and slabs, at another path.
    """
    granted = Path(place.path)
    if granted.exists() or not address.startswith("unix:"):
        return place
    socket = Path(address.removeprefix("unix:").removeprefix("//"))
    # The slabs of one worker of several stand a folder deeper.
    for depth in (2, 3):
        beside = socket.parent.joinpath(*granted.parts[-depth:])
        if beside.exists():
            return replace(place, path=str(beside))
    return place
