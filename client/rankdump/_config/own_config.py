"""Configuration that consists of the section `rankdump` alone: it selects no tensor, so a job that
uses it has a black box and nothing else. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rankdump._config.config_section import ConfigNotes, ConfigSection
from rankdump._config.output_path import parse_output_root
from rankdump._config.rankdump_section import (
    DEFAULT_RING_STEPS,
    RANKDUMP_SECTION,
    complete_content,
    parse_rankdump_section,
)
from rankdump._core.plan import (
    BlackBoxSettings,
    ContentSettings,
    DumpPlan,
    IterationSelection,
    OutputSettings,
    TensorSelection,
)

_PATH_KEY = "path"
BLACK_BOX_VARIABLE = "RANKDUMP_BLACKBOX"
"""With any text but `0`, a job has a black box, whatever its configuration says."""


def is_black_box_forced(environ: Mapping[str, str]) -> bool:
    """Return whether the environment switches the black box on."""
    return environ.get(BLACK_BOX_VARIABLE, "0") not in ("", "0")


def force_black_box(plan: DumpPlan, environ: Mapping[str, str]) -> DumpPlan:
    """Return the plan with a black box, if the environment switches one on."""
    if plan.black_box.steps or not is_black_box_forced(environ):
        return plan
    return replace(plan, black_box=BlackBoxSettings(DEFAULT_RING_STEPS))


def is_own_config(body: Mapping[str, object]) -> bool:
    """Return whether a document has the section `rankdump` and no other."""
    return tuple(body) == (RANKDUMP_SECTION,)


def parse_own_config(
    body: Mapping[str, object],
    *,
    file: str,
    environ: Mapping[str, str],
    notes: ConfigNotes,
) -> DumpPlan:
    """Return the plan; `rankdump.path` is the root of the tree, unless RANKDUMP_OUTPUT names it."""
    section = ConfigSection.from_body(body, RANKDUMP_SECTION, file=file, notes=notes)
    rest = {key: value for key, value in section.values.items() if key != _PATH_KEY}
    own = parse_rankdump_section(
        {RANKDUMP_SECTION: rest},
        file=file,
        output=OutputSettings(parse_output_root(section, environ)),
        notes=notes,
    )
    if not own.black_box.steps:
        notes.add(RANKDUMP_SECTION, section.values, "selects no tensor and has no blackbox")
    return DumpPlan(
        output=own.output,
        selection=TensorSelection(iterations=IterationSelection("none", ())),
        content=complete_content(ContentSettings(), own, notes),
        delivery=own.delivery,
        black_box=own.black_box,
        dialect="rankdump",
        warnings=notes.texts,
    )
