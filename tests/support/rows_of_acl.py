"""Rows of CANN 8's acl.json reference that are accepted, and the resulting plans."""

from __future__ import annotations

from support.acl_configurations import HERE, AclRow
from support.configurations import ABSENT
from support.rows_of_acl_errors import LIST, LONG, RANGE

from rankdump._core.plan import (
    ContentSettings,
    IterationSelection,
    OperatorSelection,
    TensorExclusion,
    WatchedOperators,
)

EVERY, NONE = OperatorSelection(spelt=True), OperatorSelection(everything=False, spelt=True)
OP = {"dump_level": "op"}
DEFAULT = ("max", "min", "avg", "count", "nan count", "negative inf count", "positive inf count")
OFF = {"enabled": False, "dialect": "acl"}


def named(*names: str, **changes: object) -> OperatorSelection:
    return OperatorSelection(everything=False, names=names, spelt=True, **changes)  # type: ignore[arg-type]


def listed(source: str, *items: object, gives: dict[str, object], **changes: object) -> AclRow:
    """A row with these items in `dump_list`."""
    warns = changes.pop("warns", ())
    dump = {"dump_list": list(items), **changes}
    return AclRow(f"dump_list: {source}", dump, gives=gives, warns=warns)  # type: ignore[arg-type]


DEFAULTS = [
    AclRow(
        "defaults",
        gives={
            "dialect": "acl",
            "enabled": True,
            "output.root": HERE,
            "output.net_name": "",
            "output.layout": "cann",
            "output.file_format": "bin",
            "output.codec": "zstd",
            "content": ContentSettings(),
            "selection.iterations": IterationSelection(),
            "selection.devices": None,
            "selection.inputs": False,
            "selection.outputs": True,
            "selection.trigger": "always",
            "selection.models": (("A", EVERY),),
            "selection.operators": NONE,
        },
    ),
    *(
        AclRow(
            f"dump_mode {mode}",
            {"dump_mode": mode},
            gives={"selection.inputs": inputs, "selection.outputs": outputs},
        )
        for mode, inputs, outputs in (
            ("input", True, False),
            ("output", False, True),
            ("all", True, True),
        )
    ),
    AclRow(
        "rankdump's own section",
        own={"codec": "none", "layout": "cann-op"},
        gives={"output.codec": "none", "output.layout": "cann-op"},
    ),
    AclRow(
        "unknown key",
        {"dump_modes": "x"},
        warns=("dump.dump_modes: 'x' is ignored: there is no such key; the nearest is dump_mode",),
    ),
    AclRow(
        "unknown key of an item",
        {"dump_list": [{"model_name": "A", "layers": ["a"]}]},
        warns=("dump.dump_list[0].layers: ['a'] is ignored: there is no such key; the nearest is",),
    ),
    AclRow(
        "unknown keys of entries",
        {
            "dump_level": "op",
            "dump_list": [
                {
                    "model_name": "A",
                    "optype_blacklist": [{"name": "Linear", "poss": ["input0"]}],
                    "opname_range": [{"begin": "a", "end": "b", "stop": "c"}],
                }
            ],
        },
        warns=(
            "dump_list[0].optype_blacklist[0].poss: ['input0'] is ignored: there is no such key; "
            "the nearest is pos",
            "dump_list[0].opname_range[0].stop: 'c' is ignored: there is no such key",
        ),
    ),
    AclRow(
        "rankdump's own section within dump",
        {"rankdump": {"codec": "none"}, "codec": "none"},
        gives={"output.codec": "zstd"},
        warns=(
            "dump.rankdump: {'codec': 'none'} is ignored: the section belongs beside dump",
            "dump.codec: 'none' is ignored: the key belongs in the section rankdump",
        ),
    ),
    listed(
        "an empty layer",
        {"model_name": "A", "layer": ["", "a"]},
        gives={"selection.models": (("A", named("", "a")),)},
        warns=("layer: ['', 'a'] has an empty entry, which names no operator",),
    ),
]

