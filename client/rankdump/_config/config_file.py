"""Configuration files: reads a file, decodes its first JSON value with the same leniency and
strictness as MindSpore's reader, finds the dialect, and returns the plan.

This is the only module of the package that accesses the disk. A new dialect is one parser and one
row in the table of dialects.
"""

from __future__ import annotations

import codecs
import difflib
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NoReturn, Protocol, cast

from rankdump._config import acl_config, mindspore_config, rankdump_section, tensorflow_config
from rankdump._config.config_section import ConfigNotes, escape_key
from rankdump._config.output_path import PathFacts, describe_shell_word, replace_baseline
from rankdump._core.plan import DumpPlan
from rankdump.errors import MISSING_VALUE, ConfigError

_ALLOWED_DOCUMENT = "one JSON object in UTF-8, without comments"


def decode_config(data: bytes, *, file: str, notes: ConfigNotes) -> object:
    """Return the first JSON value; a byte order mark before it and bytes after it are ignored.

    If a key occurs twice, the last value is used. Notes name repeated keys, and ignored bytes that
    are not blanks.
    """

    def join_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
        values = dict(pairs)
        if len(values) < len(pairs):
            for key, count in Counter(key for key, _ in pairs).items():
                if count > 1:
                    notes.add(
                        key, values[key], f"is the last of {count} equal keys and is the one used"
                    )
        return values

    # Bytes that are not UTF-8 are an error only if they come before the end of the value.
    text = data.removeprefix(codecs.BOM_UTF8).decode(errors="surrogateescape")
    decoder = json.JSONDecoder(parse_constant=_reject_constant, object_pairs_hook=join_pairs)
    try:
        value, end = decoder.raw_decode(text, _skip_blanks(text, 0))
        text[:end].encode()
    except json.JSONDecodeError as error:
        cause = _describe_encoding(data) or describe_json_fault(text, error.pos, error.msg)
        raise ConfigError(file, "", cause, _ALLOWED_DOCUMENT) from None
    except UnicodeEncodeError as error:
        cause = f"a byte that is not UTF-8, at character {error.start}"
        raise ConfigError(file, "", cause, _ALLOWED_DOCUMENT) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(file, "", str(error), _ALLOWED_DOCUMENT) from None
    behind = text[end:].strip()
    if behind:
        notes.add("text behind the JSON value", behind, "is ignored: only the first value is read")
    return value


_BLANKS = " \t\r\n"
_COMMENT_MARKS = ("//", "/*", "#")
_PYTHON_WORD = re.compile(r"(True|False|None)\b")
_SPELLINGS = {"True": "true", "False": "false", "None": "null"}
_MAX_SHOWN = 20
_WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)


def _skip_blanks(text: str, at: int) -> int:
    return len(text) - len(text[at:].lstrip(_BLANKS))


def _describe_encoding(data: bytes) -> str:
    """Return which encoding is not UTF-8; empty where none is recognized."""
    is_wide = data.startswith(_WIDE_MARKS) or (0 in data[:4] and bool(data.strip(b"\0")))
    return "text in UTF-16 or UTF-32" if is_wide else ""


def describe_json_fault(text: str, at: int, message: str) -> str:
    """Return what a text has where JSON's grammar is violated, in the words of its author.

    >>> describe_json_fault('{"a": 1,}', 8, "Expecting property name")
    'a comma before } in line 1, column 9'
    """
    if message.startswith("Invalid control character"):
        message = "a line break or another control character within a string"
    else:
        at = _skip_blanks(text, at)
    rest = text[at:]
    if rest.startswith(",") and text[_skip_blanks(text, at + 1) :][:1] in ("}", "]"):
        at = _skip_blanks(text, at + 1)  # later versions of Python report the comma
        rest = text[at:]
    line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
    where = f"in line {line}, column {column}"
    word = _PYTHON_WORD.match(rest)
    if not rest:
        return f"an end {where}, within the value" if text.strip(_BLANKS) else "an empty file"
    if rest.startswith(_COMMENT_MARKS):
        return f"a comment {where}"
    if rest[0] in "}]" and text[:at].rstrip(_BLANKS).endswith(","):
        return f"a comma before {rest[0]} {where}"
    if word:
        return f"{word[0]} {where}, which JSON spells {_SPELLINGS[word[0]]}"
    shown = rest.split("\n", 1)[0][:_MAX_SHOWN].rstrip()
    is_shown = bool(shown) and shown.isprintable()
    return f"{message} {where}, at {shown}" if is_shown else f"{message} {where}"


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name}, which is not JSON")


