"""Rows of the MindSpore 2.3 Dump guide: iteration, path, support_device and kernels.

Not covered, because they concern a run, not a file: the folder made when the first file is
written (1.5), the device that is not in the list (1.6), entries that never matched (1.7).
"""

from __future__ import annotations

from support.configuration_row import ConfigurationRow, refused
from support.configurations import ABSENT

from rankdump._core.plan import IterationSelection, OperatorSelection

C = "common_dump_settings"
DIAGNOSTIC = {"MS_DIAGNOSTIC_DATA_PATH": "/diagnostic"}
LONG = "n" * 256


def iteration(
    source: str, text: str, *spans: tuple[int, int], warns: tuple[str, ...] = ()
) -> ConfigurationRow:
    return ConfigurationRow(
        f"1.4 {source}: {text[:30]}",
        common={"iteration": text},
        gives={"selection.iterations": IterationSelection(text, spans)},
        warns=warns,
    )


def kernels(
    source: str, *items: object, warns: tuple[str, ...] = (), **lists: list[str]
) -> ConfigurationRow:
    names, types, patterns = (tuple(lists.get(n, ())) for n in ("names", "types", "patterns"))
    return ConfigurationRow(
        f"1.7 {source}",
        common={"dump_mode": 1, "kernels": list(items)},
        gives={"selection.operators": OperatorSelection(False, names, types, patterns)},
        warns=warns,
    )


def expression(source: str, pattern: str, reads: str, *warns: str) -> ConfigurationRow:
    return kernels(source, f"name-regex({pattern})", patterns=[reads], warns=warns)


EMPTY = "'' is an empty segment and matches no iteration"

ITERATION = [
    ConfigurationRow(
        "1.4 all", common={"iteration": "all"}, gives={"selection.iterations": IterationSelection()}
    ),
    *refused("1.4 characters", f"{C}.iteration", "", "All", "0,1", "0|all", "all|0", allowed="all"),
    *refused("1.4 characters", f"{C}.iteration", "\uff11", "1\n", "x", "0.5", allowed="0|5-8"),
    *refused("1.4 blanks", f"{C}.iteration", "0 | 5-8 ", " 0|5-8", allowed='; here "0|5-8"'),
    iteration("number", "7", (7, 7)),
    iteration("leading zeros", "02", (2, 2)),
    iteration("range", "5-8", (5, 8)),
    iteration("the tutorial's own", "0|5-8|100-120", (0, 0), (5, 8), (100, 120)),
    iteration("overlaps", "0|1-3|2", (0, 0), (1, 3), (2, 2)),
    iteration("repeats", "0|0", (0, 0), (0, 0)),
    iteration("empty segment", "1||2", (1, 1), (2, 2), warns=(EMPTY,)),
    iteration("leading and trailing", "|1|", (1, 1), warns=(EMPTY,)),
    iteration("reversed", "5-3|9", (9, 9), warns=("iteration: '5-3' runs backwards",)),
    iteration("no high", "0-|1", (1, 1), warns=("'0-' is neither a number nor a range",)),
    iteration("no low", "-3", warns=("'-3' is neither a number nor a range",)),
    iteration("no ends", "-", warns=("'-' is neither",)),
    iteration("two dashes", "0--3", warns=("'0--3' is neither",)),
    iteration("64 bits", str(2**64 - 1), (2**64 - 1, 2**64 - 1)),
    iteration("over 64 bits", f"{2**64}|7", (7, 7), warns=("has a number of more than 64 bits",)),
    iteration("far over 64 bits", "9" * 5000, warns=("has a number of more than 64 bits",)),
    iteration(
        "many of them",
        "|".join(f"{n}-0" for n in range(1, 100)),
        warns=(*(f"'{n}-0' runs backwards" for n in range(1, 6)), "has 99 segments that match no"),
    ),
]

