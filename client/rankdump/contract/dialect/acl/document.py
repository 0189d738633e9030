"""From the document of an `acl.json` to a plan, in CANN's own order of checks. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import cast

from rankdump.contract.dialect.acl import path
from rankdump.contract.dialect.acl.items import Listed, parse_list
from rankdump.contract.dialect.acl.types import (
    BAD_VALUE,
    CONFLICT,
    ITEM_KEYS,
    KEYS,
    WRONG_TYPE,
    check_depth,
    check_types,
    coded,
    objects,
    text,
    texts,
)
from rankdump.contract.dialect.acl.words import STATS, Words, check_scene, parse_words
from rankdump.contract.dialect.disk import Probe
from rankdump.contract.dialect.figures import content_of
from rankdump.contract.dialect.notes import Notes
from rankdump.contract.dialect.rankdump_section import parse_section
from rankdump.contract.dialect.section import Section
from rankdump.contract.dialect.steps import parse_steps
from rankdump.contract.errors import MISSING, ConfigError
from rankdump.contract.plan import Content, DumpPlan, Iterations, Output, Selection

SECTION = "dump"
_EMPTY_LIST = "E10001"
_COLLECTING = "E10056"
_OVERFLOW = "GE, E19999"
_COLLECT_VARIABLE = "NPU_COLLECT_PATH"


def parse(
    body: Mapping[str, object],
    *,
    file: str,
    environ: Mapping[str, str],
    notes: Notes,
    probe: Probe,
) -> DumpPlan:
    """Return the plan; without `dump`, or with nothing in it, one that is not enabled."""
    check_depth(body, file=file)
    dump = _section(body, file, notes)
    check_types(dump)
    words = parse_words(dump)
    _note_unknown(dump)
    check_scene(dump, words)
    if words.exception:
        selection, content = _exception(dump), Content()
        root, layout = path.exception_root(dump, environ, probe), "cann-op"
    else:
        root = path.parse_path(dump, environ, probe) if dump.values else ""
        selection, content = _of_data(dump, words, environ)
        layout = "cann"
    enabled = selection is not None
    output, delivery = parse_section(
        body,
        file=file,
        output=Output(root or path.off_root(environ, file, probe), "", layout, file_format="bin"),
        notes=notes,
    )
    return DumpPlan(
        output=output,
        selection=selection or Selection(),
        content=content,
        delivery=delivery,
        dialect="acl",
        warnings=notes.texts,
        enabled=enabled,
    )


def _section(body: Mapping[str, object], file: str, notes: Notes) -> Section:
    values = body.get(SECTION, MISSING)
    if values is MISSING or values == {}:
        notes.add(SECTION, values, "enables nothing: no tensor is dumped")
        return Section(file, SECTION, {}, notes)
    if not isinstance(values, dict):
        raise ConfigError(file, SECTION, values, f"an object ({WRONG_TYPE})")
    return Section(file, SECTION, cast("dict[str, object]", values), notes)


def _of_data(
    dump: Section, words: Words, environ: Mapping[str, str]
) -> tuple[Selection | None, Content]:
    """Return what is dumped of a model that raises nothing; None for nothing at all."""
    if words.debug:
        return _overflow(dump, words), Content()
    iterations = _iterations(dump)
    listed = parse_list(dump, words)
    content = _content(dump, words)
    _note_idle(dump, words)
    if not (words.operators or words.watches or objects(dump, "dump_list")):
        if "dump_list" in dump.values:
            raise coded(dump, "dump_list", 'an item, or dump_op_switch "on"', _EMPTY_LIST)
        if dump.values:
            wanted = "dump_list, dump_op_switch, dump_debug or dump_scene"
            dump.notes.add(SECTION, dict(dump.values), f"enables nothing: it has no {wanted}")
        return None, content
    if environ.get(_COLLECT_VARIABLE):
        allowed = f"no such variable beside a dump of data ({_COLLECTING})"
        raise ConfigError(dump.file, _COLLECT_VARIABLE, environ[_COLLECT_VARIABLE], allowed)
    return _selection(words, iterations, listed), content


def _selection(words: Words, iterations: Iterations, listed: Listed) -> Selection:
    return Selection(
        iterations=iterations,
        operators=listed.operators,
        models=listed.models,
        watched=listed.watched,
        inputs=words.mode != "output",
        outputs=words.mode != "input",
    )


def _overflow(dump: Section, words: Words) -> Selection:
    if words.operators:
        raise coded(dump, "dump_op_switch", '"off" where dump_debug is "on"', CONFLICT)
    if objects(dump, "dump_list"):
        raise coded(dump, "dump_list", 'no item where dump_debug is "on"', _OVERFLOW)
    reason = 'is not read where dump_debug is "on": an operator with an overflow is written whole'
    for key in ("dump_mode", "dump_step", "dump_data", "dump_stats"):
        if key in dump.values:
            dump.note(key, reason)
    return Selection(trigger="overflow")


def _exception(dump: Section) -> Selection:
    for key in dump.values:
        if key in KEYS and key not in ("dump_scene", "dump_path"):
            dump.note(
                key, "is not read: dump_scene asks for the operator that raises, and no other"
            )
    reason = "CANN has no folder of the time below extra-info/data-dump; here there is one"
    dump.note("dump_scene", f"keeps what the operator that raised was given; {reason}")
    return Selection(trigger="exception", outputs=False)


def _iterations(dump: Section) -> Iterations:
    steps = text(dump, "dump_step")
    if not steps:
        return Iterations()
    try:
        return parse_steps(steps)
    except ValueError as error:
        raise coded(dump, "dump_step", str(error), BAD_VALUE) from None


def _content(dump: Section, words: Words) -> Content:
    chosen = texts(dump, "dump_stats")
    if "dump_stats" in dump.values:
        if not chosen:
            raise coded(dump, "dump_stats", "at least one figure, or no such key", WRONG_TYPE)
        if words.data != "stats":
            raise coded(dump, "dump_stats", 'no such key unless dump_data is "stats"', CONFLICT)
    return content_of(words.data, [STATS[name] for name in chosen])


def _note_idle(dump: Section, words: Words) -> None:
    if "dump_level" in dump.values and words.level != "op":
        dump.note("dump_level", 'becomes "op": there are no kernels below an operator here')
    if "dump_kernel_data" in dump.values:
        dump.note("dump_kernel_data", "changes nothing: there are no kernels here that print")


def _note_unknown(dump: Section) -> None:
    for section, known in (
        (dump, KEYS),
        *((item, ITEM_KEYS) for item in objects(dump, "dump_list")),
    ):
        for key in section.values:
            if key not in known:
                nearest = difflib.get_close_matches(key.lower(), known, n=1)
                hint = f"; the nearest is {nearest[0]}" if nearest else ""
                section.note(key, f"is ignored: there is no such key{hint}")
