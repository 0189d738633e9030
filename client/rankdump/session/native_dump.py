"""Whether MindSpore itself writes the dump that a session would write.

MindSpore reads MINDSPORE_DUMP_CONFIG too, and dumps by itself: every kernel in graph mode, in
PyNative mode only what is compiled. Nobody can keep it from that once its first operator has run.
So where both would dump the same, MindSpore does, and rankdump does not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rankdump.contract.dialect import load
from rankdump.contract.dialect.root import OUTPUT_VARIABLE
from rankdump.contract.errors import RankdumpError

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


def native_dump_conflict(own: DumpTarget, native: DumpTarget, *, mindspore_loaded: bool) -> str:
    """Return why rankdump must not dump what its configuration asks for; empty when it may. Pure.

    `native` is what MINDSPORE_DUMP_CONFIG asks MindSpore for.
    """
    if not mindspore_loaded or not own.overlaps(native):
        return ""
    return (
        f"MindSpore reads {NATIVE_VARIABLE} itself and dumps to {native.root}, so rankdump dumps "
        f"nothing in this job. `rankdump ingest {native.root} --into TREE --follow` takes "
        f"MindSpore's dump over; to have rankdump's instead, name the file in RANKDUMP_CONFIG and "
        f"unset {NATIVE_VARIABLE}"
    )


def conflict_here(file: Path, root: str, environ: Mapping[str, str]) -> str:
    """Return why a session of this process must not dump; empty when it may."""
    return native_dump_conflict(
        _target(file, root), _native_target(environ), mindspore_loaded="mindspore" in sys.modules
    )


def without_native_dump(environ: Mapping[str, str], root: str) -> dict[str, str]:
    """Return an environment in which MindSpore does not dump what RANKDUMP_CONFIG asks for.

    A MINDSPORE_DUMP_CONFIG of its own, with another root, stays: both dumps are wanted then.
    """
    own = _target(Path(environ["RANKDUMP_CONFIG"]), root)
    if not own.overlaps(_native_target(environ)):
        return dict(environ)
    found = {name: text for name, text in environ.items() if name != NATIVE_VARIABLE}
    if environ.get(_ACL_VARIABLE) == environ[NATIVE_VARIABLE]:
        # It asks for an ACL dump where it names the configuration.
        found[_ACL_VARIABLE] = environ["RANKDUMP_CONFIG"]
    return found


def _native_target(environ: Mapping[str, str]) -> DumpTarget:
    file = environ.get(NATIVE_VARIABLE, "")
    if not file:
        return DumpTarget()
    # What gives rankdump another root means nothing to MindSpore.
    read_by_mindspore = {name: text for name, text in environ.items() if name != OUTPUT_VARIABLE}
    try:
        plan, _ = load(Path(file), read_by_mindspore)
    except RankdumpError:  # MindSpore has an error of its own for it
        return DumpTarget()
    return _target(Path(file), plan.output.root)


def _target(file: Path, root: str) -> DumpTarget:
    return DumpTarget(os.path.realpath(file), os.path.realpath(root))