NOTHING = [
    AclRow("dump empty", {}, bare=True, gives=OFF, warns=("dump: {} enables nothing",)),
    AclRow(
        "no list, switch, debug or scene",
        {"dump_list": ABSENT},
        gives=OFF,
        warns=("enables nothing: it has no dump_list",),
    ),
    AclRow(
        "switch off, no list",
        {"dump_list": ABSENT, "dump_op_switch": "off"},
        gives=OFF,
        warns=("enables nothing",),
    ),
    AclRow(
        "NPU_COLLECT_PATH beside nothing",
        {},
        bare=True,
        gives=OFF,
        environ={"NPU_COLLECT_PATH": HERE},
        warns=("enables nothing",),
    ),
    AclRow("NPU_COLLECT_PATH is empty", environ={"NPU_COLLECT_PATH": ""}),
]

PLACES = [
    AclRow("dump_path: trailing slash", {"dump_path": f"{HERE}/"}, gives={"output.root": HERE}),
    AclRow("dump_path: dots", {"dump_path": f"{HERE}/../dumps/."}, gives={"output.root": HERE}),
    AclRow(
        "dump_path: another host",
        {"dump_path": "10.0.255.1:/a/b=c"},
        gives={"output.root": "/a/b=c"},
        warns=("files are written on this host, to /a/b=c",),
    ),
    AclRow(
        "dump_path: RANKDUMP_OUTPUT",
        {"dump_path": "/not/there"},
        environ={"RANKDUMP_OUTPUT": "/o/p"},
        gives={"output.root": "/o/p"},
    ),
    AclRow(
        "dump_path: RANKDUMP_OUTPUT and another host",
        {"dump_path": "1.2.3.4:/x"},
        environ={"RANKDUMP_OUTPUT": "/o/p"},
        gives={"output.root": "/o/p"},
    ),
]

STEPS = [
    AclRow(
        f"dump_step {text[:20]!r}",
        {"dump_step": text},
        gives={"selection.iterations": IterationSelection(text, spans)},
    )
    for text, spans in (
        ("7", ((7, 7),)),
        ("0|5-8|100-120", ((0, 0), (5, 8), (100, 120))),
        ("3-3|03", ((3, 3), (3, 3))),
        (str((1 << 64) - 1), (((1 << 64) - 1, (1 << 64) - 1),)),
        ("|".join(["1"] * 100), ((1, 1),) * 100),
    )
]
STEPS.append(
    AclRow(
        "dump_step empty", {"dump_step": ""}, gives={"selection.iterations": IterationSelection()}
    )
)

