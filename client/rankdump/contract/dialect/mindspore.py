"""MindSpore's `data_dump.json` as version 2.3 reads it, and newer keys as newer versions do. Pure.

Facts: mindspore-dump.md 1.1-1.11 and 2.13. What MindSpore does in silence, though it surprises,
is done here with a warning.
"""

from __future__ import annotations

from collections.abc import Mapping

from rankdump.contract.dialect.common import Common, parse_common
from rankdump.contract.dialect.debug_mode import settled, trigger_of
from rankdump.contract.dialect.e2e import parse_e2e
from rankdump.contract.dialect.keys import COMMON, note_unknown
from rankdump.contract.dialect.notes import Notes
from rankdump.contract.dialect.rankdump_section import parse_section
from rankdump.contract.dialect.section import Section
from rankdump.contract.dialect.statistic import parse_content
from rankdump.contract.layout.profile import PROFILES
from rankdump.contract.plan import DumpPlan, Output, Selection


def parse(
    body: Mapping[str, object], *, file: str, environ: Mapping[str, str], notes: Notes
) -> DumpPlan:
    """Return the plan; the first fault in MindSpore's own order is the one reported."""
    note_unknown(body, notes)
    acl_dump = _is_acl_dump(file, environ)
    e2e = parse_e2e(body, file=file, notes=notes)
    section = Section.of(body, COMMON, file=file, notes=notes)
    common = parse_common(section, environ, synchronous=e2e.enabled)
    common, e2e = settled(common, e2e, notes)
    output, delivery = parse_section(
        body,
        file=file,
        output=Output(common.root, common.net_name, file_format=common.file_format),
        notes=notes,
        layout_of=lambda profile: _layout(e2e.enabled, acl_dump, profile),
    )
    content = parse_content(section, common, e2e, PROFILES[output.profile])
    return DumpPlan(
        output=output,
        selection=_selection(common, notes),
        content=content,
        delivery=delivery,
        dialect="mindspore",
        warnings=notes.texts,
    )


def _is_acl_dump(file: str, environ: Mapping[str, str]) -> bool:
    """Return whether MindSpore would hand the file on to CANN (mindspore-dump.md 1.11)."""
    named = environ.get("MS_ACL_DUMP_CFG_PATH", "")
    return bool(named) and named in (file, environ.get("MINDSPORE_DUMP_CONFIG", ""))


def _layout(enabled: bool, acl_dump: bool, profile: str) -> str:
    """Return which tree MindSpore writes (mindspore-dump.md 2.13)."""
    if enabled:
        return "mindspore-sync"
    if PROFILES[profile].fixed_table:
        return "mindspore-async"
    return "cann-op-step" if acl_dump else "cann"


def _selection(common: Common, notes: Notes) -> Selection:
    first, spans = common.initial_iteration, common.iterations.spans
    if spans and all(high < first for _, high in spans):
        reason = f"is over before initial_iteration {first}: no iteration is selected"
        notes.add(f"{COMMON}.iteration", common.iterations.text, reason)
    return Selection(
        iterations=common.iterations,
        devices=common.devices,
        operators=common.operators,
        inputs=common.sides != 2,
        outputs=common.sides != 1,
        initial_iteration=first,
        trigger=trigger_of(common.debug_mode),
        overflow_limit=common.overflow_limit,
    )
