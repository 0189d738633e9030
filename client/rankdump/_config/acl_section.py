"""Section `dump` of CANN's `acl.json`: JSON types, keys that take one of a few words, the path of
the dump, and the values that TF Adapter's `DumpConfig` also has: `dump_step`, and statistics
instead of tensors. Pure: the disk is examined by a `PathProbe`. First of all, keys with a wrong
type are rejected. The text of an error ends in the code that CANN reports for it, such as (EP0003).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import cast

from rankdump._config.config_section import ConfigSection, format_choices
from rankdump._config.output_path import PathProbe, describe_shell_word, read_root_override
from rankdump._core.plan import ContentSettings, IterationSelection
from rankdump._core.selection import parse_uint64
from rankdump.errors import MISSING_VALUE, ConfigError

WRONG_TYPE, UNKNOWN_WORD, BAD_VALUE, UNREADABLE, CONFLICT = (
    "EP0001",
    "EP0002",
    "EP0003",
    "EP0004",
    "EP0005",
)
"""Error codes of CANN: wrong type or missing value, unknown word, wrong value, unreadable file, and
keys that exclude each other.
"""
MAX_NESTING = 10

_TEXT_KEYS = (
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
ACL_KEYS = (*_TEXT_KEYS, "dump_stats", "dump_list")
BLACKLIST_KEYS = ("optype_blacklist", "opname_blacklist")
ITEM_KEYS = ("model_name", "layer", "watcher_nodes", *BLACKLIST_KEYS, "opname_range")
ENTRY_KEYS = {
    **dict.fromkeys(BLACKLIST_KEYS, ("name", "pos")),
    "opname_range": ("begin", "end"),
}
"""Keys of the entries of an item's lists, by the key of the list."""


def make_coded_error(section: ConfigSection, key: str, allowed: str, code: str) -> ConfigError:
    """Return an error whose text ends in the code that CANN reports for it."""
    return section.make_error(key, f"{allowed} ({code})")


def check_depth(body: Mapping[str, object], *, file: str) -> None:
    """Reject a document that is nested too deeply."""
    level: list[object] = [body]
    for _ in range(MAX_NESTING):
        level = [part for value in level for part in _list_parts(value)]
    if any(isinstance(value, (dict, list)) for value in level):
        allowed = f"objects and arrays nested at most {MAX_NESTING} deep ({UNREADABLE})"
        raise ConfigError(file, "", "a deeper nesting", allowed)