LISTS = [
    listed(
        "layers of a model",
        {"model_name": "A", "layer": ["x", "y", "x"]},
        gives={"selection.models": (("A", named("x", "y")),), "selection.operators": NONE},
    ),
    listed(
        "layers of every model",
        {"layer": ["x"]},
        gives={"selection.models": (), "selection.operators": named("x")},
    ),
    listed("an item that says nothing", {}, gives={"selection.operators": EVERY}),
    listed(
        "two models",
        {"model_name": "A"},
        {"model_name": "B", "layer": ["x"]},
        gives={"selection.models": (("A", EVERY), ("B", named("x")))},
    ),
    listed(
        "a model and every model",
        {"model_name": "A", "layer": ["x"]},
        {"layer": ["y"]},
        gives={"selection.models": (("A", named("x", "y")),), "selection.operators": named("y")},
    ),
    listed(
        "a model twice",
        {"model_name": "A", "layer": ["x"]},
        {"model_name": "A", "layer": ["y"]},
        gives={"selection.models": (("A", named("x", "y")),)},
        warns=("is listed twice",),
    ),
    listed(
        "a name as its folder is called",
        {"model_name": "res net.v1/2"},
        gives={"selection.models": (("res_net_v1_2", EVERY),)},
    ),
    listed(
        "without anything, dump_op_switch on",
        dump_op_switch="on",
        gives={"selection.models": (), "selection.operators": EVERY},
    ),
    listed(
        "empty names, dump_op_switch on",
        {"model_name": "", "layer": []},
        dump_op_switch="on",
        gives={"selection.operators": EVERY},
    ),
    listed(
        "a model and dump_op_switch on",
        {"model_name": "A", "layer": ["x"]},
        dump_op_switch="on",
        gives={
            "selection.models": (("A", named("x")), ("Net", EVERY)),
            "selection.operators": NONE,
        },
    ),
    listed(
        "types left out",
        {
            "model_name": "A",
            "optype_blacklist": [
                {"name": "Conv2D", "pos": ["input0", "output12"]},
                {"name": "Add"},
            ],
        },
        gives={
            "selection.models": (
                (
                    "A",
                    OperatorSelection(
                        spelt=True,
                        without_types=(
                            TensorExclusion("Conv2D", ("input0", "output12")),
                            TensorExclusion("Add"),
                        ),
                    ),
                ),
            )
        },
        **OP,
    ),
    listed(
        "names left out, of layers",
        {"layer": ["x"], "opname_blacklist": [{"name": "x"}]},
        gives={"selection.operators": named("x", without_names=(TensorExclusion("x"),))},
        **OP,
    ),
    listed(
        "a hundred left out",
        {"opname_blacklist": LONG[:100]},
        **OP,
        gives={
            "selection.operators": OperatorSelection(
                spelt=True,
                without_names=tuple(TensorExclusion(f"n{number}") for number in range(100)),
            )
        },
    ),
    listed(
        "positions that are none",
        {
            "opname_blacklist": [
                {"name": "x", "pos": ["input", "in0", "output1"]},
                {"name": "y", "pos": ["inputx"]},
                {"pos": ["input0"]},
            ]
        },
        gives={
            "selection.operators": OperatorSelection(
                spelt=True, without_names=(TensorExclusion("x", ("output1",)),)
            )
        },
        warns=(
            "pos: 'input' is ignored",
            "pos: 'in0' is ignored",
            "pos: 'inputx' is ignored",
            "name: missing; names no operator",
        ),
        **OP,
    ),
    listed(
        "a range",
        {"model_name": "A", "opname_range": [*RANGE, {"begin": "c", "end": "c"}]},
        gives={"selection.models": (("A", named(ranges=(("a", "b"), ("c", "c")))),)},
        **OP,
    ),
    listed(
        "a range and layers",
        {"model_name": "A", "layer": ["x"], "opname_range": RANGE},
        gives={"selection.models": (("A", named("x", ranges=(("a", "b"),))),)},
        **OP,
    ),
]

FIGURES = [
    AclRow(
        f"dump_stats {chosen}",
        {"dump_data": "stats", **({"dump_stats": chosen} if chosen else {})},
        gives={"content": ContentSettings(saved="statistic", statistics=items, tables="operator")},
    )
    for chosen, items in (
        (None, DEFAULT),
        (["L2norm", "Max"], ("count", "max", "l2norm")),
        (
            ["Positive Inf", "Nan", "Negative Inf", "Nan"],
            ("count", "nan count", "negative inf count", "positive inf count"),
        ),
        (["Positive Inf", "Nan", "Negative Inf", "Max", "Min", "Avg"], DEFAULT),
    )
]

