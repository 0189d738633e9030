"""Rows of the MindSpore 2.3 Dump guide: types, keys and cross-key rules of the common section.

Not covered, because the parser does not decide it: an `iteration` that is a number and a used
`async_dump_settings` (MindSpore 1.0-1.2), PyNative mode, the dataset sink, and device targets that
MindSpore rejects (`dump_mode` 2 and statistics work everywhere).
"""

from __future__ import annotations

from support.configuration_row import ConfigurationRow, refused
from support.configurations import ABSENT, NOT_ARRAY, NOT_TEXT, NOT_UINT

from rankdump._core.plan import IterationSelection, OperatorSelection

C = "common_dump_settings"
CUT = "is cut to its low 32 bits and read as 0"
ASYNC = {"enable": False}
ASYNC_WARNING = "selects asynchronous dump: an Ascend tree is written"
MARKED = OperatorSelection(everything=False, marked=True)

TYPES = [
    *refused("1.2 uint", f"{C}.dump_mode", *NOT_UINT, allowed="0 (every operator), 1"),
    *refused("1.2 uint", f"{C}.input_output", *NOT_UINT, allowed="0 (inputs and outputs)"),
    *refused("1.2 uint", f"{C}.op_debug_mode", *NOT_UINT, allowed="0 (no detection), 3"),
    *refused("1.2 uint", f"{C}.overflow_number", *NOT_UINT, allowed="from 0", op_debug_mode=3),
    *refused("1.2 uint", f"{C}.initial_iteration", *NOT_UINT, allowed="a number from 0"),
    *refused("1.2 string", f"{C}.path", *NOT_TEXT, allowed="an absolute folder"),
    *refused("1.2 string", f"{C}.net_name", *NOT_TEXT, allowed="letters, digits"),
    *refused("1.2 string", f"{C}.iteration", *NOT_TEXT, allowed='"all", or numbers'),
    *refused("1.2 string", f"{C}.saved_data", *NOT_TEXT, allowed='"tensor", "statistic" or "full"'),
    *refused("1.2 array", f"{C}.kernels", *NOT_ARRAY, allowed="an array of operator types"),
    *refused("1.2 array", f"{C}.support_device", *NOT_ARRAY, allowed="an array of device ids"),
    ConfigurationRow(
        "1.2 64 bits", common={"dump_mode": 1 << 32}, warns=(f"dump_mode: 4294967296 {CUT}",)
    ),
    ConfigurationRow("1.2 64 bits", common={"input_output": 1 << 32}, warns=(CUT,)),
    ConfigurationRow("1.2 64 bits", common={"op_debug_mode": 1 << 32}, warns=(CUT,)),
    ConfigurationRow("1.2 64 bits", common={"initial_iteration": 1 << 32}, warns=(CUT,)),
]

KEYS = [
    ConfigurationRow(
        "1.3 dump_mode 0",
        common={"dump_mode": 0},
        gives={"selection.operators": OperatorSelection()},
    ),
    ConfigurationRow(
        "1.3 dump_mode 1",
        common={"dump_mode": 1, "kernels": ["a"]},
        gives={"selection.operators": OperatorSelection(everything=False, types=("a",))},
    ),
    ConfigurationRow(
        "1.3 dump_mode 2", common={"dump_mode": 2}, gives={"selection.operators": MARKED}
    ),
    *refused("1.3", f"{C}.dump_mode", ABSENT, 3, allowed="or 2 (those marked with set_dump)"),
    *refused("1.3", f"{C}.net_name", ABSENT, "", "a.b", "a b", "a/b", "n\n", "\u00e9", allowed="_"),
    ConfigurationRow(
        "1.3 longest", common={"net_name": "n" * 255}, gives={"output.net_name": "n" * 255}
    ),
    *refused("1.3 too long", f"{C}.net_name", "n" * 256, allowed="1 to 255"),
    ConfigurationRow(
        "1.3 net_name", common={"net_name": "A-z_0"}, gives={"output.net_name": "A-z_0"}
    ),
    *refused("1.3", f"{C}.iteration", ABSENT, allowed='"0|5-8|100-120"'),
    *refused("1.3", f"{C}.input_output", ABSENT, 3, 7, allowed="1 (inputs) or 2 (outputs)"),
    *(
        ConfigurationRow(
            f"1.3 input_output {sides}",
            common={"input_output": sides},
            gives={"selection.inputs": inputs, "selection.outputs": outputs},
        )
        for sides, inputs, outputs in ((0, True, True), (1, True, False), (2, False, True))
    ),
    *refused("1.3", f"{C}.kernels", ABSENT, "Conv2D", allowed="an array", dump_mode=0),
    *refused("1.3", f"{C}.support_device", ABSENT, allowed="an array of device ids"),
    ConfigurationRow("1.3 saved_data missing", gives={"content.saved": "tensor"}),
    *(
        ConfigurationRow(
            f"1.3 saved_data {saved}",
            common={"saved_data": saved},
            gives={"content.saved": saved, "content.statistics": ("max", "min", "l2norm")},
        )
        for saved in ("tensor", "statistic", "full")
    ),
    *refused("1.3 case", f"{C}.saved_data", "Tensor", "FULL", "", allowed='"full"'),
    ConfigurationRow("1.3 initial_iteration missing", gives={"selection.initial_iteration": 0}),
    ConfigurationRow(
        "1.3 initial_iteration",
        common={"initial_iteration": 7},
        gives={"selection.initial_iteration": 7},
    ),
    ConfigurationRow(
        "1.3 initial_iteration beyond the selection",
        common={"initial_iteration": 9, "iteration": "0|5-8"},
        gives={"selection.initial_iteration": 9},
        warns=("'0|5-8' ends before initial_iteration 9",),
    ),
    ConfigurationRow(
        "1.1 unknown key",
        common={"dump_mod": 1},
        warns=(f"{C}.dump_mod: 1 is ignored: there is no such key; the nearest is dump_mode",),
    ),
    ConfigurationRow(
        "1.1 unknown key, another case",
        common={"Saved_Data": 1},
        warns=("the nearest is saved_data",),
    ),
    ConfigurationRow(
        "1.1 unknown key like no other",
        common={"zzzzzz": {"deep": [[[[1]]]]}},
        warns=("zzzzzz: {'deep': [[...]]} is ignored: there is no such key",),
    ),
    ConfigurationRow(
        "1.1 key of the other section",
        common={"sample_mode": "x"},
        warns=(f"{C}.sample_mode: 'x' is ignored: the key belongs in e2e_dump_settings",),
    ),
    ConfigurationRow(
        "1.1 rankdump's own section within another, and a key of it",
        common={"rankdump": {}, "codec": "none"},
        warns=(
            f"{C}.rankdump: {{}} is ignored: the section belongs beside the others",
            f"{C}.codec: 'none' is ignored: the key belongs in rankdump",
        ),
    ),
]

