"""Room 14: reads a finished or growing tree, offline. Needs no daemon, never writes."""

from rankdump.reader.balance import damaged, faults, findings, status, status_of
from rankdump.reader.bins import described, load_member
from rankdump.reader.blocks import FileElements, Opened, opened
from rankdump.reader.collector import collector_paused
from rankdump.reader.columns import Entries

# The public name is the one that `h5py` and others of its kind have.
from rankdump.reader.dump import Dump
from rankdump.reader.dump import open_dump as open  # noqa: A004
from rankdump.reader.entry import Described, Entry, Table, Tree
from rankdump.reader.figures import Figures
from rankdump.reader.foreign import check_ours
from rankdump.reader.hints import read_hints
from rankdump.reader.ir import Frame, IrOperator
from rankdump.reader.load import Facts, facts, facts_of, load, load_file
from rankdump.reader.locate import locate
from rankdump.reader.observe import disk_room, observe
from rankdump.reader.order import PublishedOrder, read_order
from rankdump.reader.query import Filters, Named, Query, selected
from rankdump.reader.ranges import ranges
from rankdump.reader.retired import retired_sentences
from rankdump.reader.source import Origin, Search, graph_files
from rankdump.reader.statistics import Statistics, statistics
from rankdump.reader.survey import Survey, Surveyed
from rankdump.reader.tables import named
from rankdump.reader.walk import walk

__all__ = [
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
    "Named",
    "Opened",
    "Origin",
    "PublishedOrder",
    "Query",
    "Search",
    "Statistics",
    "Survey",
    "Surveyed",
    "Table",
    "Tree",
    "check_ours",
    "collector_paused",
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
