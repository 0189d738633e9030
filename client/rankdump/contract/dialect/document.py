"""The first JSON value of a file's bytes, as lenient and as strict as MindSpore's reader. Pure."""

from __future__ import annotations

import codecs
import json
from typing import NoReturn

from rankdump.contract.errors import ConfigError

_ALLOWED = "one JSON object in UTF-8, without comments"


def decode(data: bytes, *, file: str) -> object:
    """Return the first value; a byte order mark before it and bytes after it do not matter.

    Of two equal keys the last one counts.
    """
    # Bytes that are not UTF-8 are an error only up to the end of the value.
    text = data.removeprefix(codecs.BOM_UTF8).decode(errors="surrogateescape").lstrip(" \t\r\n")
    try:
        value, end = json.JSONDecoder(parse_constant=_no_constant).raw_decode(text)
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
