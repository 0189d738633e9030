"""Plan of a session: from the file that the environment names, or from an object that the script
gives; none where MindSpore itself writes the same dump.

MindSpore reads MINDSPORE_DUMP_CONFIG too, and dumps by itself: every kernel in graph mode, in
PyNative mode only what is compiled. Nobody can keep it from that once its first operator has
run. So where both would dump the same, MindSpore does, and rankdump does not.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from rankdump._config.config_file import load_config_plan
from rankdump._config.output_path import OUTPUT_VARIABLE
from rankdump._core.plan import STARTED_PATTERN, DumpPlan
from rankdump._core.rank_identity import WARNED_VARIABLE, RankIdentity, identify_rank
from rankdump._layout.tree_layouts import LAYOUTS
from rankdump.errors import RankdumpError

NATIVE_VARIABLE = "MINDSPORE_DUMP_CONFIG"
_ACL_VARIABLE = "MS_ACL_DUMP_CFG_PATH"


@dataclass(frozen=True, slots=True)
class DumpTarget:
    """A configuration and the tree it asks for, as absolute paths without links."""

    file: str = ""
    root: str = ""

    def overlaps(self, other: DumpTarget) -> bool:
        """Return whether another one is the same configuration, or asks for the same tree."""
        return (self.file != "" and self.file == other.file) or (
            self.root != "" and self.root == other.root
        )


def describe_native_conflict(own: DumpTarget, native: DumpTarget, *, mindspore_loaded: bool) -> str:
    """Return why rankdump must not dump what its configuration asks for; empty when it may. Pure.

    `native` is what MINDSPORE_DUMP_CONFIG asks MindSpore for.
    """
    if not mindspore_loaded or not own.overlaps(native):
        return ""
    return (
        f"MindSpore reads {NATIVE_VARIABLE} itself and dumps to {native.root}, so rankdump dumps "
        f"nothing in this job. `rankdump ingest {native.root} --into TREE --follow` imports "
        f"MindSpore's dump; to dump with rankdump instead, name the file in RANKDUMP_CONFIG and "
        f"unset {NATIVE_VARIABLE}"
    )


def find_native_conflict(file: Path, root: str, environ: Mapping[str, str]) -> str:
    """Return why a session of this process must not dump; empty when it may."""
    return describe_native_conflict(
        _resolve_target(file, root),
        _resolve_native_target(environ),
        mindspore_loaded="mindspore" in sys.modules,
    )


def remove_native_dump(environ: Mapping[str, str], root: str) -> dict[str, str]:
    """Return an environment in which MindSpore does not dump what RANKDUMP_CONFIG asks for.

    A MINDSPORE_DUMP_CONFIG of its own, with another root, stays: both dumps are wanted then.
    """
    own = _resolve_target(Path(environ["RANKDUMP_CONFIG"]), root)
    if not own.overlaps(_resolve_native_target(environ)):
        return dict(environ)
    found = {name: text for name, text in environ.items() if name != NATIVE_VARIABLE}
    if environ.get(_ACL_VARIABLE) == environ[NATIVE_VARIABLE]:
        # It asks for an ACL dump where it names the configuration.
        found[_ACL_VARIABLE] = environ["RANKDUMP_CONFIG"]
    return found


def _resolve_native_target(environ: Mapping[str, str]) -> DumpTarget:
    file = environ.get(NATIVE_VARIABLE, "")
    if not file:
        return DumpTarget()
    # What gives rankdump another root means nothing to MindSpore.
    read_by_mindspore = {name: text for name, text in environ.items() if name != OUTPUT_VARIABLE}
    try:
        plan, _ = load_config_plan(Path(file), read_by_mindspore)
    except RankdumpError:  # MindSpore has an error of its own for it
        return DumpTarget()
    return _resolve_target(Path(file), plan.output.root)


def _resolve_target(file: Path, root: str) -> DumpTarget:
    return DumpTarget(os.path.realpath(file), os.path.realpath(root))


_logger = logging.getLogger("rankdump")


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """A session that is to be."""

    plan: DumpPlan
    source: bytes
    """The configuration file."""
    identity: RankIdentity


def load_session_config(environ: Mapping[str, str]) -> SessionConfig | None:
    """Return what RANKDUMP_CONFIG, else MINDSPORE_DUMP_CONFIG, asks for; None for nothing.

    None as well where MindSpore itself dumps it. RankdumpError when it cannot be used.
    """
    path = environ.get("RANKDUMP_CONFIG") or environ.get("MINDSPORE_DUMP_CONFIG")
    if not path:
        return None
    plan, source = load_config_plan(Path(path), environ)
    identity = identify_rank(environ, plan.output.root)
    if _is_left_to_mindspore(Path(path), plan, identity, environ):
        return None
    # Once a job: not by every rank, and not after `rankdump run` has said it.
    if identity.rank == 0 and environ.get(WARNED_VARIABLE) != path:
        for warning in plan.warnings:
            _logger.warning("rankdump: %s", warning)
    return SessionConfig(plan, source, identity)


def _is_left_to_mindspore(
    path: Path, plan: DumpPlan, identity: RankIdentity, environ: Mapping[str, str]
) -> bool:
    """Return whether MindSpore writes the dump itself; rank 0 logs a warning about it."""
    conflict = find_native_conflict(path, plan.output.root, environ) if plan.enabled else ""
    if conflict and identity.rank == 0:
        _logger.warning("rankdump: %s", conflict)
    return bool(conflict)


def load_session_config_or_log(environ: Mapping[str, str]) -> SessionConfig | None:
    """Return the same; what cannot be used is logged instead of raised."""
    try:
        return load_session_config(environ)
    except RankdumpError as error:
        _logger.error("rankdump: nothing will be dumped: %s", error)
    except Exception:
        _logger.exception("rankdump: nothing will be dumped: internal error")
    return None


STARTED_FORMAT = "%Y%m%d%H%M%S"
STARTED_VARIABLE = "RANKDUMP_STARTED"
"""Gives all ranks of a job one folder; without it each names its own by when it began."""


class PlanSource(Protocol):
    """Somebody else's configuration object, such as `rankdump.tf.DumpConfig`."""

    def plan(self) -> DumpPlan:
        """Return the dump plan; ConfigError for a value that is not allowed."""
        ...


def resolve_plan(given: DumpPlan | PlanSource, environ: Mapping[str, str]) -> DumpPlan | None:
    """Return the plan of a session that begins now: its tree may be named by the time.

    None for a plan that is not enabled.
    """
    plan = given if isinstance(given, DumpPlan) else given.plan()
    if not plan.enabled:
        return None
    layout = LAYOUTS.get(plan.output.layout)
    if layout is None or not layout.has_time_folder or plan.output.started:
        return plan
    started = environ.get(STARTED_VARIABLE, "")
    if not STARTED_PATTERN.fullmatch(started):
        started = time.strftime(STARTED_FORMAT)
    return replace(plan, output=replace(plan.output, started=started))
