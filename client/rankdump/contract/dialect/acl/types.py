"""The JSON types of an `acl.json`: everything that has another one is refused first. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from rankdump.contract.dialect.section import Section
from rankdump.contract.errors import MISSING, ConfigError

WRONG_TYPE, NO_WORD, BAD_VALUE, UNREADABLE, CONFLICT = (
    "EP0001",
    "EP0002",
    "EP0003",
    "EP0004",
    "EP0005",
)
"""What CANN reports: a type or something missing, an unknown word, a value, the file itself, and
keys that exclude each other."""
MAX_DEPTH = 10

_TEXTS = (
    "dump_path",
    "dump_mode",
    "dump_op_switch",
    "dump_level",
    "dump_scene",
    "dump_data",
    "dump_debug",
    "dump_kernel_data",
    "dump_step",
)
KEYS = (*_TEXTS, "dump_stats", "dump_list")
BLACKLISTS = ("optype_blacklist", "opname_blacklist")
ITEM_KEYS = ("model_name", "layer", "watcher_nodes", *BLACKLISTS, "opname_range")


def coded(section: Section, key: str, allowed: str, code: str) -> ConfigError:
    """Return a refusal that ends in the code CANN reports."""
    return section.refusal(key, f"{allowed} ({code})")


def check_depth(body: Mapping[str, object], *, file: str) -> None:
    """Refuse a document that is nested too deeply."""
    level: list[object] = [body]
    for _ in range(MAX_DEPTH):
        level = [part for value in level for part in _parts(value)]
    if any(isinstance(value, (dict, list)) for value in level):
        allowed = f"objects and arrays nested at most {MAX_DEPTH} deep ({UNREADABLE})"
        raise ConfigError(file, "", "a deeper nesting", allowed)


def _parts(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(cast("dict[str, object]", value).values())
    return cast("list[object]", value) if isinstance(value, list) else []


def check_types(dump: Section) -> None:
    """Refuse the first key of the section that has another type than its own."""
    for key in _TEXTS:
        text(dump, key)
    texts(dump, "dump_stats")
    for item in objects(dump, "dump_list"):
        _check_item(item)


def _check_item(item: Section) -> None:
    text(item, "model_name")
    texts(item, "layer")
    texts(item, "watcher_nodes")
    for key in BLACKLISTS:
        for entry in objects(item, key):
            text(entry, "name")
            texts(entry, "pos")
    for entry in objects(item, "opname_range"):
        text(entry, "begin")
        text(entry, "end")


def text(section: Section, key: str) -> str:
    """Return a string; empty when it is not there."""
    value = section.values.get(key, "")
    if not isinstance(value, str):
        raise coded(section, key, "a string", WRONG_TYPE)
    return value


def texts(section: Section, key: str) -> tuple[str, ...]:
    """Return an array of strings; empty when it is not there."""
    values = _array(section, key)
    for index, value in enumerate(values):
        if not isinstance(value, str):
            raise _element(section, f"{key}[{index}]", value, "a string")
    return tuple(cast("list[str]", values))


def objects(section: Section, key: str) -> tuple[Section, ...]:
    """Return an array of objects, each a section; empty when it is not there."""
    found: list[Section] = []
    for index, value in enumerate(_array(section, key)):
        if not isinstance(value, dict):
            raise _element(section, f"{key}[{index}]", value, "an object")
        values = cast("dict[str, object]", value)
        name = f"{section.name}.{key}[{index}]"
        found.append(Section(section.file, name, values, section.notes))
    return tuple(found)


def _array(section: Section, key: str) -> list[object]:
    values = section.values.get(key, MISSING)
    if values is MISSING:
        return []
    if not isinstance(values, list):
        raise coded(section, key, "an array", WRONG_TYPE)
    return cast("list[object]", values)


def _element(section: Section, place: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(section.file, f"{section.name}.{place}", value, f"{allowed} ({WRONG_TYPE})")
