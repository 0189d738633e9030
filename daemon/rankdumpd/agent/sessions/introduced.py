"""What describes a rank beside its tensors, there before the first of them."""

from __future__ import annotations

from rankdump.contract.exchange import SessionRequest
from rankdumpd.agent import metadata
from rankdumpd.agent.sessions import Session


def introduce(session: Session, request: SessionRequest) -> None:
    """Hold the tree, and write a rank's metadata where it is not there.

    May be repeated after an OSError.
    """
    outlet = session.outlet
    outlet.hold.take()
    if outlet.layout.api is not None:
        outlet.tree.make(f"{outlet.layout.rank_folder(request.rank)}/{outlet.layout.api.folder}")
    else:
        metadata.introduce(outlet.tree, request, session.plan, outlet.stand.profile)
