"""Room 14: reads a finished or growing tree, offline. Needs no daemon, never writes."""

from rankdump.reader.balance import damaged, findings, status, status_of
from rankdump.reader.load import Facts, facts, load, load_file
from rankdump.reader.order import PublishedOrder, read_order
from rankdump.reader.ranges import ranges
from rankdump.reader.statistics import Statistics, statistics
from rankdump.reader.walk import Entry, Tree, locate, walk

__all__ = [
    "Entry",
    "Facts",
    "PublishedOrder",
    "Statistics",
    "Tree",
    "damaged",
    "facts",
    "findings",
    "load",
    "load_file",
    "locate",
    "ranges",
    "read_order",
    "statistics",
    "status",
    "status_of",
    "walk",
]
