"""Tensors from the formats of an Ascend chip into those of people, and back. Pure.

Facts: ascend-formats.md 3.3 to 3.5. A format cuts one axis into blocks of C0 elements, pads the
last block and puts the blocks elsewhere; nothing is ever computed. So a conversion is a view of
the same bytes with its axes in another order, cropped, and one copy of that view.
"""

from rankdump.contract.formats.convert import (
    CONVERSIONS,
    TARGETS,
    Converted,
    convert,
    targets_of,
)
from rankdump.contract.formats.origin import Origin

__all__ = ["CONVERSIONS", "TARGETS", "Converted", "Origin", "convert", "targets_of"]