class DialectParser(Protocol):
    """Parser of one dialect; pure."""

    def __call__(
        self,
        body: Mapping[str, object],
        *,
        file: str,
        environ: Mapping[str, str],
        notes: ConfigNotes,
    ) -> DumpPlan:
        """Return the plan that a document describes, with the notes as its warnings.

        ConfigError names the key that is wrong.
        """
        ...


def examine_path(path: str) -> PathFacts:
    """Return the facts about a path; an invalid path counts as missing."""
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


make_acl_plan: DialectParser = partial(acl_config.parse_acl_config, probe=examine_path)
"""Returns the plan of an `acl.json`, which need not have the section `dump`."""
make_dump_config_plan = partial(tensorflow_config.parse_dump_config, probe=examine_path)
"""Returns the plan of the arguments of TF Adapter's `DumpConfig`."""
_PARSERS_BY_KEY: dict[str, DialectParser] = {
    "common_dump_settings": mindspore_config.parse_mindspore_config,
    "dump": make_acl_plan,
}
"""Parser of each dialect, by a key that no other dialect has."""

_KNOWN_FORMATS = (
    "a MindSpore data_dump.json, which has this section, a CANN acl.json, which has dump, or the "
    "section rankdump alone"
)
_MAX_NAMED_KEYS = 5


def load_config_plan(path: Path, environ: Mapping[str, str]) -> tuple[DumpPlan, bytes]:
    """Return the plan in a file, and the file's bytes; ConfigError if it contains no plan."""
    # MindSpore checks only the text after the last dot, and its case.
    if path.suffix != ".json":
        raise ConfigError(str(path), "", path.name, "a file whose name ends in .json")
    data = read_config_file(path)
    file = str(path)
    notes = ConfigNotes()
    body = decode_config(data, file=file, notes=notes)
    if isinstance(body, dict):
        document = cast("dict[str, object]", body)
        parse = _find_parser(document)
        if parse is not None:
            plan = parse(document, file=file, environ=environ, notes=notes)
            return rankdump_section.force_black_box(replace_baseline(plan, environ), environ), data
        allowed = f"{_KNOWN_FORMATS}; {_describe_keys(document)}"
        raise ConfigError(file, next(iter(_PARSERS_BY_KEY)), MISSING_VALUE, allowed)
    raise ConfigError(file, "", body, f"one JSON object: {_KNOWN_FORMATS}")


def _describe_keys(document: Mapping[str, object]) -> str:
    """Return what a document has in place of a section, and which section a key resembles."""
    for key in document:
        nearest = difflib.get_close_matches(key.lower(), _PARSERS_BY_KEY, n=1)
        if nearest:
            return f"{escape_key(key)} is no such section, the nearest is {nearest[0]}"
    names = [escape_key(key) for key in list(document)[:_MAX_NAMED_KEYS]]
    more = len(document) - len(names)
    return f"this file has {', '.join(names) or 'no key'}{f' and {more} more' if more else ''}"


def _find_parser(document: Mapping[str, object]) -> DialectParser | None:
    if rankdump_section.is_own_config(document):
        return rankdump_section.parse_own_config
    return next((parse for key, parse in _PARSERS_BY_KEY.items() if key in document), None)


def make_black_box_plan(environ: Mapping[str, str]) -> tuple[DumpPlan, bytes]:
    """Return the plan of a job that has a black box but no configuration, and the source of the
    plan.

    ConfigError if RANKDUMP_OUTPUT is not set.
    """
    data = b'{"rankdump": {"blackbox": true}}'
    file = rankdump_section.BLACK_BOX_VARIABLE
    body = cast("dict[str, object]", json.loads(data))
    plan = rankdump_section.parse_own_config(body, file=file, environ=environ, notes=ConfigNotes())
    return plan, data


def read_config_file(path: Path) -> bytes:
    """Return the bytes of a configuration file; ConfigError if it cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        allowed = f"a file that can be read{describe_shell_word(str(path))}"
        raise ConfigError(str(path), "", MISSING_VALUE, allowed) from None
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or str(error)
        raise ConfigError(str(path), "", cause, "a file that can be read") from None


def parse_acl_document(data: bytes, *, file: str, notes: ConfigNotes) -> dict[str, object]:
    """Return the object in an `acl.json`; ConfigError with CANN's code if it contains none."""
    try:
        body = decode_config(data, file=file, notes=notes)
    except ConfigError as error:
        allowed = f"{error.allowed} (EP0004)"
        raise ConfigError(file, error.key, error.value, allowed) from None
    if not isinstance(body, dict):
        raise ConfigError(file, "", body, "one JSON object (EP0004)")
    return cast("dict[str, object]", body)
