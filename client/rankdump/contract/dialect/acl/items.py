"""`dump_list`: which operators of which models. Pure.

Facts: ascend-formats.md 4.1 and 4.2. An item without `model_name` applies to every model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rankdump.contract.dialect.acl.types import (
    BAD_VALUE,
    BLACKLISTS,
    CONFLICT,
    WRONG_TYPE,
    coded,
    objects,
    text,
    texts,
)
from rankdump.contract.dialect.acl.words import WATCHER, Words
from rankdump.contract.dialect.section import Section
from rankdump.contract.layout.place import folder_name
from rankdump.contract.plan import UNNAMED, Excluded, Operators, Watched

MAX_EXCLUDED = 100
_POSITION = re.compile(r"(?:input|output)[0-9]+")
_EVERYTHING = Operators(spelt=True)
_NOTHING = Operators(everything=False, spelt=True)


@dataclass(frozen=True, slots=True)
class Listed:
    """What the list selects."""

    operators: Operators = _NOTHING
    """Of models that it does not name."""
    models: tuple[tuple[str, Operators], ...] = ()
    watched: Watched | None = None


def parse_list(dump: Section, words: Words) -> Listed:
    """Return what `dump_list` and `dump_op_switch` select; the first fault is reported."""
    items = objects(dump, "dump_list")
    if words.watches and not items:
        allowed = "an item with layer and watcher_nodes"
        raise coded(dump, "dump_list", allowed, WRONG_TYPE)
    for item in items:
        _check(item, words)
    if words.watches:
        return Listed(operators=_EVERYTHING, watched=_watched(items))
    if not items:
        return Listed(operators=_EVERYTHING if words.operators else _NOTHING)
    return _selected(items, operators=words.operators)


def _check(item: Section, words: Words) -> None:
    if not words.operators:
        for key, value in (
            ("model_name", text(item, "model_name")),
            ("layer", texts(item, "layer")),
        ):
            if key in item.values and not value:
                raise coded(item, key, "something in it, or no such key", WRONG_TYPE)
    _check_watched(item, words)
    for key in BLACKLISTS:
        if len(objects(item, key)) > MAX_EXCLUDED:
            count = len(objects(item, key))
            raise coded(item, key, f"at most {MAX_EXCLUDED} entries, not {count}", BAD_VALUE)
    for key in (*BLACKLISTS, "opname_range"):
        if objects(item, key) and words.level != "op":
            raise coded(item, key, 'no such key unless dump_level is "op"', CONFLICT)
    _check_ranges(item)


def _check_watched(item: Section, words: Words) -> None:
    nodes = texts(item, "watcher_nodes")
    if not words.watches:
        if nodes:
            allowed = f'no such key unless dump_scene is "{WATCHER}"'
            raise coded(item, "watcher_nodes", allowed, CONFLICT)
        return
    if not nodes:
        raise coded(item, "watcher_nodes", "names of operators", WRONG_TYPE)
    if text(item, "model_name"):
        raise coded(item, "model_name", f'no such key where dump_scene is "{WATCHER}"', CONFLICT)


def _check_ranges(item: Section) -> None:
    ranges = objects(item, "opname_range")
    if ranges and not text(item, "model_name"):
        raise coded(item, "model_name", "the model of opname_range", WRONG_TYPE)
    for each in ranges:
        for key in ("begin", "end"):
            if not text(each, key):
                raise coded(each, key, "the name of an operator", BAD_VALUE)


def _watched(items: Sequence[Section]) -> Watched:
    """An item without layers watches after every operator, and as items join, so do all."""
    nodes: dict[str, None] = {}
    layers: dict[str, None] = {}
    for number, item in enumerate(items):
        if number:
            item.note(
                "watcher_nodes", "joins the item before: all are read after the layers of both"
            )
        layers |= dict.fromkeys(texts(item, "layer"))
        nodes |= dict.fromkeys(texts(item, "watcher_nodes"))
    everywhere = any("layer" not in item.values for item in items)
    return Watched(() if everywhere else tuple(layers), tuple(nodes))


def _selected(items: Iterable[Section], *, operators: bool) -> Listed:
    every: Operators | None = None
    models: dict[str, Operators] = {}
    for item in items:
        wanted, name = _operators(item), text(item, "model_name")
        if not name:
            every = wanted if every is None else _joined(every, wanted)
            continue
        folder = folder_name(name)
        if folder in models:
            item.note("model_name", "is listed twice; what both select is dumped")
        models[folder] = _joined(models.get(folder, _NOTHING), wanted)
    if every is not None:
        models = {name: _joined(own, every) for name, own in models.items()}
    if operators:
        # Arrays that belong to no model are what comes closest to single operators.
        models.setdefault(UNNAMED, _EVERYTHING)
    return Listed(every or _NOTHING, tuple(models.items()))


def _operators(item: Section) -> Operators:
    layers = texts(item, "layer")
    ranges = tuple(
        (text(each, "begin"), text(each, "end")) for each in objects(item, "opname_range")
    )
    return Operators(
        spelt=True,
        everything=not (layers or ranges),
        names=tuple(dict.fromkeys(layers)),
        ranges=ranges,
        without_types=_excluded(item, "optype_blacklist"),
        without_names=_excluded(item, "opname_blacklist"),
    )


def _excluded(item: Section, key: str) -> tuple[Excluded, ...]:
    found: list[Excluded] = []
    for entry in objects(item, key):
        name = text(entry, "name")
        if not name:
            entry.note("name", "is of no operator and excludes nothing")
            continue
        given = texts(entry, "pos")
        kept = tuple(position for position in given if _POSITION.fullmatch(position))
        for position in given:
            if position not in kept:
                entry.note(
                    "pos", "is ignored: it is neither input nor output and a number", position
                )
        # A list of which nothing is left must not turn into one that excludes every tensor.
        if kept or not any(given):
            found.append(Excluded(name, kept))
    return tuple(found)


def _joined(one: Operators, other: Operators) -> Operators:
    return replace(
        one,
        everything=one.everything or other.everything,
        names=tuple(dict.fromkeys((*one.names, *other.names))),
        ranges=(*one.ranges, *other.ranges),
        without_types=(*one.without_types, *other.without_types),
        without_names=(*one.without_names, *other.without_names),
    )
