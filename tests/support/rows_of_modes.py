"""Rows of the MindSpore 2.3 Dump guide: e2e_dump_settings, op_debug_mode, statistic_category.

Not covered: the tensors that sampling and detection make (1.8, 1.9), which are of a run; `hash` and
its kin (1.10), which only 2.7.2 has and which are rejected here as in every version before.
"""

from __future__ import annotations

from support.configuration_row import ConfigurationRow, refused
from support.configurations import ABSENT, NOT_ARRAY, NOT_TEXT, NOT_UINT

from rankdump._core.plan import IterationSelection, OperatorSelection
from rankdump._core.statistics import DEVICE_STATISTICS, STATISTIC_TITLES

C, E = "common_dump_settings", "e2e_dump_settings"
NOT_FLAG = (0, 1, "true", None, [])
ASYNC = {"enable": False}
ASYNC_WARNING = "itself dumps synchronously on CPU and GPU"
STATISTIC = {"saved_data": "statistic"}
DEVICE = {"stat_calc_mode": "device"}
SAMPLED = {"sample_mode": 1}

SYNCHRONOUS = [
    *refused("1.8", f"{E}.enable", ABSENT, *NOT_FLAG, allowed="true or false"),
    *refused("1.8", f"{E}.trans_flag", ABSENT, *NOT_FLAG, allowed="true or false"),
    *refused("1.8", f"{E}.save_kernel_args", *NOT_FLAG, allowed="true or false"),
    *refused("1.8", f"{E}.sample_mode", *NOT_UINT, 2, allowed="0 (off) or 1 (on)"),
    *refused("1.8 text", f"{E}.stat_calc_mode", *NOT_TEXT, "bogus", allowed='"host" or "device"'),
    *refused(
        "1.8", f"{E}.device_stat_precision_mode", *NOT_TEXT, "bogus", allowed='"high" or "low"'
    ),
    *(
        ConfigurationRow(
            f"1.8 an array as section: {value!r}", e2e=value, refused=E, allowed="an object"
        )
        for value in ([], None, 1, "x")
    ),
    ConfigurationRow(
        "1.8 missing",
        common={"op_debug_mode": 0},
        e2e=ABSENT,
        gives={"output.layout": "cann", "output.net_name": "LeNet"},
        warns=(f"{E}: missing; this selects asynchronous dump",),
    ),
    ConfigurationRow(
        "1.8 enable false",
        common={"op_debug_mode": 0},
        e2e=ASYNC,
        gives={"output.layout": "cann", "output.file_format": "bin"},
        warns=(f"{E}.enable: False selects asynchronous dump: an Ascend tree is written",),
    ),
    ConfigurationRow("1.8 trans_flag false", e2e={"trans_flag": False}, warns=("changes nothing",)),
    ConfigurationRow(
        "1.8 save_kernel_args",
        e2e={"save_kernel_args": True},
        gives={"content.kernel_arguments": True},
    ),
    ConfigurationRow(
        "1.8 unknown key", e2e={"sample_nun": 3}, warns=("the nearest is sample_num",)
    ),
    ConfigurationRow(
        "1.8 key of the other section", e2e={"kernels": 3}, warns=(f"belongs in {C}",)
    ),
]

ACL_DUMP = {"MS_ACL_DUMP_CFG_PATH": "/etc/d.json", "MINDSPORE_DUMP_CONFIG": "/etc/d.json"}
TREES = [
    ConfigurationRow(
        "2.13 synchronous", gives={"output.layout": "mindspore-sync", "output.file_format": "npy"}
    ),
    *(
        ConfigurationRow(
            f"2.13 {words}",
            common={"op_debug_mode": 0},
            e2e=ASYNC,
            own=own,
            environ=environ,
            gives={"output.layout": layout},
            warns=(ASYNC_WARNING,),
        )
        for words, own, environ, layout in (
            ("asynchronous", {}, {}, "cann"),
            ("up to 2.2", {"profile": "ms2.0"}, {}, "mindspore-async"),
            ("ACL dump", {}, ACL_DUMP, "cann-op-step"),
            ("ACL dump up to 2.2", {"profile": "ms2.0"}, ACL_DUMP, "mindspore-async"),
            ("ACL dump of another file", {}, {"MS_ACL_DUMP_CFG_PATH": "/etc/d.json"}, "cann"),
            ("by force", {"layout": "cann-step"}, ACL_DUMP, "cann-step"),
        )
    ),
    ConfigurationRow(
        "2.13 by force, synchronous",
        environ=ACL_DUMP,
        own={"layout": "cann"},
        gives={"output.layout": "cann", "output.file_format": "npy"},
    ),
]

