"""The rooms through which one session's records reach its tree, set up as its plan says."""

from __future__ import annotations

import stat
from dataclasses import dataclass

from rankdump.codec import Codec, codec_named
from rankdump.contract.exchange import SessionRequest
from rankdump.contract.layout.layouts import LAYOUTS, Layout
from rankdump.contract.layout.place import Place, Stand
from rankdump.contract.layout.profile import PROFILES
from rankdump.contract.plan import DumpPlan
from rankdumpd.agent.claims import claimed
from rankdumpd.agent.holds import Hold
from rankdumpd.agent.join import Joiner
from rankdumpd.agent.lines import Lines, lines_of
from rankdumpd.agent.names import Names
from rankdumpd.agent.stacks import StackFile
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
    hold: Hold
    writer: Writer
    joiner: Joiner | None
    """None where a tensor has a file of its own for ever."""
    tables: Tables | None
    """None when figures neither come nor are computed."""
    lines: Lines
    stacks: StackFile | None
    """None where no file says where calls came from."""
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
        # As the real tool has it: only tensors are read-only.
        growing_mode=output.file_mode | stat.S_IWUSR if layout.api is not None else None,
        synced=synced,
    )
    stand = Stand(output.root, request.device, output.started, PROFILES[output.profile])
    if layout.timed:
        stand = claimed(tree, stand, job_id=request.job_id, rank=request.rank)
    lines = lines_of(plan, layout, stand, request.rank)
    names = Names(tree)
    target = request.device_target
    return Outlet(
        layout=layout,
        stand=stand,
        codec=codec,
        tree=tree,
        hold=Hold(tree),
        writer=Writer(tree, names, layout=layout, stand=stand, lines=lines, device_target=target),
        joiner=Joiner(tree, names, codec, layout) if output.file_format == "bin" else None,
        tables=_tables(tree, names, lines) if content.tabulated or degrades else None,
        lines=lines,
        stacks=_stacks(tree, layout, request.rank),
        figures=len(lines.items),
        elements=content.saved != "statistic",
        degrades=degrades,
        items=lines.items if content.saved == "full" else None,
        synced=synced,
    )


def _tables(tree: Tree, names: Names, lines: Lines) -> Tables:
    return Tables(tree, names, lines.header, looks_back=False)


def _stacks(tree: Tree, layout: Layout, rank: int) -> StackFile | None:
    if layout.api is None:
        return None
    place = Place(layout.rank_folder(rank), layout.api.stacks)
    return StackFile(tree, place, layout.api.framework)