PATH = [
    ConfigurationRow(
        "1.5 absolute", common={"path": "/a_b-C/0"}, gives={"output.root": "/a_b-C/0"}
    ),
    *(
        ConfigurationRow(f"1.5 slashes: {path}", common={"path": path}, gives={"output.root": root})
        for path, root in (("/a/", "/a"), ("//a///b", "/a/b"), ("/", "/"))
    ),
    *refused("1.5 relative", f"{C}.path", "a", "./a", allowed="an absolute folder"),
    *refused("1.5 a home", f"{C}.path", "~/a", allowed="- and /: rankdump does not expand ~"),
    *refused(
        "1.5 a variable",
        f"{C}.path",
        "$HOME/a",
        "/a/$HOME",
        allowed=": rankdump does not expand $HOME",
    ),
    *refused(
        "1.5 characters", f"{C}.path", "/a.b", "/a b", "/a:b", "/..", "/\u00e9", allowed="A-Z"
    ),
    *refused("1.5 nowhere", f"{C}.path", ABSENT, "", allowed="MS_DIAGNOSTIC_DATA_PATH"),
    *(
        ConfigurationRow(
            f"1.5 from the environment: {path!r}",
            common={"path": path},
            environ=DIAGNOSTIC,
            gives={"output.root": "/diagnostic/debug_dump"},
        )
        for path in (ABSENT, "")
    ),
    ConfigurationRow(
        "1.5 trailing slash in the environment",
        common={"path": ABSENT},
        environ={"MS_DIAGNOSTIC_DATA_PATH": "/d/"},
        gives={"output.root": "/d/debug_dump"},
    ),
    *(
        ConfigurationRow(
            f"1.5 the same rule in the environment: {value}",
            common={"path": ABSENT},
            environ={"MS_DIAGNOSTIC_DATA_PATH": value},
            refused="MS_DIAGNOSTIC_DATA_PATH",
            allowed="an absolute folder",
        )
        for value in ("rel", "/a.b")
    ),
    *(
        ConfigurationRow(
            f"rankdump's own variable: {value!r}", environ={"RANKDUMP_OUTPUT": value}, gives=gives
        )
        for value, gives in (("/o v/x.y", {"output.root": "/o v/x.y"}), ("", {}))
    ),
    ConfigurationRow(
        "rankdump's own variable, relative",
        environ={"RANKDUMP_OUTPUT": "rel"},
        refused="RANKDUMP_OUTPUT",
        allowed="an absolute folder",
    ),
    ConfigurationRow(
        "rankdump's own variable hides no bad path",
        common={"path": "/a.b"},
        environ={"RANKDUMP_OUTPUT": "/o"},
        refused=f"{C}.path",
        allowed="an absolute folder",
    ),
    ConfigurationRow(
        "1.5 both", common={"path": "/a"}, environ=DIAGNOSTIC, gives={"output.root": "/a"}
    ),
    ConfigurationRow(
        "1.5 a name over 255",
        common={"path": f"/{LONG}"},
        gives={"output.root": f"/{LONG}"},
        warns=("no file can be written",),
    ),
    ConfigurationRow(
        "1.5 a path of 4096",
        common={"path": "/nn" * 1366},
        gives={"output.root": "/nn" * 1366},
        warns=("no file can be written",),
    ),
]

DEVICES = [
    ConfigurationRow(
        "1.6 list", common={"support_device": [0, 7]}, gives={"selection.devices": (0, 7)}
    ),
    *(
        ConfigurationRow(
            f"1.6 {source}",
            common={"support_device": items},
            gives={"selection.devices": devices},
            warns=(warning,),
        )
        for source, items, devices, warning in (
            (
                "a fraction is cut",
                [1.9],
                (1,),
                "support_device: 1.9 is not a device id and is read as 1",
            ),
            ("a whole float", [2.0], (2,), "2.0 is not a device id and is read as 2"),
            (
                "a negative wraps",
                [-1],
                (2**32 - 1,),
                "-1 is not a device id and is read as 4294967295",
            ),
            ("over 32 bits", [2**32], (0,), "4294967296 is not a device id and is read as 0"),
            ("duplicates", [3, 3, 0], (3, 0), "3 is listed twice and counts once"),
            ("empty", [], (), "[] names no device, so no rank dumps"),
        )
    ),
    *(
        ConfigurationRow(
            f"1.6 no number: {item!r}",
            common={"support_device": [item]},
            refused=f"{C}.support_device[0]",
            allowed="a device id",
        )
        for item in ("0", None, True, [0], {})
    ),
]