SAMPLING = [
    ConfigurationRow(
        "1.8 sample_mode 0", e2e={"sample_mode": 0}, gives={"content.sample_elements": 0}
    ),
    ConfigurationRow(
        "1.8 sample_num in mode 0",
        e2e={"sample_mode": 0, "sample_num": "x"},
        warns=("sample_num: 'x' is not used: only sample_mode 1",),
    ),
    ConfigurationRow(
        "1.8 sample_num alone", e2e={"sample_num": 0}, warns=("only sample_mode 1 uses it",)
    ),
    ConfigurationRow("1.8 the default sample_num says nothing", e2e={"sample_num": 100}),
    ConfigurationRow(
        "1.8 precision on the host",
        e2e={"device_stat_precision_mode": "low"},
        gives={"content.precision": "low"},
        warns=('only stat_calc_mode "device" uses it',),
    ),
    ConfigurationRow("1.8 sample_num missing", e2e=SAMPLED, gives={"content.sample_elements": 100}),
    ConfigurationRow(
        "1.8 sample_num", e2e={**SAMPLED, "sample_num": 1}, gives={"content.sample_elements": 1}
    ),
    *(
        ConfigurationRow(
            f"1.8 sample_num {value!r}",
            e2e={**SAMPLED, "sample_num": value},
            refused=f"{E}.sample_num",
            allowed="a number from 1",
        )
        for value in (0, 1 << 32, *NOT_UINT)
    ),
    ConfigurationRow(
        "1.8 sample_mode when not enabled",
        common={"op_debug_mode": 0},
        e2e={**ASYNC, **SAMPLED},
        gives={"content.sample_elements": 0},
        warns=(ASYNC_WARNING, "sample_mode: 1 becomes 0"),
    ),
]

PLACES = [
    ConfigurationRow(
        "1.8 stat_calc_mode device",
        common=STATISTIC,
        e2e=DEVICE,
        gives={"content.on_device": True, "content.precision": "high"},
    ),
    ConfigurationRow(
        "1.8 device_stat_precision_mode",
        common=STATISTIC,
        e2e={**DEVICE, "device_stat_precision_mode": "low"},
        gives={"content.on_device": True, "content.precision": "low"},
    ),
    ConfigurationRow(
        "1.8 stat_calc_mode host", common=STATISTIC, gives={"content.on_device": False}
    ),
    *(
        ConfigurationRow(
            f"1.8 stat_calc_mode device, saved_data {saved}",
            common={"saved_data": saved},
            e2e=DEVICE,
            gives={"content.on_device": False},
            warns=("stat_calc_mode: 'device' becomes \"host\": saved_data is",),
        )
        for saved in ("tensor", "full")
    ),
    ConfigurationRow(
        "1.8 stat_calc_mode device, op_debug_mode 3",
        common={**STATISTIC, "op_debug_mode": 3},
        e2e=DEVICE,
        gives={"content.on_device": False},
        warns=('becomes "host": op_debug_mode checks the elements first',),
    ),
    ConfigurationRow(
        "1.8 stat_calc_mode device, not enabled",
        common={**STATISTIC, "op_debug_mode": 0, "file_format": "npy"},
        e2e={**ASYNC, **DEVICE},
        gives={"content.on_device": False},
        warns=(ASYNC_WARNING, 'becomes "host": synchronous dump is not enabled'),
    ),
    ConfigurationRow(
        "9.4 stat_calc_mode device under fixed columns",
        common=STATISTIC,
        e2e=DEVICE,
        own={"profile": "ms2.0"},
        gives={"content.on_device": False},
        warns=("columns that a device cannot compute",),
    ),
]

