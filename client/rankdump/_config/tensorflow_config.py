"""Conversion of TF Adapter's `DumpConfig` to a plan (TF Adapter, DumpConfig). Pure: the disk is
examined by a `PathProbe`. The adapter's own checks come first, then those of the engine below it.
"""

from __future__ import annotations

from collections.abc import Mapping

from rankdump._config.acl_section import make_cann_content, parse_steps
from rankdump._config.config_section import ConfigNotes, format_choices
from rankdump._config.output_path import PathProbe
from rankdump._core.plan import (
    ContentSettings,
    DumpPlan,
    IterationSelection,
    OperatorSelection,
    OutputSettings,
    TensorSelection,
)
from rankdump.errors import MISSING_VALUE, ConfigError

CONFIG_NAME = "DumpConfig"
NO_PATH_CODE, CONFLICT_CODE = "E10058", "E10001"
_DUMP_MODES = ("input", "output", "all")
_DEBUG_MODES = ("aicore_overflow", "atomic_overflow", "all")
_DUMP_DATA_WORDS = ("tensor", "stats")


def parse_dump_config(values: Mapping[str, object], *, probe: PathProbe) -> DumpPlan:
    """Return the plan for the arguments of the constructor; ConfigError names the wrong
    argument.
    """
    data, debug = _read_flag(values, "enable_dump"), _read_flag(values, "enable_dump_debug")
    if not (data or debug):
        return DumpPlan(OutputSettings(probe(".").absolute), dialect="tf", enabled=False)
    root = _parse_root(values, probe)
    iterations = _parse_iterations(values)
    mode = _check_word(values, "dump_mode", _DUMP_MODES)
    debug_mode = _check_word(values, "dump_debug_mode", _DEBUG_MODES)
    content = make_cann_content(_check_word(values, "dump_data", _DUMP_DATA_WORDS))
    operators = _parse_operators(values)
    if data and debug:
        allowed = f"False where enable_dump is True ({CONFLICT_CODE})"
        raise ConfigError(CONFIG_NAME, "enable_dump_debug", True, allowed)
    notes = ConfigNotes()
    if debug and debug_mode != "all":
        notes.add(
            "dump_debug_mode",
            debug_mode,
            'becomes "all": rankdump does not distinguish kinds of overflow',
        )
    if debug:
        _note_idle_arguments(values, notes)
    selection = TensorSelection(
        iterations=iterations,
        operators=operators,
        inputs=mode != "output",
        outputs=mode != "input",
    )
    return DumpPlan(
        output=OutputSettings(root, "", "cann", file_format="bin"),
        selection=TensorSelection(iterations, trigger="overflow") if debug else selection,
        content=ContentSettings() if debug else content,
        dialect="tf",
        warnings=notes.texts,
    )


def _note_idle_arguments(values: Mapping[str, object], notes: ConfigNotes) -> None:
    reason = "is ignored with enable_dump_debug: an operator with an overflow is dumped whole"
    for key, default in (("dump_mode", "output"), ("dump_data", "tensor"), ("dump_layer", None)):
        if values[key] != default:
            notes.add(key, values[key], reason)


def _make_config_error(values: Mapping[str, object], key: str, allowed: str) -> ConfigError:
    value = values[key]
    return ConfigError(CONFIG_NAME, key, MISSING_VALUE if value is None else value, allowed)


def _read_flag(values: Mapping[str, object], key: str) -> bool:
    value = values[key]
    if not isinstance(value, bool):
        raise _make_config_error(values, key, "True or False")
    return value


def _parse_root(values: Mapping[str, object], probe: PathProbe) -> str:
    path = values["dump_path"]
    if path is None or path == "":
        raise _make_config_error(values, "dump_path", f"a folder that exists ({NO_PATH_CODE})")
    if not isinstance(path, str):
        raise _make_config_error(values, "dump_path", "a folder that exists")
    facts = probe(path)
    if facts.fault:
        raise _make_config_error(values, "dump_path", facts.fault)
    return facts.absolute


def _parse_iterations(values: Mapping[str, object]) -> IterationSelection:
    steps = values["dump_step"]
    if steps is None:
        return IterationSelection()
    if not isinstance(steps, str):
        raise _make_config_error(values, "dump_step", 'a text such as "0|5|10|50-100", or None')
    try:
        return parse_steps(steps, strict=True)
    except ValueError as error:
        raise _make_config_error(values, "dump_step", str(error)) from None


def _check_word(values: Mapping[str, object], key: str, among: tuple[str, ...]) -> str:
    word = values[key]
    if not isinstance(word, str) or word not in among:
        raise _make_config_error(values, key, format_choices(among))
    return word


def _parse_operators(values: Mapping[str, object]) -> OperatorSelection:
    layers = values["dump_layer"]
    if layers is not None and not isinstance(layers, str):
        raise _make_config_error(values, "dump_layer", "names with blanks between them, or None")
    names = tuple(dict.fromkeys((layers or "").split()))
    return OperatorSelection(everything=not names, names=names, spelt=True)
