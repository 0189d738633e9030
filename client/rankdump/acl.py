"""Dumps that a script controls with the calls of CANN: init, set and finalize.

    rankdump.acl.init_dump()
    rankdump.acl.set_dump("acl.json")
    rankdump.attach(model)          # only models attached after set_dump are dumped
    model(batch)                    # each call is an iteration
    rankdump.acl.finalize_dump()

No call raises. Each returns the error code that CANN documents for the case, 0 for success; the
reason of a failure is logged.
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
    """Initialise dumping; must be called before `set_dump`."""
    return _process.init_dump()


def set_dump(path: object) -> int:
    """Dump the models that are attached after this call as configured in the `acl.json` at `path`.

    A later call replaces the configuration for models attached after it.
    """
    return _process.set_dump(path)


def finalize_dump() -> int:
    """End all dumps: deliver the data that was dumped, and remove all hooks from the models."""
    return _process.finalize_dump()
