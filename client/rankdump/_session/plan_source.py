"""Plan of a session: from the file that the environment names, or from an object of the script; no
plan if MindSpore itself writes the same dump.

MindSpore reads MINDSPORE_DUMP_CONFIG too, and dumps by itself: in graph mode every kernel, in
PyNative mode only compiled code. This cannot be stopped once its first operator has run. So if both
would write the same dump, MindSpore dumps and rankdump does not.
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

from rankdump._config.config_file import load_config_plan, make_black_box_plan
from rankdump._config.output_path import OUTPUT_VARIABLE, replace_baseline
from rankdump._config.rankdump_section import is_black_box_forced
from rankdump._core.plan import STARTED_PATTERN, DumpPlan
from rankdump._core.rank_identity import WARNED_VARIABLE, RankIdentity, identify_rank
from rankdump._layout.tree_layouts import LAYOUTS
from rankdump.errors import RankdumpError

NATIVE_VARIABLE = "MINDSPORE_DUMP_CONFIG"
_ACL_VARIABLE = "MS_ACL_DUMP_CFG_PATH"


@dataclass(frozen=True, slots=True)
class DumpTarget:
    """A configuration file and its tree, as absolute paths without links."""

    file: str = ""
    root: str = ""

    def overlaps(self, other: DumpTarget) -> bool:
        """Return whether both have the same configuration file or the same tree."""
        return (self.file != "" and self.file == other.file) or (
            self.root != "" and self.root == other.root
        )


def describe_native_conflict(own: DumpTarget, native: DumpTarget, *, mindspore_loaded: bool) -> str:
    """Return why rankdump must not dump what its configuration requests; empty if it may. Pure.

    `native` is the dump that MINDSPORE_DUMP_CONFIG requests from MindSpore.
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
    """Return why a session of this process must not dump; empty if it may."""
    return describe_native_conflict(
        _resolve_target(file, root),
        _resolve_native_target(environ),
        mindspore_loaded="mindspore" in sys.modules,
    )


def remove_native_dump(environ: Mapping[str, str], root: str) -> dict[str, str]:
    """Return an environment in which MindSpore does not dump what RANKDUMP_CONFIG requests.

    A MINDSPORE_DUMP_CONFIG that names another root stays, because both dumps are intended then.
    """
    own = _resolve_target(Path(environ["RANKDUMP_CONFIG"]), root)
    if not own.overlaps(_resolve_native_target(environ)):
        return dict(environ)
    found = {name: text for name, text in environ.items() if name != NATIVE_VARIABLE}
    if environ.get(_ACL_VARIABLE) == environ[NATIVE_VARIABLE]:
        # With this configuration the variable requests an ACL dump too.
        found[_ACL_VARIABLE] = environ["RANKDUMP_CONFIG"]
    return found


def _resolve_native_target(environ: Mapping[str, str]) -> DumpTarget:
    file = environ.get(NATIVE_VARIABLE, "")
    if not file:
        return DumpTarget()
    # MindSpore does not read the variable that sets another root for rankdump.
    read_by_mindspore = {name: text for name, text in environ.items() if name != OUTPUT_VARIABLE}
    try:
        plan, _ = load_config_plan(Path(file), read_by_mindspore)
    except RankdumpError:  # MindSpore reports the error itself
        return DumpTarget()
    return _resolve_target(Path(file), plan.output.root)


def _resolve_target(file: Path, root: str) -> DumpTarget:
    return DumpTarget(os.path.realpath(file), os.path.realpath(root))


_logger = logging.getLogger("rankdump")


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """Parts that a session is made from."""

    plan: DumpPlan
    source: bytes
    """The configuration file, byte for byte."""
    identity: RankIdentity


def load_session_config(environ: Mapping[str, str]) -> SessionConfig | None:
    """Return the configuration that RANKDUMP_CONFIG, or else MINDSPORE_DUMP_CONFIG, names; None if
    neither is set.

    The result is also None if MindSpore itself writes the dump. RankdumpError if the configuration
    cannot be used.
    """
    path = environ.get("RANKDUMP_CONFIG") or environ.get("MINDSPORE_DUMP_CONFIG")
    if not path and is_black_box_forced(environ):
        plan, source = make_black_box_plan(environ)
        return SessionConfig(plan, source, identify_rank(environ, plan.output.root))
    if not path:
        return None
    plan, source = load_config_plan(Path(path), environ)
    identity = identify_rank(environ, plan.output.root)
    if _is_left_to_mindspore(Path(path), plan, identity, environ):
        return None
    # Warnings are logged once per job: only by rank 0, and not if `rankdump run` has logged them.
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
    """Do the same as `load_session_config`, but log errors instead of raising them."""
    try:
        return load_session_config(environ)
    except RankdumpError as error:
        _logger.error("rankdump: nothing will be dumped: %s", error)
    except Exception:
        _logger.exception("rankdump: nothing will be dumped: internal error")
    return None


STARTED_FORMAT = "%Y%m%d%H%M%S"
STARTED_VARIABLE = "RANKDUMP_STARTED"
"""Variable with one start time, and so one folder name, for all ranks of a job; by default each
rank has its own.
"""


class PlanSource(Protocol):
    """A configuration object of another tool's form, such as `rankdump.tf.DumpConfig`."""

    def plan(self) -> DumpPlan:
        """Return the dump plan; ConfigError for a value that is not allowed."""
        ...


def resolve_plan(given: DumpPlan | PlanSource, environ: Mapping[str, str]) -> DumpPlan | None:
    """Return the plan of a session that begins now; the start time may be part of the tree's name.

    The result is None for a plan that is not enabled.
    """
    plan = given if isinstance(given, DumpPlan) else given.plan()
    if not plan.enabled:
        return None
    plan = replace_baseline(plan, environ)
    layout = LAYOUTS.get(plan.output.layout)
    if layout is None or not layout.has_time_folder or plan.output.started:
        return plan
    started = environ.get(STARTED_VARIABLE, "")
    if not STARTED_PATTERN.fullmatch(started):
        started = time.strftime(STARTED_FORMAT)
    return replace(plan, output=replace(plan.output, started=started))
