"""What TF Adapter's `DumpConfig` means. Pure: what is on the disk is asked of a probe.

Facts: ascend-formats.md 5. The adapter's own checks come first, then those of the engine below it.
"""

from __future__ import annotations

from collections.abc import Mapping

from rankdump.contract.dialect.disk import Probe
from rankdump.contract.dialect.figures import content_of
from rankdump.contract.dialect.notes import Notes
from rankdump.contract.dialect.steps import parse_steps
from rankdump.contract.errors import MISSING, ConfigError
from rankdump.contract.plan import Content, DumpPlan, Iterations, Operators, Output, Selection

NAME = "DumpConfig"
NO_PATH, BOTH = "E10058", "E10001"
_MODES = ("input", "output", "all")
_DEBUG_MODES = ("aicore_overflow", "atomic_overflow", "all")
_DATA = ("tensor", "stats")


def parse_dump_config(values: Mapping[str, object], *, probe: Probe) -> DumpPlan:
    """Return the plan of the constructor's arguments; ConfigError names the one at fault."""
    data, debug = _flag(values, "enable_dump"), _flag(values, "enable_dump_debug")
    if not (data or debug):
        return DumpPlan(Output(probe(".").absolute), dialect="tf", enabled=False)
    root = _root(values, probe)
    iterations = _iterations(values)
    mode = _word(values, "dump_mode", _MODES)
    debug_mode = _word(values, "dump_debug_mode", _DEBUG_MODES)
    content = content_of(_word(values, "dump_data", _DATA))
    operators = _operators(values)
    if data and debug:
        allowed = f"False where enable_dump is True ({BOTH})"
        raise ConfigError(NAME, "enable_dump_debug", True, allowed)
    notes = Notes()
    if debug and debug_mode != "all":
        notes.add("dump_debug_mode", debug_mode, 'becomes "all": all overflow is one')
    selection = Selection(
        iterations=iterations,
        operators=operators,
        inputs=mode != "output",
        outputs=mode != "input",
    )
    return DumpPlan(
        output=Output(root, "", "cann", file_format="bin"),
        selection=Selection(iterations, trigger="overflow") if debug else selection,
        content=Content() if debug else content,
        dialect="tf",
        warnings=notes.texts,
    )


def _refusal(values: Mapping[str, object], key: str, allowed: str) -> ConfigError:
    value = values[key]
    return ConfigError(NAME, key, MISSING if value is None else value, allowed)


def _flag(values: Mapping[str, object], key: str) -> bool:
    value = values[key]
    if not isinstance(value, bool):
        raise _refusal(values, key, "True or False")
    return value


def _root(values: Mapping[str, object], probe: Probe) -> str:
    path = values["dump_path"]
    if path is None or path == "":
        raise _refusal(values, "dump_path", f"a folder that exists ({NO_PATH})")
    if not isinstance(path, str):
        raise _refusal(values, "dump_path", "a folder that exists")
    facts = probe(path)
    if facts.fault:
        raise _refusal(values, "dump_path", facts.fault)
    return facts.absolute


def _iterations(values: Mapping[str, object]) -> Iterations:
    steps = values["dump_step"]
    if steps is None:
        return Iterations()
    if not isinstance(steps, str):
        raise _refusal(values, "dump_step", 'a text such as "0|5|10|50-100", or None')
    try:
        return parse_steps(steps, strict=True)
    except ValueError as error:
        raise _refusal(values, "dump_step", str(error)) from None


def _word(values: Mapping[str, object], key: str, among: tuple[str, ...]) -> str:
    word = values[key]
    if not isinstance(word, str) or word not in among:
        *first, last = (f'"{each}"' for each in among)
        raise _refusal(values, key, f"{', '.join(first)} or {last}")
    return word


def _operators(values: Mapping[str, object]) -> Operators:
    layers = values["dump_layer"]
    if layers is not None and not isinstance(layers, str):
        raise _refusal(values, "dump_layer", "names with blanks between them, or None")
    names = tuple(dict.fromkeys((layers or "").split()))
    return Operators(everything=not names, names=names)
