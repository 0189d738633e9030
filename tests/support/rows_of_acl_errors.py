"""Rows of CANN 8's acl.json reference that are errors, by violation."""

from __future__ import annotations

from typing import Any

from support.acl_configurations import HERE, AclRow, refused
from support.configurations import ABSENT, NOT_ARRAY, NOT_TEXT

NOT_OBJECT = (None, 1, "x", True, [])
TYPE, WORD, VALUE, CLASH = "EP0001", "EP0002", "EP0003", "EP0005"

VIOLATIONS = (
    "wrong type",
    "outside enum",
    "no dump_path",
    "bad dump_path",
    "bad dump_step",
    "scene and dump_debug or dump_op_switch",
    "watcher and dump_mode",
    "dump_debug and dump_op_switch",
    "dump_stats and tensor",
    "dump_stats empty",
    "empty model_name or layer",
    "watcher without nodes",
    "watcher and model_name",
    "nodes without watcher",
    "blacklist too long",
    "blacklist and dump_level",
    "empty dump_list",
    "dump_debug and dump_list",
    "data dump and NPU_COLLECT_PATH",
)


def item(source: str, entry: object, key: str, code: str, **dump: Any) -> AclRow:
    """A row with one item in `dump_list`, and the key at fault in it."""
    return AclRow(
        source, {"dump_list": [entry], **dump}, refused=f"dump.dump_list[0]{key}", code=code
    )


TYPES = [
    *(
        AclRow(f"wrong type: dump {value!r}", value, refused="dump", value=value, code=TYPE)
        for value in NOT_OBJECT
    ),
    *(
        row
        for key in (
            *("dump_path", "dump_mode", "dump_op_switch", "dump_level", "dump_scene"),
            *("dump_data", "dump_debug", "dump_kernel_data", "dump_step"),
        )
        for row in refused("wrong type", key, *NOT_TEXT, code=TYPE)
    ),
    *refused("wrong type", "dump_stats", *NOT_ARRAY, code=TYPE),
    *refused("wrong type", "dump_list", *NOT_ARRAY, code=TYPE),
    *(item(f"wrong type: item {entry!r}", entry, "", TYPE) for entry in (None, 1, "x", True, [])),
    *(
        item(f"wrong type: {key} {value!r}", {key: value}, f".{key}", TYPE)
        for key in (
            "layer",
            "watcher_nodes",
            "optype_blacklist",
            "opname_blacklist",
            "opname_range",
        )
        for value in NOT_ARRAY
    ),
    *(
        item(f"wrong type: model_name {value!r}", {"model_name": value}, ".model_name", TYPE)
        for value in NOT_TEXT
    ),
    *(
        item(f"wrong type: element of {key}", {key: ["a", 1]}, f".{key}[1]", TYPE)
        for key in ("layer", "watcher_nodes")
    ),
    *(
        item(f"wrong type: {key} of a text", {key: ["a"]}, f".{key}[0]", TYPE)
        for key in ("optype_blacklist", "opname_blacklist", "opname_range")
    ),
    *(
        item(f"wrong type: {key} {part}", {key: [{part: 1}]}, f".{key}[0].{part}", TYPE)
        for key, parts in (
            ("optype_blacklist", ("name", "pos")),
            ("opname_blacklist", ("name", "pos")),
            ("opname_range", ("begin", "end")),
        )
        for part in parts
    ),
    item(
        "wrong type: pos of a number",
        {"opname_blacklist": [{"pos": [1]}]},
        ".opname_blacklist[0].pos[0]",
        TYPE,
    ),
    AclRow(
        "wrong type: dump_stats of a number",
        {"dump_stats": ["Max", 1]},
        refused="dump.dump_stats[1]",
        value=1,
        code=TYPE,
    ),
]

WORDS = [
    *refused("outside enum", "dump_mode", "both", "Input", " all", code=WORD),
    *refused("outside enum", "dump_data", "statistic", "Tensor", code=WORD),
    *refused("outside enum", "dump_op_switch", "yes", "ON", code=WORD),
    *refused("outside enum", "dump_level", "layer", code=WORD),
    *refused("outside enum", "dump_debug", "true", code=WORD),
    *refused("outside enum", "dump_scene", "exception", "aic_err", code=WORD),
    *refused("outside enum", "dump_kernel_data", "log", "all,log", "all, printf", code=WORD),
    *(
        AclRow(
            f"outside enum: dump_stats {name!r}",
            {"dump_stats": ["Max", name]},
            refused="dump.dump_stats[1]",
            value=name,
            code=WORD,
        )
        for name in ("max", "Count", "Negative", "L2Norm", "")
    ),
    *refused("outside enum, empty", "dump_mode", "", code=TYPE),
    *refused("outside enum, empty", "dump_kernel_data", "", "all,", code=TYPE),
]

PATHS = [
    *refused("no dump_path", "dump_path", ABSENT, "", code=TYPE),
    *refused(
        *("bad dump_path", "dump_path", "/x" * 257, "/not/there", "not/there", "nul\0"),
        *("10.0.0.1:", ":/tmp", "256.0.0.1:/tmp", "1.2.3.4444:/tmp", "1.2.3:/tmp", "a.b.c.d:/tmp"),
        *("1.2.3.4:/a b", "1.2.3.4:/\u00e9", "1.2.3.4:/a|b", "1.2.3.4:/a\n", "1.2.3.4:/`"),
        code=VALUE,
    ),
    AclRow(
        "bad dump_path: a file",
        {"dump_path": "{folder}/file"},
        refused="dump.dump_path",
        code=VALUE,
    ),
    AclRow(
        "bad dump_path: of overflow",
        {"dump_debug": "on", "dump_list": ABSENT, "dump_path": "/not/there"},
        refused="dump.dump_path",
        code=VALUE,
    ),
    AclRow(
        "no dump_path: of a watcher",
        {"dump_scene": "watcher", "dump_path": ABSENT},
        refused="dump.dump_path",
        code=TYPE,
    ),
]