ACROSS = [
    ConfigurationRow(
        "1.3 async statistic as npy",
        common={"saved_data": "statistic", "file_format": "npy", "op_debug_mode": 0},
        e2e=ASYNC,
        gives={"content.saved": "statistic", "output.file_format": "npy"},
        warns=(ASYNC_WARNING,),
    ),
    ConfigurationRow(
        "1.3 async statistic as bin, the default",
        common={"saved_data": "statistic", "op_debug_mode": 0},
        e2e=ASYNC,
        refused=f"{C}.saved_data",
        allowed='file_format "npy"',
    ),
    ConfigurationRow(
        "1.3 async full as bin",
        common={"saved_data": "full", "file_format": "bin", "op_debug_mode": 0},
        e2e=ASYNC,
        refused=f"{C}.saved_data",
        allowed='file_format "npy"',
    ),
    ConfigurationRow("1.3 file_format, sync", common={"file_format": "npy"}),
    ConfigurationRow("1.3 file_format missing, sync", gives={"output.file_format": "npy"}),
    ConfigurationRow(
        "1.3 file_format, sync, is not read",
        common={"file_format": 7},
        warns=("file_format: 7 is ignored in synchronous dump",),
    ),
    *(
        ConfigurationRow(
            f"1.3 file_format, async: {value!r}",
            common={"file_format": value, "op_debug_mode": 0},
            e2e=ASYNC,
            refused=f"{C}.file_format",
            allowed='"bin" or "npy"',
        )
        for value in ("txt", "NPY", *NOT_TEXT)
    ),
    *(
        ConfigurationRow(
            f"1.3 file_format {words}, async",
            common={"file_format": value, "op_debug_mode": 0},
            e2e=ASYNC,
            gives={"output.file_format": found, "output.layout": "cann"},
            warns=(ASYNC_WARNING,),
        )
        for words, value, found in (
            ("bin", "bin", "bin"),
            ("npy", "npy", "npy"),
            ("missing", ABSENT, "bin"),
        )
    ),
    ConfigurationRow(
        "1.3 op_debug_mode missing, async",
        e2e=ASYNC,
        gives={"selection.trigger": "always"},
        warns=(ASYNC_WARNING, "op_debug_mode: missing; MindSpore requires it"),
    ),
    ConfigurationRow(
        "1.3 overflow_number",
        common={"overflow_number": 5, "op_debug_mode": 3},
        gives={"selection.overflow_limit": 5, "selection.trigger": "overflow"},
    ),
    ConfigurationRow(
        "1.3 overflow_number 0 is no limit",
        common={"overflow_number": 0, "op_debug_mode": 3},
        gives={"selection.overflow_limit": 0},
    ),
    *(
        ConfigurationRow(
            f"1.3 overflow_number with op_debug_mode {mode!r}",
            common={"overflow_number": "any type", "op_debug_mode": mode},
            refused=f"{C}.overflow_number",
            allowed="op_debug_mode is 3",
        )
        for mode in (0, 4, ABSENT)
    ),
    ConfigurationRow(
        "1.3 op_debug_mode 3 and dump_mode",
        common={"op_debug_mode": 3, "dump_mode": 1, "kernels": ["a"]},
        gives={"selection.operators": OperatorSelection()},
        warns=("dump_mode: 1 becomes 0",),
    ),
    ConfigurationRow(
        "1.3 op_debug_mode 3 and input_output",
        common={"op_debug_mode": 3, "input_output": 2},
        gives={"selection.inputs": True, "selection.outputs": True},
        warns=("input_output: 2 becomes 0",),
    ),
    ConfigurationRow(
        "1.3 op_debug_mode 4 and saved_data",
        common={"op_debug_mode": 4, "saved_data": "full"},
        gives={"content.saved": "tensor"},
        warns=("saved_data: 'full' becomes \"tensor\"",),
    ),
    ConfigurationRow(
        "1.3 iteration stays with op_debug_mode 3",
        common={"op_debug_mode": 3, "iteration": "2"},
        gives={"selection.iterations": IterationSelection("2", ((2, 2),))},
    ),
]

ROWS = [*TYPES, *KEYS, *ACROSS]
