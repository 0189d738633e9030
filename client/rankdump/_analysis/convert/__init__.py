"""Conversion of CANN's bin files to npy files, or to bare elements, in common tensor formats.
Names, cropping and omissions are those of msaccucmp (Ascend/msprobe). A damaged file is reported
and the others are converted; an output gets its name when it is complete.
"""

from __future__ import annotations

from rankdump._analysis.convert.conversion import convert_files
from rankdump._analysis.convert.folders import (
    ConversionSources,
    escape_line,
    find_bin_files,
    make_output_folder,
    write_result_lists,
)
from rankdump._analysis.convert.request import (
    ConversionFailure,
    ConversionOutcome,
    ConversionRequest,
    ConversionSummary,
)

__all__ = [
    "ConversionFailure",
    "ConversionOutcome",
    "ConversionRequest",
    "ConversionSources",
    "ConversionSummary",
    "convert_files",
    "escape_line",
    "find_bin_files",
    "make_output_folder",
    "write_result_lists",
]
