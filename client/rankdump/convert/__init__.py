"""Turns CANN's `bin` files into npy files, or bare elements, in the formats of people.

Names, cropping and what is left out are msaccucmp's (ascend-formats.md 3.1 to 3.3). A file that is
damaged is reported and the rest converted; every output appears under its name at one blow.
"""

from rankdump.convert.out import make_folder, one_line, record
from rankdump.convert.request import Failure, Outcome, Request, Summary
from rankdump.convert.run import convert
from rankdump.convert.sources import Found, find

__all__ = [
    "Failure",
    "Found",
    "Outcome",
    "Request",
    "Summary",
    "convert",
    "find",
    "make_folder",
    "one_line",
    "record",
]
