"""Public reader of dump trees, which may be complete or growing. It needs no daemon and never
writes.
"""

from __future__ import annotations

from rankdump._analysis.reader.coordinator_files import PublishedOrder, read_hints, read_order
from rankdump._analysis.reader.dump import Dump, check_ours

# The name `open` is used as in h5py and similar libraries.
from rankdump._analysis.reader.dump import open_dump as open  # noqa: A004
from rankdump._analysis.reader.manifests import retired_sentences
from rankdump._analysis.reader.query import Filters, Named, Query, selected
from rankdump._analysis.reader.run_cards import RankCard
from rankdump._analysis.reader.source_lines import Frame, IrOperator, Origin, Search, graph_files
from rankdump._analysis.reader.table_rows import named
from rankdump._analysis.reader.tensor_loader import (
    Facts,
    FileElements,
    Opened,
    described,
    facts,
    facts_of,
    load,
    load_file,
    load_member,
    opened,
)
from rankdump._analysis.reader.tensor_statistics import Statistics, Survey, Surveyed, statistics
from rankdump._analysis.reader.tree import Described, Entries, Entry, Figures, Table, Tree
from rankdump._analysis.reader.tree_status import damaged, faults, findings, status, status_of
from rankdump._analysis.reader.tree_usage import disk_room, observe
from rankdump._analysis.reader.tree_walk import collector_paused, locate, walk
from rankdump._core.number_ranges import ranges
from rankdump._core.run_card import ModelSummary, RunCard
from rankdump._layout.device_formats import ConvertedTensor, OriginalLayout, convert_format

__all__ = [
    "ConvertedTensor",
    "Described",
    "Dump",
    "Entries",
    "Entry",
    "Facts",
    "Figures",
    "FileElements",
    "Filters",
    "Frame",
    "IrOperator",
    "ModelSummary",
    "Named",
    "Opened",
    "Origin",
    "OriginalLayout",
    "PublishedOrder",
    "Query",
    "RankCard",
    "RunCard",
    "Search",
    "Statistics",
    "Survey",
    "Surveyed",
    "Table",
    "Tree",
    "check_ours",
    "collector_paused",
    "convert_format",
    "damaged",
    "described",
    "disk_room",
    "facts",
    "facts_of",
    "faults",
    "findings",
    "graph_files",
    "load",
    "load_file",
    "load_member",
    "locate",
    "named",
    "observe",
    "open",
    "opened",
    "ranges",
    "read_hints",
    "read_order",
    "retired_sentences",
    "selected",
    "statistics",
    "status",
    "status_of",
    "walk",
]