CLASSES = [
    kernels("type", "Conv2D", "relu", types=["Conv2D", "relu"]),
    kernels("full name", "Default/a/Conv2D-op1", names=["Default/a/Conv2D-op1"]),
    kernels("full name with an offset", "Default/a/B-op3_1", names=["Default/a/B-op3_1"]),
    kernels("expression", "name-regex(.*op[0-9]+)", patterns=[".*op[0-9]+"]),
    kernels("any text in mode 1", 1, types=["1"], warns=("kernels: 1 is read as '1'",)),
    kernels("blanks", " Conv 2D ", types=["Conv2D"], warns=("is read as 'Conv2D'",)),
    kernels("quotes", 'a"b', types=["ab"], warns=("is read as 'ab'",)),
    kernels("empty text is skipped", "", "a", types=["a"]),
    kernels("empty list", warns=("kernels: [] selects nothing, as in 2.3; from 2.5",)),
    *(
        ConfigurationRow(
            f"1.7 list of empty text: {items}",
            common={"dump_mode": 1, "kernels": items},
            gives={"selection.operators": OperatorSelection()},
            warns=(f"kernels: {items} selects every operator",),
        )
        for items in ([""], [" ", ""])
    ),
    *(
        ConfigurationRow(
            f"1.7 {source}",
            common={"dump_mode": 1, "kernels": items},
            refused=f"{C}.{key}",
            allowed=allowed,
        )
        for source, key, items, allowed in (
            (
                *("long expression", "kernels[1]"),
                ["a", f"name-regex({'a' * 1001})"],
                "a pattern of 1001 characters",
            ),
            (
                *("too many", "kernels"),
                [f"name-regex(a{n})" for n in range(1001)],
                "not 1001 patterns",
            ),
        )
    ),
    kernels("duplicate", "a", "a", types=["a"], warns=("'a' is listed twice",)),
    kernels("short name", "Conv2D-op0", names=["Conv2D-op0"], warns=("begins with its scope",)),
    kernels("no number", "Default/a/B", names=["Default/a/B"], warns=("such as -op0",)),
    kernels("Parameter", "Parameter", types=["Parameter"], warns=("matches no parameter",)),
    kernels(
        "gradient",
        "Gradients/Default/a/B-op0",
        names=["Gradients/Default/a/B-op0"],
    ),
    kernels("not closed", "name-regex(a", types=["name-regex(a"], warns=("a type, not an",)),
    kernels("case", "Name-Regex(a/b)", names=["Name-Regex(a/b)"], warns=("a name, not an",)),
    kernels("type with a mark", "conv*", types=["conv*"], warns=("a type, not an expression",)),
    kernels("name with a mark", "a/.*", names=["a/.*"], warns=("a name, not an expression",)),
    ConfigurationRow(
        "1.7 unused in mode 0",
        common={"kernels": ["name-regex(()", "Conv2D", "", "", 7]},
        warns=("is not used: only dump_mode 1 uses it, not 0",),
    ),
]

EXPRESSIONS = [
    expression("backslash", r".*op\d+", r".*op\d+", "rankdump does not"),
    expression("blanks inside", "a b", "ab", "is read as 'name-regex(ab)'"),
    expression("groups", "(?:a|b)(?=c)(?!d)(e)", "(?:a|b)(?=c)(?!d)(e)"),
    expression("quantifiers", "a*?b{2,}c{3}d{1,2}?", "a*?b{2,}c{3}d{1,2}?"),
    expression("closing brackets", "]}", "]}"),
    expression("class", "[[:alpha:]_-]+[^[:digit:]]", r"[A-Za-z_\-]+[^0-9]"),
    expression("brackets in a set", "[[a&&b]", r"[\[a\&\&b]"),
    expression("empty set", "[]a[^]", r"(?!)a[\s\S]"),
    expression("range to a dash", "[+--]", r"[+-\-]"),
    expression("gradient", "Gradients/.*", "Gradients/.*"),
    *(
        ConfigurationRow(
            f"1.7 invalid expression: {pattern}",
            common={"dump_mode": 1, "kernels": [f"name-regex({pattern})"]},
            refused=f"{C}.kernels[0]",
            allowed=f"a valid regular expression in name-regex(...), not {pattern!r}: ",
        )
        for pattern in (
            *("(", "[", ")", "*a", "[z-a]", "a{,3}", "a{", "a**", "a++", "a*+", r"\2", "[[:foo:]]"),
            *(
                "(?i)a",
                "(?P<x>a)",
                "(?<=a)b",
                "(?<!a)b",
                "(?#x)a",
                "(?>a)",
                "(?s:a)",
                r"a\Z",
                r"\p",
            ),
            *(
                "[[=a=]]",
                "[[.a.]]",
                "[[:alpha:]-z]",
                "[a-[:digit:]]",
                "[[:alpha:]",
                "a\\",
                "(" * 999,
            ),
        )
    ),
]

ROWS = [*ITERATION, *PATH, *DEVICES, *CLASSES, *EXPRESSIONS]
