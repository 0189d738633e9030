"""Where the tree goes: `path`, or the environment's word for it. Pure.

Facts: mindspore-dump.md 1.5; `RANKDUMP_OUTPUT` is rankdump's own and has the last word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rankdump.contract.dialect.disk import unreplaced
from rankdump.contract.dialect.section import Section
from rankdump.contract.errors import ConfigError

OUTPUT_VARIABLE = "RANKDUMP_OUTPUT"
DEFAULT_VARIABLE = "MS_DIAGNOSTIC_DATA_PATH"
DEFAULT_FOLDER = "debug_dump"

_PATH = re.compile(r"/[A-Za-z0-9_/-]*")
_ALLOWED = "an absolute folder of A-Z a-z 0-9 _ - and /"
_LONGEST_NAME, _LONGEST_PATH = 255, 4095
"""What Linux takes for one folder and for a whole path, in bytes."""


def parse_root(common: Section, environ: Mapping[str, str]) -> str:
    """Return the absolute root; a bad `path` is refused even when the environment overrides it."""
    path = common.text("path", _ALLOWED, "")
    if path and not _PATH.fullmatch(path):
        raise common.refusal("path", _ALLOWED + unreplaced(path))
    root = overridden(environ, common.file) or _tidy(path or _default(common, environ))
    if len(root) > _LONGEST_PATH or any(len(name) > _LONGEST_NAME for name in root.split("/")):
        common.note("path", "is longer than a file system takes: no file can be written", root)
    return root


def overridden(environ: Mapping[str, str], file: str) -> str:
    """Return the root that RANKDUMP_OUTPUT puts in the place of any other; empty without one."""
    override = environ.get(OUTPUT_VARIABLE, "")
    if override and not override.startswith("/"):
        raise ConfigError(file, OUTPUT_VARIABLE, override, "an absolute folder")
    return _tidy(override) if override else ""


def _default(common: Section, environ: Mapping[str, str]) -> str:
    base = environ.get(DEFAULT_VARIABLE, "")
    if not base:
        raise common.refusal("path", f"{_ALLOWED}, here or in {DEFAULT_VARIABLE}")
    if not _PATH.fullmatch(base):
        raise ConfigError(common.file, DEFAULT_VARIABLE, base, _ALLOWED + unreplaced(base))
    return f"{base}/{DEFAULT_FOLDER}"


def _tidy(path: str) -> str:
    return "/" + "/".join(part for part in path.split("/") if part)