DEBUG_MODES = [
    ConfigurationRow("1.9 missing, sync", gives={"selection.trigger": "always"}),
    ConfigurationRow(
        "1.9 mode 0", common={"op_debug_mode": 0}, gives={"selection.trigger": "always"}
    ),
    ConfigurationRow(
        "1.9 mode 3", common={"op_debug_mode": 3}, gives={"selection.trigger": "overflow"}
    ),
    ConfigurationRow(
        "1.9 mode 4", common={"op_debug_mode": 4}, gives={"selection.trigger": "exception"}
    ),
    *refused("1.9 sync", f"{C}.op_debug_mode", 1, 2, allowed="1 and 2 are for asynchronous dump"),
    *refused("1.9 sync", f"{C}.op_debug_mode", 5, 99, allowed="3 (overflow) or 4 (exception)"),
    *(
        ConfigurationRow(
            f"1.9 async mode {mode}",
            common={"op_debug_mode": mode},
            e2e=ASYNC,
            gives={"selection.trigger": trigger},
            warns=(ASYNC_WARNING, *warns),
        )
        for mode, trigger, warns in (
            (0, "always", ()),
            (1, "overflow", ("op_debug_mode: 1 becomes 3",)),
            (2, "overflow", ("op_debug_mode: 2 becomes 3",)),
            (3, "overflow", ()),
            (4, "exception", ()),
        )
    ),
    ConfigurationRow(
        "1.9 async, no mode",
        common={"op_debug_mode": 5},
        e2e=ASYNC,
        refused=f"{C}.op_debug_mode",
        allowed="1, 2 or 3 (overflow)",
    ),
    ConfigurationRow(
        "1.9 mode 3 and dump_mode 2",
        common={"op_debug_mode": 3, "dump_mode": 2},
        gives={"selection.operators": OperatorSelection()},
        warns=("dump_mode: 2 becomes 0",),
    ),
    ConfigurationRow(
        "1.9 mode 4 and iteration",
        common={"op_debug_mode": 4, "iteration": "0|2"},
        gives={"selection.iterations": IterationSelection()},
        warns=("iteration: '0|2' becomes \"all\"",),
    ),
    ConfigurationRow(
        "1.9 mode 4 and sampling",
        common={"op_debug_mode": 4},
        e2e=SAMPLED,
        gives={"content.sample_elements": 0},
        warns=("sample_mode: 1 becomes 0",),
    ),
    ConfigurationRow(
        "1.9 mode 4 and outputs",
        common={"op_debug_mode": 4, "input_output": 2},
        gives={"selection.inputs": True, "selection.outputs": False},
        warns=("input_output: 2 becomes 1",),
    ),
    ConfigurationRow(
        "1.9 mode 4 and dump_mode",
        common={"op_debug_mode": 4, "dump_mode": 1, "kernels": ["a"]},
        gives={"selection.operators": OperatorSelection(everything=False, types=("a",))},
        warns=("dump_mode: 1 watches only the selected operators",),
    ),
]


DEFAULT_ITEMS = ["max", "min", "l2norm"]


def category(
    source: str, items: list[str], *warns: str, saved: str = "statistic"
) -> ConfigurationRow:
    return ConfigurationRow(
        f"1.10 {source}",
        common={"saved_data": saved, "statistic_category": items},
        gives={"content.statistics": tuple(items), "content.saved": saved},
        warns=warns,
    )


CATEGORIES = [
    ConfigurationRow(
        "1.10 missing", common=STATISTIC, gives={"content.statistics": ("max", "min", "l2norm")}
    ),
    *(category(item, [item]) for item in STATISTIC_TITLES),
    category("the user's order", [*reversed(STATISTIC_TITLES)], saved="full"),
    category("empty", [], "names no statistic, so the tables have none"),
    category(
        "duplicates", ["max", "md5", "max"], "'max' is listed 2 times and has as many columns"
    ),
    *refused(
        *("1.10", f"{C}.statistic_category", *NOT_ARRAY),
        allowed='an array of "max", "min", "avg", "count"',
        saved_data="full",
    ),
    *(
        ConfigurationRow(
            f"1.10 {items}",
            common={"saved_data": "full", "statistic_category": items},
            refused=f"{C}.statistic_category[{index}]",
            allowed='"max", "min", "avg", "count"',
        )
        for index, items in ((0, ["Max"]), (1, ["max", "sum"]), (1, ["max", 1]), (0, ["hash"]))
    ),
    ConfigurationRow("1.10 the default is unused", common={"statistic_category": DEFAULT_ITEMS}),
    *(
        ConfigurationRow(
            f"1.10 not looked at: {value!r}",
            common={"statistic_category": value},
            warns=('is not used: saved_data is "tensor"',),
        )
        for value in ("text", 7, ["sum"], [])
    ),
    ConfigurationRow(
        "1.10 device",
        common={**STATISTIC, "statistic_category": [*STATISTIC_TITLES]},
        e2e=DEVICE,
        gives={"content.statistics": DEVICE_STATISTICS, "content.on_device": True},
        warns=("zero count, md5: a device computes only max, min, avg, l2norm",),
    ),
    ConfigurationRow(
        "1.10 device, none left",
        common={**STATISTIC, "statistic_category": ["md5"]},
        e2e=DEVICE,
        gives={"content.statistics": ()},
        warns=("is used without md5",),
    ),
    ConfigurationRow(
        "9.4 fixed columns",
        common={**STATISTIC, "statistic_category": ["md5"]},
        own={"profile": "ms2.0"},
        gives={"output.profile": "ms2.0"},
        warns=("is not used: the tables of profile ms2.0 are fixed",),
    ),
]

ROWS = [*SYNCHRONOUS, *TREES, *SAMPLING, *PLACES, *DEBUG_MODES, *CATEGORIES]
