"""What `op_debug_mode` makes of the other settings. Pure.

Facts: mindspore-dump.md 1.3 (cross-key rules) and 1.9. Each setting that gives way is noted.
"""

from __future__ import annotations

from dataclasses import replace

from rankdump.contract.dialect.common import Common
from rankdump.contract.dialect.e2e import EndToEnd
from rankdump.contract.dialect.keys import COMMON, E2E
from rankdump.contract.dialect.notes import Notes
from rankdump.contract.plan import Iterations, Operators, Trigger

_OVERFLOW = "op_debug_mode looks for overflow in every operator"
_INPUTS = "op_debug_mode 4 writes the inputs of the operator that raised"


def trigger_of(debug_mode: int) -> Trigger:
    """Return what makes an operator's tensors be kept."""
    return "always" if debug_mode == 0 else "exception" if debug_mode == 4 else "overflow"


def settled(common: Common, e2e: EndToEnd, notes: Notes) -> tuple[Common, EndToEnd]:
    """Return both sections as they are under the debug mode."""
    trigger = trigger_of(common.debug_mode)
    if trigger == "overflow":
        return _overflow(common, notes), e2e
    if trigger == "exception":
        return _exception(common, notes), _unsampled(e2e, notes)
    return common, e2e


def _overflow(common: Common, notes: Notes) -> Common:
    if common.debug_mode != 3:
        notes.add(f"{COMMON}.op_debug_mode", common.debug_mode, "becomes 3: all overflow is one")
    if common.dump_mode != 0:
        notes.add(f"{COMMON}.dump_mode", common.dump_mode, f"becomes 0: {_OVERFLOW}")
    if common.sides != 0:
        reason = "becomes 0: of an operator with overflow both sides are written"
        notes.add(f"{COMMON}.input_output", common.sides, reason)
    return replace(common, dump_mode=0, operators=Operators(), sides=0)


def _exception(common: Common, notes: Notes) -> Common:
    if common.iterations.spans is not None:
        reason = 'becomes "all": nobody knows when an operator will raise'
        notes.add(f"{COMMON}.iteration", common.iterations.text, reason)
    if common.saved != "tensor":
        notes.add(f"{COMMON}.saved_data", common.saved, f'becomes "tensor": {_INPUTS}')
    if common.sides == 2:
        notes.add(f"{COMMON}.input_output", common.sides, f"becomes 1: {_INPUTS}")
    if common.dump_mode != 0:
        reason = "watches only the selected operators; from 2.4 on MindSpore watches every one"
        notes.add(f"{COMMON}.dump_mode", common.dump_mode, reason)
    sides = 1 if common.sides == 2 else common.sides
    return replace(common, iterations=Iterations(), saved="tensor", sides=sides)


def _unsampled(e2e: EndToEnd, notes: Notes) -> EndToEnd:
    if e2e.sample_elements:
        notes.add(f"{E2E}.sample_mode", 1, "becomes 0: op_debug_mode 4 writes whole tensors")
    return replace(e2e, sample_elements=0)
