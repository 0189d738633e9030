"""From a configuration file to a plan: reads the file, finds its dialect, hands it to that parser.

The only module here that touches the disk; a new dialect is one parser and one row below.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Protocol, cast

from rankdump.contract.dialect import acl, mindspore, tensorflow
from rankdump.contract.dialect.disk import PathFacts
from rankdump.contract.dialect.document import decode
from rankdump.contract.dialect.notes import Notes
from rankdump.contract.errors import MISSING, ConfigError
from rankdump.contract.plan import DumpPlan


class Parse(Protocol):
    """One dialect; pure."""

    def __call__(
        self, body: Mapping[str, object], *, file: str, environ: Mapping[str, str], notes: Notes
    ) -> DumpPlan:
        """Return the plan a document describes, with the notes as its warnings.

        ConfigError names the key at fault.
        """
        ...


def facts_of(path: str) -> PathFacts:
    """Look at a path; one that cannot be is like one that is not there."""
    absolute = os.path.abspath(path)  # noqa: PTH100 - a Path keeps the dots
    try:
        found = Path(absolute)
        return PathFacts(
            absolute=absolute,
            exists=found.exists(),
            directory=found.is_dir(),
            accessible=os.access(absolute, os.R_OK | os.W_OK),
        )
    except (OSError, ValueError):
        return PathFacts(absolute)


_ACL: Parse = partial(acl.parse, probe=facts_of)
_DIALECTS: dict[str, Parse] = {"common_dump_settings": mindspore.parse, "dump": _ACL}
"""By the key that no other dialect has."""

_KNOWN = "a MindSpore data_dump.json, which has this section, or a CANN acl.json, which has dump"


def load(path: Path, environ: Mapping[str, str]) -> tuple[DumpPlan, bytes]:
    """Return the plan in a file and the file's bytes; ConfigError when it holds none."""
    # MindSpore looks at nothing but the text after the last dot, and minds its case.
    if path.suffix != ".json":
        raise ConfigError(str(path), "", path.name, "a file whose name ends in .json")
    data = read(path)
    file = str(path)
    notes = Notes()
    body = decode(data, file=file, notes=notes)
    if isinstance(body, dict):
        for marker, parse in _DIALECTS.items():
            if marker in body:
                document = cast("dict[str, object]", body)
                return parse(document, file=file, environ=environ, notes=notes), data
    raise ConfigError(file, next(iter(_DIALECTS)), MISSING, _KNOWN)


def read(path: Path) -> bytes:
    """Return the bytes of a configuration file; ConfigError when there are none to read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(str(path), "", MISSING, "a file that can be read") from None
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or str(error)
        raise ConfigError(str(path), "", cause, "a file that can be read") from None


def acl_document(data: bytes, *, file: str, notes: Notes) -> dict[str, object]:
    """Return the object in an `acl.json`; ConfigError, with CANN's code, when it holds none."""
    try:
        body = decode(data, file=file, notes=notes)
    except ConfigError as error:
        allowed = f"{error.allowed} (EP0004)"
        raise ConfigError(file, error.key, error.value, allowed) from None
    if not isinstance(body, dict):
        raise ConfigError(file, "", body, "one JSON object (EP0004)")
    return cast("dict[str, object]", body)


def acl_plan(
    body: Mapping[str, object], *, file: str, environ: Mapping[str, str], notes: Notes
) -> DumpPlan:
    """Return the plan of an `acl.json`, which need not have the section `dump`."""
    return _ACL(body, file=file, environ=environ, notes=notes)


def dump_config_plan(values: Mapping[str, object]) -> DumpPlan:
    """Return the plan of the arguments of TF Adapter's `DumpConfig`."""
    return tensorflow.parse_dump_config(values, probe=facts_of)
