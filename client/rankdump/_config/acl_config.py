"""CANN's `acl.json`, as `aclInit` and `aclmdlSetDump` read it: converts the document to a plan in
CANN's own order of checks, including the operators and models of `dump_list` (CANN, acl.json).
Pure.

The text of an error ends in the code that CANN reports for it, such as (EP0003). An item of
`dump_list` without `model_name` applies to every model.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from rankdump._config import acl_section
from rankdump._config.acl_section import (
    ACL_KEYS,
    BAD_VALUE,
    BLACKLIST_KEYS,
    CONFLICT,
    ENTRY_KEYS,
    ITEM_KEYS,
    STATISTICS_BY_WORD,
    WATCHER_SCENE,
    WRONG_TYPE,
    AclWords,
    check_depth,
    check_scene,
    check_types,
    make_cann_content,
    make_coded_error,
    parse_acl_words,
    parse_steps,
    read_objects,
    read_text,
    read_texts,
)
from rankdump._config.config_section import ConfigNotes, ConfigSection, describe_unknown_key
from rankdump._config.output_path import PathProbe
from rankdump._config.rankdump_section import (
    RANKDUMP_KEYS,
    RANKDUMP_SECTION,
    parse_rankdump_section,
)
from rankdump._core.plan import (
    UNNAMED_MODEL,
    ContentSettings,
    DumpPlan,
    IterationSelection,
    OperatorSelection,
    OutputSettings,
    TensorExclusion,
    TensorSelection,
    WatchedOperators,
)
from rankdump._layout.tree_paths import make_folder_name
from rankdump.errors import MISSING_VALUE, ConfigError

MAX_EXCLUSIONS = 100
_POSITION_PATTERN = re.compile(r"(?:input|output)[0-9]+")
_EVERY_OPERATOR = OperatorSelection(spelt=True)
_NO_OPERATOR = OperatorSelection(everything=False, spelt=True)


@dataclass(frozen=True, slots=True)
class DumpListSelection:
    """Operators that `dump_list` selects."""

    operators: OperatorSelection = _NO_OPERATOR
    """Operators of the models that the list does not name."""
    models: tuple[tuple[str, OperatorSelection], ...] = ()
    watched: WatchedOperators | None = None


def parse_dump_list(dump: ConfigSection, words: AclWords) -> DumpListSelection:
    """Return the selection of `dump_list` and `dump_op_switch`; of several errors the first one is
    raised.
    """
    items = read_objects(dump, "dump_list")
    if words.is_watching and not items:
        allowed = "an item with layer and watcher_nodes"
        raise make_coded_error(dump, "dump_list", allowed, WRONG_TYPE)
    for item in items:
        _check_list_item(item, words)
    if words.is_watching:
        return DumpListSelection(operators=_EVERY_OPERATOR, watched=_join_watched(items))
    if not items:
        return DumpListSelection(
            operators=_EVERY_OPERATOR if words.dumps_operators else _NO_OPERATOR
        )
    return _select_operators(items, operators=words.dumps_operators)


def _check_list_item(item: ConfigSection, words: AclWords) -> None:
    if not words.dumps_operators:
        for key, value in (
            ("model_name", read_text(item, "model_name")),
            ("layer", read_texts(item, "layer")),
        ):
            if key in item.values and not value:
                raise make_coded_error(item, key, "at least one entry, or no such key", WRONG_TYPE)
    _check_watched(item, words)
    for key in BLACKLIST_KEYS:
        count = len(read_objects(item, key))
        if count > MAX_EXCLUSIONS:
            allowed = f"at most {MAX_EXCLUSIONS} entries, not {count}"
            raise make_coded_error(item, key, allowed, BAD_VALUE)
    for key in (*BLACKLIST_KEYS, "opname_range"):
        if read_objects(item, key) and words.level != "op":
            raise make_coded_error(item, key, 'no such key unless dump_level is "op"', CONFLICT)
    _check_ranges(item)


def _check_watched(item: ConfigSection, words: AclWords) -> None:
    nodes = read_texts(item, "watcher_nodes")
    if not words.is_watching:
        if nodes:
            allowed = f'no such key unless dump_scene is "{WATCHER_SCENE}"'
            raise make_coded_error(item, "watcher_nodes", allowed, CONFLICT)
        return
    if not nodes:
        raise make_coded_error(item, "watcher_nodes", "names of operators", WRONG_TYPE)
    if read_text(item, "model_name"):
        raise make_coded_error(
            item, "model_name", f'no such key where dump_scene is "{WATCHER_SCENE}"', CONFLICT
        )


def _check_ranges(item: ConfigSection) -> None:
    ranges = read_objects(item, "opname_range")
    if ranges and not read_text(item, "model_name"):
        raise make_coded_error(item, "model_name", "the model of opname_range", WRONG_TYPE)
    for each in ranges:
        for key in ("begin", "end"):
            if not read_text(each, key):
                raise make_coded_error(each, key, "the name of an operator", BAD_VALUE)


def _join_watched(items: Sequence[ConfigSection]) -> WatchedOperators:
    """Merge the items; if one of them has no layers, all nodes are read after every operator."""
    nodes: dict[str, None] = {}
    layers: dict[str, None] = {}
    for number, item in enumerate(items):
        if number:
            item.add_note(
                "watcher_nodes",
                "is merged with the item before: all nodes are read after the layers of both",
            )
        layers |= dict.fromkeys(read_texts(item, "layer"))
        nodes |= dict.fromkeys(read_texts(item, "watcher_nodes"))
    everywhere = any("layer" not in item.values for item in items)
    return WatchedOperators(() if everywhere else tuple(layers), tuple(nodes))


def _select_operators(items: Iterable[ConfigSection], *, operators: bool) -> DumpListSelection:
    every: OperatorSelection | None = None
    models: dict[str, OperatorSelection] = {}
    for item in items:
        wanted, name = _parse_item_operators(item), read_text(item, "model_name")
        if not name:
            every = wanted if every is None else _join_operators(every, wanted)
            continue
        folder = make_folder_name(name)
        if folder in models:
            item.add_note("model_name", "is listed twice; what both select is dumped")
        models[folder] = _join_operators(models.get(folder, _NO_OPERATOR), wanted)
    if every is not None:
        models = {name: _join_operators(own, every) for name, own in models.items()}
    if operators:
        # Arrays, which belong to no model, correspond most closely to single operators.
        models.setdefault(UNNAMED_MODEL, _EVERY_OPERATOR)
    return DumpListSelection(every or _NO_OPERATOR, tuple(models.items()))


def _parse_item_operators(item: ConfigSection) -> OperatorSelection:
    layers = read_texts(item, "layer")
    if "" in layers:
        item.add_note("layer", "has an empty entry, which names no operator")
    ranges = tuple(
        (read_text(each, "begin"), read_text(each, "end"))
        for each in read_objects(item, "opname_range")
    )
    return OperatorSelection(
        spelt=True,
        everything=not (layers or ranges),
        names=tuple(dict.fromkeys(layers)),
        ranges=ranges,
        without_types=_parse_exclusions(item, "optype_blacklist"),
        without_names=_parse_exclusions(item, "opname_blacklist"),
    )


def _parse_exclusions(item: ConfigSection, key: str) -> tuple[TensorExclusion, ...]:
    found: list[TensorExclusion] = []
    for entry in read_objects(item, key):
        name = read_text(entry, "name")
        if not name:
            entry.add_note("name", "names no operator and excludes nothing")
            continue
        given = read_texts(entry, "pos")
        kept = tuple(position for position in given if _POSITION_PATTERN.fullmatch(position))
        for position in given:
            if position not in kept:
                entry.add_note(
                    "pos", "is ignored: it is neither input nor output with a number", position
                )
        # A list that has only invalid positions must not become one that excludes every tensor.
        if kept or not any(given):
            found.append(TensorExclusion(name, kept))
    return tuple(found)


def _join_operators(one: OperatorSelection, other: OperatorSelection) -> OperatorSelection:
    return replace(
        one,
        everything=one.everything or other.everything,
        names=tuple(dict.fromkeys((*one.names, *other.names))),
        ranges=(*one.ranges, *other.ranges),
        without_types=(*one.without_types, *other.without_types),
        without_names=(*one.without_names, *other.without_names),
    )


DUMP_SECTION = "dump"
_EMPTY_LIST_CODE = "E10001"
_COLLECTING_CODE = "E10056"
_OVERFLOW_CODE = "GE, E19999"
_COLLECT_VARIABLE = "NPU_COLLECT_PATH"


def parse_acl_config(
    body: Mapping[str, object],
    *,
    file: str,
    environ: Mapping[str, str],
    notes: ConfigNotes,
    probe: PathProbe,
) -> DumpPlan:
    """Return the plan of a document; if `dump` is absent or empty, the plan is not enabled."""
    check_depth(body, file=file)
    dump = _read_dump_section(body, file, notes)
    check_types(dump)
    words = parse_acl_words(dump)
    _note_unknown_keys(body, dump)
    check_scene(dump, words)
    if words.is_exception:
        selection, content = _parse_exception_dump(dump), ContentSettings()
        root, layout = acl_section.make_exception_root(dump, environ, probe), "cann-op"
    else:
        root = acl_section.parse_dump_path(dump, environ, probe) if dump.values else ""
        selection, content = _parse_data_dump(dump, words, environ)
        layout = "cann"
    own = parse_rankdump_section(
        body,
        file=file,
        output=OutputSettings(
            root or acl_section.make_disabled_root(environ, file, probe),
            "",
            layout,
            file_format="bin",
        ),
        notes=notes,
    )
    return own.make_plan(
        selection or TensorSelection(),
        content,
        dialect="acl",
        notes=notes,
        enabled=selection is not None,
    )


def _read_dump_section(body: Mapping[str, object], file: str, notes: ConfigNotes) -> ConfigSection:
    values = body.get(DUMP_SECTION, MISSING_VALUE)
    if values is MISSING_VALUE or values == {}:
        notes.add(DUMP_SECTION, values, "enables nothing: no tensor is dumped")
        return ConfigSection(file, DUMP_SECTION, {}, notes)
    if not isinstance(values, dict):
        raise ConfigError(file, DUMP_SECTION, values, f"an object ({WRONG_TYPE})")
    return ConfigSection(file, DUMP_SECTION, cast("dict[str, object]", values), notes)


def _parse_data_dump(
    dump: ConfigSection, words: AclWords, environ: Mapping[str, str]
) -> tuple[TensorSelection | None, ContentSettings]:
    """Return the selection of a dump that is not for exceptions, and its content; None if nothing
    is selected.
    """
    if words.is_debug:
        return _parse_overflow_dump(dump, words), ContentSettings()
    iterations = _parse_iterations(dump)
    listed = parse_dump_list(dump, words)
    content = _parse_content(dump, words)
    _note_idle_keys(dump, words)
    if not (words.dumps_operators or words.is_watching or read_objects(dump, "dump_list")):
        if "dump_list" in dump.values:
            raise make_coded_error(
                dump, "dump_list", 'an item, or dump_op_switch "on"', _EMPTY_LIST_CODE
            )
        if dump.values:
            wanted = "dump_list, dump_op_switch, dump_debug or dump_scene"
            dump.notes.add(DUMP_SECTION, dict(dump.values), f"enables nothing: it has no {wanted}")
        return None, content
    if environ.get(_COLLECT_VARIABLE):
        allowed = f"no such variable beside a dump of data ({_COLLECTING_CODE})"
        raise ConfigError(dump.file, _COLLECT_VARIABLE, environ[_COLLECT_VARIABLE], allowed)
    return _make_selection(words, iterations, listed), content


def _make_selection(
    words: AclWords, iterations: IterationSelection, listed: DumpListSelection
) -> TensorSelection:
    return TensorSelection(
        iterations=iterations,
        operators=listed.operators,
        models=listed.models,
        watched=listed.watched,
        inputs=words.mode != "output",
        outputs=words.mode != "input",
    )


def _parse_overflow_dump(dump: ConfigSection, words: AclWords) -> TensorSelection:
    if words.dumps_operators:
        raise make_coded_error(dump, "dump_op_switch", '"off" where dump_debug is "on"', CONFLICT)
    if read_objects(dump, "dump_list"):
        raise make_coded_error(
            dump, "dump_list", 'no item where dump_debug is "on"', _OVERFLOW_CODE
        )
    reason = 'is ignored where dump_debug is "on": an operator with an overflow is dumped whole'
    for key in ("dump_mode", "dump_step", "dump_data", "dump_stats"):
        if key in dump.values:
            dump.add_note(key, reason)
    return TensorSelection(trigger="overflow")


def _parse_exception_dump(dump: ConfigSection) -> TensorSelection:
    for key in dump.values:
        if key in ACL_KEYS and key not in ("dump_scene", "dump_path"):
            dump.add_note(key, "is ignored: dump_scene dumps only the operator that raises")
    reason = "unlike CANN, rankdump adds a folder of the start time below extra-info/data-dump"
    dump.add_note("dump_scene", f"dumps the inputs of the operator that raised; {reason}")
    return TensorSelection(trigger="exception", outputs=False)


def _parse_iterations(dump: ConfigSection) -> IterationSelection:
    steps = read_text(dump, "dump_step")
    if not steps:
        return IterationSelection()
    try:
        return parse_steps(steps)
    except ValueError as error:
        raise make_coded_error(dump, "dump_step", str(error), BAD_VALUE) from None


def _parse_content(dump: ConfigSection, words: AclWords) -> ContentSettings:
    chosen = read_texts(dump, "dump_stats")
    if "dump_stats" in dump.values:
        if not chosen:
            raise make_coded_error(
                dump, "dump_stats", "at least one statistic, or no such key", WRONG_TYPE
            )
        if words.data != "stats":
            raise make_coded_error(
                dump, "dump_stats", 'no such key unless dump_data is "stats"', CONFLICT
            )
    return make_cann_content(words.data, [STATISTICS_BY_WORD[name] for name in chosen])


def _note_idle_keys(dump: ConfigSection, words: AclWords) -> None:
    if "dump_level" in dump.values and words.level != "op":
        dump.add_note("dump_level", 'becomes "op": rankdump sees no kernels below an operator')
    if "dump_kernel_data" in dump.values:
        dump.add_note("dump_kernel_data", "changes nothing: rankdump sees no kernels that print")


def _note_unknown_keys(body: Mapping[str, object], dump: ConfigSection) -> None:
    """Note every key that nothing reads; sections of others may be beside `dump`."""
    for key, value in body.items():
        nearest = difflib.get_close_matches(key.lower(), [RANKDUMP_SECTION], cutoff=0.8)
        if nearest and key != RANKDUMP_SECTION:
            dump.notes.add(key, value, f"is ignored: the nearest section is {RANKDUMP_SECTION}")
    items = read_objects(dump, "dump_list")
    for section, known in (
        (dump, ACL_KEYS),
        *((item, ITEM_KEYS) for item in items),
        *(
            (entry, keys)
            for item in items
            for name, keys in ENTRY_KEYS.items()
            for entry in read_objects(item, name)
        ),
    ):
        for key in section.values:
            if key not in known:
                reason = _describe_own_key(key) or describe_unknown_key(key, known)
                section.add_note(key, f"is ignored: {reason}")


def _describe_own_key(key: str) -> str:
    if key == RANKDUMP_SECTION:
        return f"the section belongs beside {DUMP_SECTION}, not in it"
    return f"the key belongs in the section {RANKDUMP_SECTION}" if key in RANKDUMP_KEYS else ""
