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
    """None when the plan keeps no figures."""
    figures: int | None
    """How many figures a record brings in the place of its elements; None when it brings these."""
    items: tuple[str, ...] | None
    """Figures that are computed here; None when none are."""
    synced: bool
    """A record counts as safe once it would survive a power loss."""


def outlet_of(request: SessionRequest, plan: DumpPlan) -> Outlet:
    """Return the rooms of a session whose plan has been vetted."""
    output, content = plan.output, plan.content
    profile = PROFILES[output.profile]
    synced = plan.delivery.durability == "synced"
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
        tables=Tables(tree, statistic_csv.header(items)) if content.tabulated else None,
        figures=len(items) if content.saved == "statistic" else None,
        items=items if content.saved == "full" else None,
        synced=synced,
    )
