"""Files in a dump of msprobe (8.3 to 26.2): their names, and the content of dump.json, stack.json
and construct.json. Pure.

    [step{iteration}/]{rank{rank}|rank|proc{pid}}/dump.json       or debug.json
    [step{iteration}/]{rank...}/stack.json, construct.json        absent with `extra_info: false`
    [step{iteration}/]{rank...}/dump_tensor_data/{tensor}.pt      with task `tensor`

    Functional.conv2d.0.forward             Module.blocks.0.bn.BatchNorm2d.forward.0
    Distributed.all_reduce.1.backward       Module.fc.Linear.parameters_grad.0

dump.json has the calls in execution order; each call has its tensors with element type, shape,
extremes, mean, norm, and the name of the tensor's file. If one of these numbers is NaN, all of them
are. `md5` is a CRC-32 of eight digits, or after `0x` a sum of exclusive ors (`summary_mode: xor`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any, NamedTuple, cast

from rankdump._core.graph import SourceLine
from rankdump._core.record import TensorSide
from rankdump._layout.api_files import parse_dtype_name, parse_source_line
from rankdump._layout.api_tree import CALL_KINDS, ApiCall, ApiPlace, parse_direction
from rankdump._layout.foreign_calls import (
    CRC_KIND,
    MAX_JSON_DEPTH,
    XOR_KIND,
    ForeignCall,
    ForeignTensor,
    make_module_name,
    make_parameter_call,
    parse_extents,
    select_own_lines,
)
from rankdump.errors import CorruptedError

DUMP_FILES = ("dump.json", "debug.json")
STACK_FILE, TENSOR_FOLDER = "stack.json", "dump_tensor_data"
_RANK_FOLDER = re.compile(r"(?:rank(?P<rank>[0-9]{1,9})?|proc[0-9]{1,18})")
_STEP_FOLDER = re.compile(r"step([0-9]{1,18})")
_STATISTICS = {"Max": "max", "Min": "min", "Mean": "avg", "Norm": "l2norm"}
_CRC = re.compile(r"[0-9a-fA-F]{8}")
_DIRECTION = r"(?P<direction>forward|backward|parameters_grad)"
_MODULE_NAME = re.compile(
    rf"(?:Module|Cell)\.(?:(?P<path>.+)\.)?(?P<kind>[^.]+)\.{_DIRECTION}\.(?P<number>[0-9]{{1,18}})"
)
_API_NAME = re.compile(
    r"(?P<kind>[^.]+)\.(?P<api>.+)\.(?P<number>[0-9]{1,18})\.(?P<direction>forward|backward)"
)
_INPUT_KEYS, _KEYWORD_KEY = ("input_args", "input"), "input_kwargs"
_OUTPUT_KEY, _PARAMETERS_KEY = "output", "parameters"
_COLLECTIVE_KIND = "Distributed"
_FILE_NAME = re.compile(r"[^/\\\0]{1,255}")


class _CallName(NamedTuple):
    """Parts of the name of a call."""

    op_type: str
    op_name: str
    module: str = ""
    """Path of the module; empty for an API call."""
    is_api: bool = False
    is_gradient: bool = False
    """Whether the tensors of the call are the gradients of a module's parameters."""


def parse_rank_folder(name: str) -> int | None:
    """Return the rank of a folder, 0 for the folder of a process without ranks; None for any other
    folder.
    """
    found = _RANK_FOLDER.fullmatch(name)
    return None if found is None else int(found["rank"] or 0)


def parse_step_folder(name: str) -> int | None:
    """Return the iteration of a folder; None for any other folder."""
    found = _STEP_FOLDER.fullmatch(name)
    return None if found is None else int(found[1])


def parse_dump_file(data: bytes) -> list[ForeignCall]:
    """Return the calls in a dump.json; CorruptedError for content of another form."""
    body = _parse_object(data)
    calls = body.get("data")
    if not isinstance(calls, dict) or "task" not in body:
        raise CorruptedError("not a dump.json of msprobe: it has no `task`, or `data` is no object")
    found: list[ForeignCall] = []
    for name, content in cast("dict[str, object]", calls).items():
        if not isinstance(content, dict):
            raise CorruptedError(f"not a dump.json of msprobe: {name[:80]!r} is no object")
        found += _parse_call(name, cast("dict[str, object]", content))
    return found


def parse_stack_file(data: bytes) -> Iterator[tuple[str, str, tuple[SourceLine, ...]]]:
    """Yield type and name of each call with its stack, outermost line first.

    Since msprobe 25.0 each stack is written once, with the names of its calls.
    """
    for key, content in _parse_object(data).items():
        parts = cast("list[object]", content) if isinstance(content, list) else []
        shared = len(parts) == 2 and all(isinstance(part, list) for part in parts)
        names, lines = cast("list[list[object]]", parts) if shared else ([key], parts)
        frames = [parse_source_line(text) for text in reversed(lines) if isinstance(text, str)]
        stack = select_own_lines([frame for frame in frames if frame is not None])
        for name in names:
            if isinstance(name, str):
                parsed = _parse_name(name)
                yield parsed.op_type, parsed.op_name, stack


