"""The section `e2e_dump_settings`: synchronous dump and how it computes. Pure.

Facts: mindspore-dump.md 1.8. On CPU and GPU MindSpore dumps synchronously whatever is said here;
rankdump takes the file at its word on any device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from rankdump.contract.dialect.keys import E2E
from rankdump.contract.dialect.notes import Notes
from rankdump.contract.dialect.section import Section
from rankdump.contract.errors import MISSING
from rankdump.contract.plan import Precision

_FLAG = "true or false"
_SAMPLE_MODES = "0 (off) or 1 (on)"
_SAMPLE_NUMBERS = "a number from 1"
_DEFAULT_SAMPLE = 100
_ASYNCHRONOUS = (
    "asks for asynchronous dump: the tree of Ascend is written, on any device; on CPU and GPU "
    "MindSpore would dump synchronously all the same"
)


@dataclass(frozen=True, slots=True)
class EndToEnd:
    """What `e2e_dump_settings` says; the defaults are those of a file without the section."""

    enabled: bool = False
    kernel_arguments: bool = False
    on_device: bool = False
    precision: Precision = "high"
    sample_elements: int = 0
    """To how many elements a tensor is cut; 0 cuts none."""


def parse_e2e(body: Mapping[str, object], *, file: str, notes: Notes) -> EndToEnd:
    """Return the settings; the first fault in MindSpore's own order is the one reported."""
    if E2E not in body:
        notes.add(E2E, MISSING, f"this {_ASYNCHRONOUS}")
        return EndToEnd()
    section = Section.of(body, E2E, file=file, notes=notes)
    section.require({"enable": _FLAG, "trans_flag": _FLAG})
    enabled = section.flag("enable")
    if not enabled:
        section.note("enable", _ASYNCHRONOUS)
    if not section.flag("trans_flag"):
        section.note("trans_flag", "changes nothing: tensors are in the host's format anyway")
    return EndToEnd(
        enabled=enabled,
        kernel_arguments=section.flag("save_kernel_args", False),
        on_device=section.choice("stat_calc_mode", ("host", "device"), default="host") == "device",
        precision=_precision(section),
        sample_elements=_sample_elements(section, enabled=enabled),
    )


def _precision(section: Section) -> Precision:
    word = section.choice("device_stat_precision_mode", ("high", "low"), default="high")
    return cast("Precision", word)


def _sample_elements(section: Section, *, enabled: bool) -> int:
    if not section.uint("sample_mode", (0, 1), _SAMPLE_MODES, default=0):
        return 0
    number = section.count("sample_num", _SAMPLE_NUMBERS, default=_DEFAULT_SAMPLE)
    if not number:
        raise section.refusal("sample_num", _SAMPLE_NUMBERS)
    if not enabled:
        section.note("sample_mode", "becomes 0: only enabled synchronous dump samples")
        return 0
    return number