OVERFLOW = {"dump_debug": "on", "dump_list": ABSENT}
SCENES = [
    AclRow(
        "dump_debug",
        OVERFLOW,
        gives={
            "selection.trigger": "overflow",
            "selection.operators": OperatorSelection(),
            "selection.models": (),
            "selection.inputs": True,
            "selection.outputs": True,
            "output.layout": "cann",
            "enabled": True,
        },
    ),
    AclRow(
        "dump_debug and an empty list",
        {**OVERFLOW, "dump_list": []},
        gives={"selection.trigger": "overflow"},
    ),
    AclRow(
        "dump_debug and what it ignores",
        {**OVERFLOW, "dump_mode": "input", "dump_step": "bad", "dump_data": "stats"},
        gives={"selection.iterations": IterationSelection(), "content": ContentSettings()},
        warns=(
            "dump_mode: 'input' is ignored",
            "dump_step: 'bad' is ignored",
            "dump_data: 'stats' is ignored",
        ),
    ),
    AclRow(
        "NPU_COLLECT_PATH and dump_debug",
        OVERFLOW,
        environ={"NPU_COLLECT_PATH": HERE},
        gives={"selection.trigger": "overflow"},
    ),
    *(
        AclRow(
            f"dump_scene {scene}",
            {"dump_scene": scene, "dump_list": ABSENT},
            gives={
                "selection.trigger": "exception",
                "selection.inputs": True,
                "selection.outputs": False,
                "output.layout": "cann-op",
                "output.root": f"{HERE}/extra-info/data-dump",
                "enabled": True,
            },
            warns=("dump_scene: '" + scene[:1],),
        )
        for scene in (
            "lite_exception",
            "aic_err_brief_dump",
            "aic_err_norm_dump",
            "aic_err_detail_dump",
        )
    ),
    AclRow(
        "exception wins over a list",
        {"dump_scene": "lite_exception"},
        gives={"selection.trigger": "exception", "selection.models": ()},
        warns=("dump_list: [{'model_name': 'A'}] is ignored", "extra-info/data-dump"),
    ),
    AclRow(
        "exception: the environment's path",
        {"dump_scene": "lite_exception", "dump_list": ABSENT},
        environ={"ASCEND_DUMP_PATH": "/d", "ASCEND_WORK_PATH": "/w"},
        gives={"output.root": "/d/extra-info/data-dump"},
        warns=("extra-info/data-dump", "is overridden by ASCEND_DUMP_PATH: /d"),
    ),
    AclRow(
        "exception: the other variable",
        {"dump_scene": "lite_exception"},
        bare=True,
        environ={"ASCEND_WORK_PATH": "/w"},
        gives={"output.root": "/w/extra-info/data-dump"},
        warns=("extra-info/data-dump",),
    ),
    AclRow(
        "exception: a folder that is not there",
        {"dump_scene": "lite_exception", "dump_path": "/not/there"},
        bare=True,
        gives={"output.root": "/not/there/extra-info/data-dump"},
        warns=("extra-info/data-dump",),
    ),
    AclRow(
        "exception: a folder that a shell would have found",
        {"dump_scene": "lite_exception", "dump_path": "/d/${HOME}"},
        bare=True,
        gives={"output.root": "/d/${HOME}/extra-info/data-dump"},
        warns=("extra-info/data-dump", "is used literally: rankdump does not expand ${HOME}"),
    ),
    AclRow(
        "exception: RANKDUMP_OUTPUT",
        {"dump_scene": "lite_exception"},
        bare=True,
        environ={"RANKDUMP_OUTPUT": "/o"},
        gives={"output.root": "/o"},
        warns=("extra-info/data-dump",),
    ),
    listed(
        "watcher",
        *LIST,
        dump_scene="watcher",
        gives={
            "selection.watched": WatchedOperators(("a",), ("b",)),
            "selection.inputs": False,
            "selection.outputs": True,
            "selection.operators": EVERY,
        },
    ),
    listed(
        "watcher, two items",
        *LIST,
        {"layer": ["c"], "watcher_nodes": ["d", "b"]},
        dump_scene="watcher",
        gives={"selection.watched": WatchedOperators(("a", "c"), ("b", "d"))},
        warns=("is merged with the item before",),
    ),
    listed(
        "watcher without layer",
        {"watcher_nodes": ["b"]},
        dump_scene="watcher",
        gives={"selection.watched": WatchedOperators((), ("b",))},
    ),
    listed(
        "watcher, one of two items without layer",
        *LIST,
        {"watcher_nodes": ["d"]},
        dump_scene="watcher",
        gives={"selection.watched": WatchedOperators((), ("b", "d"))},
        warns=("is merged with the item before",),
    ),
]

IDLE = [
    AclRow("dump_level op", OP),
    *(
        AclRow(f"dump_level {level}", {"dump_level": level}, warns=('becomes "op"',))
        for level in ("kernel", "all")
    ),
    AclRow(
        "dump_kernel_data",
        {"dump_kernel_data": "printf,tensor,assert,timestamp,all"},
        warns=("changes nothing",),
    ),
]

ROWS = [*DEFAULTS, *NOTHING, *PLACES, *STEPS, *LISTS, *FIGURES, *SCENES, *IDLE]
