"""A parcel to its file: examined, then linked to the same tensor or encoded and written."""

from __future__ import annotations

from rankdump.contract.errors import DamagedError
from rankdumpd.agent.binhead import MOST_SLOTS
from rankdumpd.agent.dedup import Originals
from rankdumpd.agent.elements import CORRUPTED, loaded
from rankdumpd.agent.encode import encode, encode_bin, examine, is_corrupted
from rankdumpd.agent.sessions.outlet import Outlet
from rankdumpd.agent.values import Outcome, Parcel, dropped


def filed(parcel: Parcel, outlet: Outlet, originals: Originals) -> Outcome:
    """Return what became of a tensor of the session that has this outlet."""
    try:
        data = loaded(parcel.data)
    except DamagedError:
        return dropped(parcel.ticket, parcel.head, CORRUPTED)
    record = examine(parcel, data, outlet.items, exact=outlet.layout.api is not None)
    if is_corrupted(parcel, record):
        return dropped(parcel.ticket, parcel.head, CORRUPTED)
    if outlet.joiner:
        if parcel.head.kind.slot >= MOST_SLOTS:
            return dropped(parcel.ticket, parcel.head, "slot_too_high")
        return outlet.writer.write(encode_bin(record, data, outlet.codec, outlet.layout))
    return originals.once(
        record,
        f"{outlet.codec.name} {outlet.tree.kind}",
        link=lambda original: outlet.writer.link(record, original),
        write=lambda: outlet.writer.write(encode(record, data, outlet.codec)),
    )
