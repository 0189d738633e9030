"""Dumps that a script sets up as with CANN: `aclmdlInitDump`, `aclmdlSetDump`, and the end.

    rankdump.acl.init_dump()
    rankdump.acl.set_dump("acl.json")
    rankdump.attach(model)          # only models attached from here on are dumped
    model(batch)                    # each call is an iteration
    rankdump.acl.finalize_dump()

No call raises. Each returns a number that CANN has documented for the case, 0 when all is well;
what was wrong is logged.
"""

from __future__ import annotations

from rankdump._compat.acl_lifecycle import (
    BAD_CONFIGURATION,
    INITIALISED_TWICE,
    INTERNAL,
    NO_PATH,
    NOT_INITIALISED,
    OK,
    UNPARSABLE,
    UNREADABLE_FILE,
    AclDumpLifecycle,
)

__all__ = [
    "BAD_CONFIGURATION",
    "INITIALISED_TWICE",
    "INTERNAL",
    "NOT_INITIALISED",
    "NO_PATH",
    "OK",
    "UNPARSABLE",
    "UNREADABLE_FILE",
    "finalize_dump",
    "init_dump",
    "set_dump",
]

_process = AclDumpLifecycle()


def init_dump() -> int:
    """Begin: from now on `set_dump` may be called."""
    return _process.init_dump()


def set_dump(path: object) -> int:
    """Dump models that are attached from now on as the `acl.json` at `path` says.

    Another call replaces the file for models attached after that one.
    """
    return _process.set_dump(path)


def finalize_dump() -> int:
    """End all dumps: models are as they were before, and what was dumped is delivered."""
    return _process.finalize_dump()
