"""The rooms through which one session's records reach its tree, set up as its plan says."""

from __future__ import annotations

from dataclasses import dataclass

from rankdump.codec import Codec, codec_named
from rankdump.contract.exchange import SessionRequest
from rankdump.contract.layout import operator_csv, statistic_csv
from rankdump.contract.layout.layouts import LAYOUTS, Layout
from rankdump.contract.layout.place import Stand
from rankdump.contract.layout.profile import PROFILES
from rankdump.contract.plan import Content, DumpPlan
from rankdumpd.agent.claims import claimed
from rankdumpd.agent.join import Joiner
from rankdumpd.agent.names import Names
from rankdumpd.agent.tabulate import Tables
from rankdumpd.agent.tree import Tree
from rankdumpd.agent.write import Writer


@dataclass(frozen=True, slots=True)
class Outlet:
    """What turns records of one session into files."""

    layout: Layout
    stand: Stand
    codec: Codec
    tree: Tree
    writer: Writer
    joiner: Joiner | None
    """None where a tensor has a file of its own for ever."""
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
    output, content, delivery = plan.output, plan.content, plan.delivery
    layout = LAYOUTS[output.layout]
    codec, synced = codec_named(output.codec), delivery.durability == "synced"
    degrades = delivery.on_full == "statistic"
    tree = Tree(
        output.root,
        file_mode=output.file_mode,
        folder_mode=output.folder_mode,
        synced=synced,
    )
    stand = Stand(output.root, request.device, output.started, PROFILES[output.profile])
    if layout.timed:
        stand = claimed(tree, stand, job_id=request.job_id, rank=request.rank)
    header, items = _columns(content, stand)
    names = Names(tree)
    target = request.device_target
    return Outlet(
        layout=layout,
        stand=stand,
        codec=codec,
        tree=tree,
        writer=Writer(tree, names, layout=layout, stand=stand, device_target=target),
        joiner=Joiner(tree, names, codec, layout) if output.file_format == "bin" else None,
        tables=Tables(tree, names, header) if content.tabulated or degrades else None,
        figures=len(items),
        elements=content.saved != "statistic",
        degrades=degrades,
        items=items if content.saved == "full" else None,
        synced=synced,
    )


def _columns(content: Content, stand: Stand) -> tuple[str, tuple[str, ...]]:
    """Return the header of tables and the figures in their rows."""
    if content.tables == "operator":
        return operator_csv.header(content.statistics), content.statistics
    items = statistic_csv.items_of(content.statistics, stand.profile)
    return statistic_csv.header(items), items
