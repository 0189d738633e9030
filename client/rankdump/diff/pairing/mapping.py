"""The user's file that says which names are one, and what it means for a call. Reads one file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import cast

from rankdump.contract.errors import ConfigError
from rankdump.contract.key import sanitised
from rankdump.contract.layout.api_name import call_of
from rankdump.contract.selection import matched_name, spellings
from rankdump.diff.values import Call

_EDGE = re.compile(r"[/._]")
_FORMS = "lines `name_a,name_b`, or a JSON object of such names"


class Mapped:
    """Names of side a as side b has them: of operators, or of what they begin with.

    A name may be spelt in any way: in full, as files do, or as the path of a module. That of a
    call of an API may stand without its direction. A gradient goes with its operator.
    """

    def __init__(self, mapping: Mapping[str, str]) -> None:
        self._mapping = mapping

    def names(self, call: Call) -> tuple[str, ...]:
        """Return what a call may be called."""
        api = call_of(call.op_name)
        if api is not None:
            return call.op_name, api.stem
        return tuple(dict.fromkeys((*spellings(matched_name(call.op_name)), call.op_name)))

    def wanted(self, call: Call) -> Iterator[str]:
        """Yield the names that side b may have for a call of side a, the surest first."""
        names = self.names(call)
        for name in names:
            if name in self._mapping:
                yield from _spelt(self._mapping[name])
        for name in names:
            for edge in reversed([found.start() for found in _EDGE.finditer(name)]):
                other = self._mapping.get(name[:edge])
                if other is not None:
                    yield from _spelt(other + name[edge:])


def _spelt(name: str) -> tuple[str, str]:
    return name, sanitised(name)


def read_mapping(given: Mapping[str, str] | str | PathLike[str]) -> Mapping[str, str]:
    """Return names of side b by names of side a; ConfigError says what of a file is wrong."""
    if isinstance(given, Mapping):
        return given
    path = Path(fspath(given))
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(str(path), "", why, f"a file of {_FORMS}") from None
    if text.lstrip().startswith("{"):
        return _from_json(str(path), text)
    return dict(_from_lines(str(path), text))


def _from_json(file: str, text: str) -> Mapping[str, str]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(file, "", str(error), _FORMS) from None
    pairs = cast("dict[str, object]", body)
    for name, other in pairs.items():
        if not isinstance(other, str) or not name or not other:
            raise ConfigError(file, name, other, "a name of side b")
    return cast("dict[str, str]", pairs)


def _from_lines(file: str, text: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            name, comma, other = (part.strip() for part in line.partition(","))
            if not (name and comma and other):
                raise ConfigError(file, f"line {number}", line, "`name_a,name_b`")
            yield name, other