def _parse_object(data: bytes) -> dict[str, object]:
    try:
        body: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptedError(f"not a whole JSON file: {error}") from None
    if not isinstance(body, dict):
        raise CorruptedError("not a file of msprobe: the content is not a JSON object")
    return cast("dict[str, object]", body)


def _parse_name(name: str) -> _CallName:
    found = _MODULE_NAME.fullmatch(name)
    if found is not None:
        path, kind, backward = found["path"] or "", found["kind"], found["direction"] == "backward"
        op_name = make_module_name(path, kind, int(found["number"]), backward=backward)
        gradient = found["direction"] == "parameters_grad"
        return _CallName(kind, op_name, path, is_gradient=gradient)
    found = _API_NAME.fullmatch(name)
    if found is None:
        return _CallName(name.partition(".")[0], name)
    kind, api = found["kind"], found["api"].replace(".", "_")
    call = ApiCall(kind, api, int(found["number"]), parse_direction(found["direction"]))
    return _CallName(call.op_type, call.name, is_api=kind in CALL_KINDS)


def _parse_call(name: str, content: Mapping[str, object]) -> Iterator[ForeignCall]:
    """Yield a call, and the parameters of a module as operators of their own."""
    parsed = _parse_name(name)
    if parsed.is_gradient:
        yield from _parse_parameters(name, parsed.module, content, gradient=True)
        return
    leaves = _CallLeaves(parsed.is_api)
    known = (*_INPUT_KEYS, _KEYWORD_KEY, _OUTPUT_KEY, _PARAMETERS_KEY)
    if not any(key in content for key in known):
        leaves.add_side(TensorSide.OUTPUT, content)
    for key in _INPUT_KEYS:
        leaves.add_side(TensorSide.INPUT, content.get(key))
    leaves.add_keywords(content.get(_KEYWORD_KEY))
    leaves.add_side(TensorSide.OUTPUT, content.get(_OUTPUT_KEY))
    if leaves.tensors:
        collective = name.startswith(f"{_COLLECTIVE_KIND}.")
        group = _find_group(content.get(_KEYWORD_KEY)) if collective else ""
        tensors = tuple(leaves.tensors)
        yield ForeignCall(name, parsed.op_type, parsed.op_name, tensors, group, collective)
    parameters = content.get(_PARAMETERS_KEY)
    if isinstance(parameters, dict):
        own = cast("dict[str, object]", parameters)
        yield from _parse_parameters(name, parsed.module, own, gradient=False)


def _parse_parameters(
    name: str, module: str, content: Mapping[str, object], *, gradient: bool
) -> Iterator[ForeignCall]:
    for key, value in content.items():
        leaves = _CallLeaves(is_api=False)
        leaves.add_side(TensorSide.OUTPUT, value)
        for tensor in leaves.tensors[:1]:
            parameter = f"{module}.{key}" if module else key
            own = f"{name}.{key}" if gradient else f"{name}.{_PARAMETERS_KEY}.{key}"
            yield make_parameter_call(own, parameter, tensor, gradient=gradient)


def _find_group(keywords: object) -> str:
    """Return a text that identifies the process group of a collective; empty for the
    default group.
    """
    group = cast("dict[str, Any]", keywords).get("group") if isinstance(keywords, dict) else None
    if not isinstance(group, dict):
        return ""
    ranks, number = (cast("dict[str, Any]", group).get(key) for key in ("group_ranks", "group_id"))
    return f"{number or ''}{ranks or ''}"


