"""From a configuration file to a plan: reads the file, finds its dialect, hands it to that parser.

The only module here that touches the disk; a new dialect is one parser and one row below.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, cast

from rankdump.contract.dialect import mindspore
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


_DIALECTS: dict[str, Parse] = {"common_dump_settings": mindspore.parse}
"""By the key that no other dialect has."""

_KNOWN = "a MindSpore data_dump.json, which is an object with this section"


def load(path: Path, environ: Mapping[str, str]) -> tuple[DumpPlan, bytes]:
    """Return the plan in a file and the file's bytes; ConfigError when it holds none."""
    data = _read(path)
    file = str(path)
    notes = Notes()
    body = decode(data, file=file, notes=notes)
    if isinstance(body, dict):
        for marker, parse in _DIALECTS.items():
            if marker in body:
                document = cast("dict[str, object]", body)
                return parse(document, file=file, environ=environ, notes=notes), data
    raise ConfigError(file, next(iter(_DIALECTS)), MISSING, _KNOWN)


def _read(path: Path) -> bytes:
    # MindSpore looks at nothing but the text after the last dot, and minds its case.
    if path.suffix != ".json":
        raise ConfigError(str(path), "", path.name, "a file whose name ends in .json")
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(str(path), "", MISSING, "a file that can be read") from None
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or str(error)
        raise ConfigError(str(path), "", cause, "a file that can be read") from None
