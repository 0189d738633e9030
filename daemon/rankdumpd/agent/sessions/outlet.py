"""The rooms through which one session's records reach its tree, set up as its plan says."""

from __future__ import annotations

from dataclasses import dataclass

from rankdump.codec import Codec, codec_named
from rankdump.contract.exchange import SessionRequest
from rankdump.contract.layout import statistic_csv
from rankdump.contract.layout.profile import PROFILES, Profile
from rankdump.contract.plan import DumpPlan
from rankdumpd.agent.tabulate import Tables
from rankdumpd.agent.tree import Tree
from rankdumpd.agent.write import Writer


@dataclass(frozen=True, slots=True)
class Outlet:
    """What turns records of one session into files."""

    profile: Profile
    codec: Codec
    tree: Tree
    writer: Writer
    tables: Tables | None
    """None when figures neither come nor are computed."""
    figures: int
    """How many there are of a tensor that comes without its elements."""
    elements: bool
    """Tensors come with their elements."""
    degrades: bool
    """A tensor for which the rank had no room comes as figures all the same."""
    items: tuple[str, ...] | None
    """Figures that are computed here; None when none are."""
    synced: bool
    """A record counts as safe once it would survive a power loss."""


def outlet_of(request: SessionRequest, plan: DumpPlan) -> Outlet:
    """Return the rooms of a session whose plan has been vetted."""
    output, content = plan.output, plan.content
    profile = PROFILES[output.profile]
    synced = plan.delivery.durability == "synced"
    degrades = plan.delivery.on_full == "statistic"
    tabulated = content.tabulated or degrades
    items = statistic_csv.items_of(content.statistics, profile)
    tree = Tree(
        output.root,
        file_mode=output.file_mode,
        folder_mode=output.folder_mode,
        synced=synced,
    )
    return Outlet(
        profile=profile,
        codec=codec_named(output.codec),
        tree=tree,
        writer=Writer(tree, profile=profile, device_target=request.device_target),
        tables=Tables(tree, statistic_csv.header(items)) if tabulated else None,
        figures=len(items),
        elements=content.saved != "statistic",
        degrades=degrades,
        items=items if content.saved == "full" else None,
        synced=synced,
    )