class _CallLeaves:
    """Tensors among the arguments and results of a call, numbered with all other leaves."""

    def __init__(self, is_api: bool) -> None:
        self.tensors: list[ForeignTensor] = []
        self._is_api = is_api
        self._counts = {TensorSide.INPUT: 0, TensorSide.OUTPUT: 0}

    def add_side(self, side: TensorSide, value: object) -> None:
        """Add positional arguments, or results."""
        if value is None:
            return
        alone = side is TensorSide.OUTPUT and isinstance(value, list)
        parts = cast("list[object]", value) if isinstance(value, list) else [value]
        if alone and len(parts) == 1:
            self._add(side, parts[0], "", "", 0)
            return
        for at, part in enumerate(parts):
            self._add(side, part, str(at), "", 0)

    def add_keywords(self, value: object) -> None:
        """Add arguments by keyword."""
        if isinstance(value, dict):
            for at, (key, part) in enumerate(cast("dict[str, object]", value).items()):
                number = self._counts[TensorSide.INPUT] + at if self._is_api else 0
                path = str(number) if self._is_api else key
                self._add(TensorSide.INPUT, part, path, key, 0)

    def _add(self, side: TensorSide, value: object, path: str, word: str, depth: int) -> None:
        if depth > MAX_JSON_DEPTH:
            raise CorruptedError(f"arguments are nested more than {MAX_JSON_DEPTH} deep")
        parts: list[tuple[str, object]] | None = None
        if isinstance(value, list):
            parts = [(str(at), part) for at, part in enumerate(cast("list[object]", value))]
        elif isinstance(value, dict) and not isinstance(value.get("type"), str) and value:  # pyright: ignore[reportUnknownMemberType]
            parts = list(cast("dict[str, object]", value).items())
        if parts is not None:
            for key, part in parts:
                inner = f"{word}.{key}" if word else ""
                self._add(side, part, f"{path}.{key}" if path else key, inner, depth + 1)
            return
        slot = self._counts[side]
        self._counts[side] += 1
        if isinstance(value, dict) and "shape" in value and "dtype" in value:
            argument = self._spell_argument(side, path, word)
            leaf = cast("dict[str, object]", value)
            self.tensors.append(_parse_tensor(leaf, side, slot, argument))

    def _spell_argument(self, side: TensorSide, path: str, word: str) -> str:
        if self._is_api:
            return ApiPlace(side, path, word).argument
        start = "out" if side is TensorSide.OUTPUT else "kwargs" if word else "args"
        return f"{start}.{path}" if path else start


def _parse_tensor(
    leaf: Mapping[str, object], side: TensorSide, slot: int, argument: str
) -> ForeignTensor:
    dtype, shape = leaf["dtype"], parse_extents(leaf["shape"])
    file = leaf.get("data_name") or ""
    if not isinstance(dtype, str) or shape is None:
        raise CorruptedError(f"{argument}: shape {leaf['shape']!r:.80} or dtype {dtype!r:.80}")
    if not isinstance(file, str) or (file and (not _FILE_NAME.fullmatch(file) or file == "..")):
        raise CorruptedError(f"{argument}: data_name {file!r:.80} is not the name of a file")
    name = parse_dtype_name(dtype)
    statistics = {
        item: float(value)
        for key, item in _STATISTICS.items()
        if isinstance(value := leaf.get(key), (int, float)) and name != "bool"
    }
    return ForeignTensor(
        side, slot, argument, name, shape, statistics, _parse_checksum(leaf.get("md5")), file
    )


def _parse_checksum(value: object) -> str:
    if not isinstance(value, str):
        return ""
    if value.startswith("0x"):
        return f"{XOR_KIND}{value}"
    return f"{CRC_KIND}{value}" if _CRC.fullmatch(value) else ""


_PLAIN_TYPES: Mapping[str, type] = {"int": int, "bool": bool, "str": str}


class TensorSlot(NamedTuple):
    """Marks a tensor among the arguments of a call, by its slot."""

    slot: int


class UnknownValue(NamedTuple):
    """Marks an argument that the dump does not contain."""

    kind: str
    """Description of the argument in the dump, such as its type; empty if there is none."""


def parse_call_arguments(data: bytes, name: str) -> tuple[list[Any], dict[str, Any]] | None:
    """Return the positional and keyword arguments of a forward call with this name of msprobe, with
    numbers and texts as they were; None if the file lacks the call.
    """
    try:
        body: Any = json.loads(data)
        content = body["data"].get(name)
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise CorruptedError(f"not a dump.json of msprobe: {error!r:.80}") from None
    if not isinstance(content, dict):
        return None
    fields = cast("dict[str, Any]", content)
    slots = count()
    args, keywords = fields.get("input_args"), fields.get("input_kwargs")
    positional = cast("list[Any]", args) if isinstance(args, list) else []
    named = cast("dict[str, Any]", keywords) if isinstance(keywords, dict) else {}
    return (
        [_read_argument(each, slots) for each in positional],
        {key: _read_argument(each, slots) for key, each in named.items()},
    )


def _read_argument(value: Any, slots: Iterator[int], depth: int = 0) -> Any:
    """Return one argument; each leaf gets the next slot, as `_CallLeaves` counts them."""
    if depth > MAX_JSON_DEPTH:
        raise CorruptedError(f"arguments are nested more than {MAX_JSON_DEPTH} deep")
    if isinstance(value, list):
        return [_read_argument(part, slots, depth + 1) for part in cast("list[Any]", value)]
    fields = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    kind = fields.get("type")
    if fields and not isinstance(kind, str):
        return {key: _read_argument(part, slots, depth + 1) for key, part in fields.items()}
    slot = next(slots)
    if value is None:
        return None
    if "shape" in fields and "dtype" in fields:
        return TensorSlot(slot)
    found: object = fields.get("value")
    if kind == "float" and isinstance(found, (float, int)):
        return float(found)
    if isinstance(kind, str) and type(found) is _PLAIN_TYPES.get(kind):
        return found
    return UnknownValue(kind if isinstance(kind, str) else "")