def _list_parts(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(cast("dict[str, object]", value).values())
    return cast("list[object]", value) if isinstance(value, list) else []


def check_types(dump: ConfigSection) -> None:
    """Reject the first key of the section that has the wrong type."""
    for key in _TEXT_KEYS:
        read_text(dump, key)
    read_texts(dump, "dump_stats")
    for item in read_objects(dump, "dump_list"):
        _check_item(item)


def _check_item(item: ConfigSection) -> None:
    read_text(item, "model_name")
    read_texts(item, "layer")
    read_texts(item, "watcher_nodes")
    for key in BLACKLIST_KEYS:
        for entry in read_objects(item, key):
            read_text(entry, "name")
            read_texts(entry, "pos")
    for entry in read_objects(item, "opname_range"):
        read_text(entry, "begin")
        read_text(entry, "end")


def read_text(section: ConfigSection, key: str) -> str:
    """Return the string at a key; empty if it is missing."""
    value = section.values.get(key, "")
    if not isinstance(value, str):
        raise make_coded_error(section, key, "a string", WRONG_TYPE)
    return value


def read_texts(section: ConfigSection, key: str) -> tuple[str, ...]:
    """Return the array of strings at a key; empty if it is missing."""
    values = _read_array(section, key)
    for index, value in enumerate(values):
        if not isinstance(value, str):
            raise section.make_part_error(f"{key}[{index}]", value, f"a string ({WRONG_TYPE})")
    return tuple(cast("list[str]", values))


def read_objects(section: ConfigSection, key: str) -> tuple[ConfigSection, ...]:
    """Return the array of objects at a key, each as a section; empty if it is missing."""
    found: list[ConfigSection] = []
    for index, value in enumerate(_read_array(section, key)):
        part = section.make_part(f"{key}[{index}]", value)
        if part is None:
            raise section.make_part_error(f"{key}[{index}]", value, f"an object ({WRONG_TYPE})")
        found.append(part)
    return tuple(found)


def _read_array(section: ConfigSection, key: str) -> list[object]:
    values = section.values.get(key, MISSING_VALUE)
    if values is MISSING_VALUE:
        return []
    if not isinstance(values, list):
        raise make_coded_error(section, key, "an array", WRONG_TYPE)
    return cast("list[object]", values)


WATCHER_SCENE = "watcher"
_ON_OFF = ("on", "off")
_WORDS_BY_KEY = {
    "dump_mode": ("input", "output", "all"),
    "dump_data": ("tensor", "stats"),
    "dump_op_switch": _ON_OFF,
    "dump_level": ("op", "kernel", "all"),
    "dump_debug": _ON_OFF,
    "dump_scene": (
        "lite_exception",
        "aic_err_brief_dump",
        "aic_err_norm_dump",
        "aic_err_detail_dump",
        WATCHER_SCENE,
    ),
}
_KERNEL_DATA_WORDS = ("all", "printf", "tensor", "assert", "timestamp")
STATISTICS_BY_WORD = {
    "Max": "max",
    "Min": "min",
    "Avg": "avg",
    "Nan": "nan count",
    "Negative Inf": "negative inf count",
    "Positive Inf": "positive inf count",
    "L2norm": "l2norm",
}
"""Statistics by CANN's words, in the order of their columns."""


@dataclass(frozen=True, slots=True)
class AclWords:
    """Values of the keys that take one of a few words."""

    mode: str
    data: str
    level: str
    scene: str
    """The value of `dump_scene`; empty if there is none."""
    dumps_operators: bool
    """Whether `dump_op_switch` is on."""
    is_debug: bool

    @property
    def is_watching(self) -> bool:
        """Whether outputs are read again after other operators."""
        return self.scene == WATCHER_SCENE

    @property
    def is_exception(self) -> bool:
        """Whether only the operator that raised is dumped."""
        return bool(self.scene) and not self.is_watching


def parse_acl_words(dump: ConfigSection) -> AclWords:
    """Return the values of these keys; ConfigError for the first unknown word."""
    found = {
        key: _check_word(dump, key, read_text(dump, key), among)
        for key, among in _WORDS_BY_KEY.items()
    }
    for kind in (
        read_text(dump, "dump_kernel_data").split(",") if "dump_kernel_data" in dump.values else ()
    ):
        _check_word(dump, "dump_kernel_data", kind, _KERNEL_DATA_WORDS, given=True)
    for index, name in enumerate(read_texts(dump, "dump_stats")):
        if name not in STATISTICS_BY_WORD:
            allowed = f"{format_choices(tuple(STATISTICS_BY_WORD))} ({UNKNOWN_WORD})"
            raise dump.make_part_error(f"dump_stats[{index}]", name, allowed)
    return AclWords(
        mode=found["dump_mode"] or "output",
        data=found["dump_data"] or "tensor",
        level=found["dump_level"] or "all",
        scene=found["dump_scene"],
        dumps_operators=found["dump_op_switch"] == "on",
        is_debug=found["dump_debug"] == "on",
    )


def _check_word(
    dump: ConfigSection, key: str, value: str, among: tuple[str, ...], *, given: bool = False
) -> str:
    if not (given or key in dump.values):
        return ""
    if value not in among:
        code = UNKNOWN_WORD if value else WRONG_TYPE
        raise make_coded_error(dump, key, format_choices(among), code)
    return value


def check_scene(dump: ConfigSection, words: AclWords) -> None:
    """Reject keys that cannot be combined with the scene."""
    if not words.scene:
        return
    for key in ("dump_debug", "dump_op_switch"):
        if dump.values.get(key) == "on":
            raise make_coded_error(
                dump, key, f'"off" where dump_scene is "{words.scene}"', CONFLICT
            )
    if words.is_watching and words.mode != "output":
        raise make_coded_error(
            dump, "dump_mode", f'"output" where dump_scene is "{WATCHER_SCENE}"', CONFLICT
        )


MAX_PATH_BYTES = 512
EXCEPTION_FOLDER = "extra-info/data-dump"
_HOST_PATTERN = re.compile(r"([0-9]+)\.([0-9]+)\.([0-9]+)\.([0-9]+)")
_PATH_CHARACTERS = re.compile(r"[A-Za-z0-9=\[\];\\,./!@#$%^&*()_+{}:?-]+")
_ALLOWED_PATH = f"a folder of 1 to {MAX_PATH_BYTES} characters, or IPv4:folder"
_EXCEPTION_VARIABLES = ("ASCEND_DUMP_PATH", "ASCEND_WORK_PATH")


def parse_dump_path(dump: ConfigSection, environ: Mapping[str, str], probe: PathProbe) -> str:
    """Return the absolute root of a dump of data or of overflows."""
    path = read_text(dump, "dump_path")
    if not path:
        raise make_coded_error(dump, "dump_path", _ALLOWED_PATH, WRONG_TYPE)
    if len(path.encode("utf-8", "surrogatepass")) > MAX_PATH_BYTES:
        raise make_coded_error(dump, "dump_path", _ALLOWED_PATH, BAD_VALUE)
    override = read_root_override(environ, dump.file)
    host, colon, folder = path.partition(":")
    if colon and not folder:
        raise make_coded_error(dump, "dump_path", "a folder behind the colon", BAD_VALUE)
    if colon and _HOST_PATTERN.fullmatch(host):
        _check_remote(dump, host, folder)
        if not override:
            where = f"{folder}{describe_shell_word(folder)}"
            dump.add_note(
                "dump_path", f"names another host; files are written on this host, to {where}"
            )
        return override or probe(folder).absolute
    if override:
        return override
    facts = probe(path)
    if facts.fault:
        raise make_coded_error(dump, "dump_path", facts.fault, BAD_VALUE)
    return facts.absolute


def _check_remote(dump: ConfigSection, host: str, folder: str) -> None:
    if not all(len(octet) <= 3 and int(octet) <= 255 for octet in host.split(".")):
        raise make_coded_error(
            dump, "dump_path", "an IPv4 address of numbers from 0 to 255", BAD_VALUE
        )
    if not _PATH_CHARACTERS.fullmatch(folder):
        allowed = "letters, digits and -=[];\\,./!@#$%^&*()_+{}:? behind the address"
        raise make_coded_error(dump, "dump_path", allowed, BAD_VALUE)


def make_exception_root(dump: ConfigSection, environ: Mapping[str, str], probe: PathProbe) -> str:
    """Return the absolute root of a dump of the operator that raised; the folder need not exist."""
    override = read_root_override(environ, dump.file)
    if override:
        return override
    variable = next((name for name in _EXCEPTION_VARIABLES if environ.get(name)), "")
    path = read_text(dump, "dump_path")
    if variable and path:
        dump.add_note("dump_path", f"is overridden by {variable}: {environ[variable]}")
    elif describe_shell_word(path):
        dump.add_note("dump_path", f"is used literally{describe_shell_word(path)}")
    base = environ.get(variable, "") or path or "."
    return f"{probe(base).absolute.rstrip('/')}/{EXCEPTION_FOLDER}"


def make_disabled_root(environ: Mapping[str, str], file: str, probe: PathProbe) -> str:
    """Return the root of a configuration that enables nothing."""
    return read_root_override(environ, file) or probe(".").absolute


# MindSpore's key `iteration` looks like `dump_step`, but its parts are not checked.
STEP_FORM = 'numbers and ranges without blanks as "0|5-8|100-120"'
MAX_STEP_PARTS = 100
_PART_PATTERN = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def parse_steps(text: str, *, strict: bool = False) -> IterationSelection:
    """Return the iterations that a text selects; ValueError names what is allowed.

    With `strict`, a range must contain more than one number.
    """
    parts = text.split("|")
    if len(parts) > MAX_STEP_PARTS:
        raise ValueError(f"at most {MAX_STEP_PARTS} parts, not {len(parts)}")
    return IterationSelection(text, tuple(_parse_span(part, strict=strict) for part in parts))


def _parse_span(part: str, *, strict: bool) -> tuple[int, int]:
    found = _PART_PATTERN.fullmatch(part)
    if found is None:
        raise ValueError(f"{STEP_FORM}, not {part[:40]!r}")
    low = _parse_number(found[1])
    high = low if found[2] is None else _parse_number(found[2])
    if low > high or (strict and found[2] is not None and low == high):
        order = "smaller than" if strict else "not greater than"
        raise ValueError(f"a range whose first number is {order} its last, not {part[:40]!r}")
    return low, high


def _parse_number(digits: str) -> int:
    number = parse_uint64(digits)
    if number is None:
        raise ValueError(f"numbers of at most 64 bits, not {digits[:40]!r}")
    return number


_DEFAULT_ITEMS = (
    "max",
    "min",
    "avg",
    "count",
    "nan count",
    "negative inf count",
    "positive inf count",
)


def make_cann_content(data: str, chosen: Collection[str] = ()) -> ContentSettings:
    """Return the content settings for `tensor` or `stats`; `chosen` are statistics by rankdump's
    names.

    The count of elements is always included: among the default statistics, or before chosen ones.
    """
    if data != "stats":
        return ContentSettings()
    columns = tuple(item for item in STATISTICS_BY_WORD.values() if item in chosen)
    default = not columns or {*columns, "count"} == {*_DEFAULT_ITEMS}
    items = _DEFAULT_ITEMS if default else ("count", *columns)
    return ContentSettings(saved="statistic", statistics=items, tables="operator")