STEPS = [
    *refused("bad dump_step", "dump_step", "|".join("1" for _ in range(101)), code=VALUE),
    *refused("bad dump_step", "dump_step", "1-2-3", "a", "1,2", " 1", "1 |2", "+1", code=VALUE),
    *refused("bad dump_step", "dump_step", "1|", "|1", "1||2", "-1", "1-", "-", "|", code=VALUE),
    *refused("bad dump_step", "dump_step", "2-1", "0|10-9", "1\n", "\uff11", code=VALUE),
    *refused("bad dump_step", "dump_step", str(1 << 64), "9" * 5000, code=VALUE),
]

LIST = [{"layer": ["a"], "watcher_nodes": ["b"]}]
LONG = [{"name": f"n{number}"} for number in range(101)]
RANGE = [{"begin": "a", "end": "b"}]

SCENES = [
    *(
        AclRow(
            f"scene and dump_debug or dump_op_switch: {scene}, {key}",
            {"dump_scene": scene, key: "on"},
            refused=f"dump.{key}",
            value="on",
            code=CLASH,
        )
        for scene in (
            *("watcher", "lite_exception", "aic_err_brief_dump"),
            *("aic_err_norm_dump", "aic_err_detail_dump"),
        )
        for key in ("dump_debug", "dump_op_switch")
    ),
    *refused(
        "watcher and dump_mode",
        "dump_mode",
        "all",
        "input",
        code=CLASH,
        dump_scene="watcher",
        dump_list=LIST,
    ),
    *refused("dump_debug and dump_op_switch", "dump_op_switch", "on", code=CLASH, dump_debug="on"),
    *refused("dump_debug and dump_list", "dump_list", LIST, code="GE, E19999", dump_debug="on"),
    *refused("dump_stats and tensor", "dump_stats", ["Max"], code=CLASH),
    *refused("dump_stats and tensor", "dump_stats", ["Max"], code=CLASH, dump_data="tensor"),
    *refused("dump_stats empty", "dump_stats", [], code=TYPE),
    *refused("dump_stats empty", "dump_stats", [], code=TYPE, dump_data="stats"),
]

ITEMS = [
    item("empty model_name or layer: model_name", {"model_name": ""}, ".model_name", TYPE),
    item("empty model_name or layer: layer", {"model_name": "A", "layer": []}, ".layer", TYPE),
    item(
        "watcher without nodes: missing",
        {"layer": ["a"]},
        ".watcher_nodes",
        TYPE,
        dump_scene="watcher",
    ),
    item(
        "watcher without nodes: empty",
        {"layer": ["a"], "watcher_nodes": []},
        ".watcher_nodes",
        TYPE,
        dump_scene="watcher",
    ),
    *refused("watcher without nodes", "dump_list", [], ABSENT, code=TYPE, dump_scene="watcher"),
    item(
        "watcher and model_name: both",
        {**LIST[0], "model_name": "A"},
        ".model_name",
        CLASH,
        dump_scene="watcher",
    ),
    item("nodes without watcher: none", LIST[0], ".watcher_nodes", CLASH),
    *(
        item(f"blacklist too long: {key}", {key: LONG}, f".{key}", VALUE, dump_level="op")
        for key in ("optype_blacklist", "opname_blacklist")
    ),
    *(
        item(
            f"blacklist and dump_level: {key}, {level}",
            {"model_name": "A", key: value},
            f".{key}",
            CLASH,
            **({"dump_level": level} if level else {}),
        )
        for key, value in (
            ("optype_blacklist", LONG[:1]),
            ("opname_blacklist", LONG[:1]),
            ("opname_range", RANGE),
        )
        for level in ("all", "kernel", "")
    ),
    item(
        "opname_range without model_name: missing",
        {"opname_range": RANGE},
        ".model_name",
        TYPE,
        dump_level="op",
    ),
    *(
        item(
            f"opname_range with one end: {missing}",
            {"model_name": "A", "opname_range": [{**RANGE[0], missing: value}]},
            f".opname_range[0].{missing}",
            VALUE,
            dump_level="op",
        )
        for missing, value in (("begin", ""), ("end", ""))
    ),
]

WHOLE = [
    *refused("empty dump_list", "dump_list", [], code="E10001"),
    *refused("empty dump_list", "dump_list", [], code="E10001", dump_op_switch="off"),
    *(
        AclRow(
            f"data dump and NPU_COLLECT_PATH: {words}",
            dump,
            environ={"NPU_COLLECT_PATH": HERE},
            refused="NPU_COLLECT_PATH",
            code="E10056",
        )
        for words, dump in (
            ("models", {}),
            ("operators", {"dump_list": [], "dump_op_switch": "on"}),
            ("watcher", {"dump_scene": "watcher", "dump_list": LIST}),
        )
    ),
]


ROWS = [*TYPES, *WORDS, *PATHS, *STEPS, *SCENES, *ITEMS, *WHOLE]
