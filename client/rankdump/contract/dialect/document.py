"""The first JSON value of a file's bytes, as lenient and as strict as MindSpore's reader. Pure."""

from __future__ import annotations

import codecs
import json
from collections import Counter
from typing import NoReturn

from rankdump.contract.dialect.notes import Notes
from rankdump.contract.errors import ConfigError

_ALLOWED = "one JSON object in UTF-8, without comments"


def decode(data: bytes, *, file: str, notes: Notes) -> object:
    """Return the first value; a byte order mark before it and bytes after it do not matter.

    Of two equal keys the last one counts, and is noted.
    """

    def united(pairs: list[tuple[str, object]]) -> dict[str, object]:
        values = dict(pairs)
        if len(values) < len(pairs):
            for key, count in Counter(key for key, _ in pairs).items():
                if count > 1:
                    notes.add(key, values[key], f"is the last of {count} equal keys and counts")
        return values

    # Bytes that are not UTF-8 are an error only up to the end of the value.
    text = data.removeprefix(codecs.BOM_UTF8).decode(errors="surrogateescape").lstrip(" \t\r\n")
    decoder = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=united)
    try:
        value, end = decoder.raw_decode(text)
        text[:end].encode()
    except json.JSONDecodeError as error:
        cause = f"{error.msg} in line {error.lineno}, column {error.colno}"
        raise ConfigError(file, "", cause, _ALLOWED) from None
    except UnicodeEncodeError as error:
        cause = f"a byte that is not UTF-8, at character {error.start}"
        raise ConfigError(file, "", cause, _ALLOWED) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(file, "", str(error), _ALLOWED) from None
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name}, which is no JSON")
