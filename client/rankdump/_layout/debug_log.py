"""Logs of torch's DebugMode: the JSON of `DebugMode.save_logs` (torch 2.14 and later), and the text
of `debug_string()` (torch 2.10 and later). Pure.

    {"format": "torch.utils._debug_mode.DebugMode.logs", "version": 1, "logs": [{...}, ...]}

      [nn.Mod] Net
        [nn.Mod] Net.fc
          aten::t(t$9: f32[3, 4])  ->  t$10: f32[4, 3]  # {'input_hash': ((3.2,), {}), 'hash': 3.2}

A call has its operator, its arguments as text, and with `log_tensor_hashes` a hash of each tensor:
`norm` is the L1 norm in float64, `hash_tensor` a sum of exclusive ors, and a list of both becomes a
tuple. Hashes have the structure of the arguments, with None for values that are no tensors, so the
leaves that are numbers belong to the tensors in their order. The line of a module comes before the
lines of the calls within it, which are one level deeper. A backward is recognised by the stack of
its forward, if stacks were recorded.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from rankdump._core.graph import SourceLine
from rankdump._core.record import TensorSide
from rankdump._core.selection import GRADIENTS_PREFIX
from rankdump._layout.foreign_calls import (
    L1NORM_ITEM,
    XOR_KIND,
    ForeignCall,
    ForeignTensor,
    parse_extents,
    select_own_lines,
)
from rankdump.errors import CorruptedError

LOG_FORMAT, LOG_VERSION = "torch.utils._debug_mode.DebugMode.logs", 1
_FORMAT_MARK = LOG_FORMAT.encode()
_TEXT_START = re.compile(rb"\A\s*(?:# File: |\[nn\.Mod\] |\[annotate\] |[\w:.]+\().*(?:\n|\Z)")
_TEXT_MARKS = (b"  ->  ", b"[nn.Mod] ")
_MAX_LINE_CHARACTERS = 1 << 20
_DTYPES = {
    **{f"{kind}{bits}": f"{name}{bits}" for kind, name in (("i", "int"), ("u", "uint"))
       for bits in (8, 16, 32, 64)},
    **{f"f{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"c{bits}": f"complex{bits}" for bits in (32, 64, 128)},
    **{f"f8{form}": f"float8_{form}" for form in ("e5m2", "e4m3fn", "e5m2fnuz", "e4m3fnuz",
                                                 "e8m0fnu")},
    "b8": "bool",
    "bf16": "bfloat16",
}  # fmt: skip
_TENSOR = re.compile(
    rf"(?:dt|ft|t)(?:\$[0-9]+)?: (?P<dtype>{'|'.join(sorted(_DTYPES, key=len, reverse=True))})"
    r"\[(?P<shape>(?:[0-9]{1,20}(?:, ?[0-9]{1,20})*)?)\]"
)
_MARK_LINE = re.compile(r"\[(?P<header>[^\]]+)\] (?P<tag>.*)")
_CALL_LINE = re.compile(r"(?P<name><[^>]*>|[^(]+?)(?: \[(?:im|ex)plicit\] )?\((?P<rest>.*)")
_METHOD_NAME = re.compile(r"<(?:method|slot wrapper|attribute) '(?P<name>\w+)' of .*>")
_OUTPUT_SIGN, _LOG_SIGN = "  ->  ", "  # {"
_NUMBER = re.compile(r"-?(?:[0-9]{1,40}(?:\.[0-9]{0,40})?(?:e[-+]?[0-9]{1,4})?|inf|nan)")
_TOKEN = re.compile(
    rf"\s*({_NUMBER.pattern}|'[^'\\]*'|None|True|False|torch\.\w+|[(){{}}\[\],])(\s*:)?\s*"
)
"""Token of the text that Python prints for the hashes of a call; a key is followed by a colon."""
_OPENING, _CLOSING = "([{", ")]}"
_FRAME = re.compile(r'File "(?P<file>[^"\n]*)", line (?P<line>[0-9]{1,9}), in (?P<function>.*)')
_MODULE_HEADER = "nn.Mod"
_COLLECTIVE_SPACES = ("c10d::", "_c10d_functional::")
_NAMED_GROUP_SPACE = _COLLECTIVE_SPACES[1]
"""Namespace of operators whose last argument is the name of the group; other operators have the
group as an object.
"""
_UNKNOWN_GROUP = "unknown"
_LAST_TEXT = re.compile(r", '?([\w.]+)'?$")
_WAIT = "wait_tensor"


class _LoggedCall(NamedTuple):
    """One record of a log: a call, or the begin of a module."""

    depth: int
    module: str
    """Path of the module that begins; empty for a call."""
    name: str = ""
    arguments: str = ""
    results: str = ""
    hashes: Mapping[str, Any] = {}
    stack: str = ""
    is_backward: bool = False


def is_debug_log(start: bytes) -> bool:
    """Return whether a file with this beginning is a log of DebugMode."""
    if start.lstrip().startswith(b"{"):
        return _FORMAT_MARK in start
    marked = any(mark in start for mark in _TEXT_MARKS)
    return marked and _TEXT_START.match(start) is not None


def parse_debug_log(data: bytes) -> list[ForeignCall]:
    """Return the calls of a log; CorruptedError for another form or version."""
    return [call for call, _ in _name_calls(_parse_log(data))]


def parse_debug_stacks(data: bytes) -> Iterator[tuple[str, str, tuple[SourceLine, ...]]]:
    """Yield type and name of each call with its stack, outermost line first."""
    for call, logged in _name_calls(_parse_log(data)):
        texts = logged.stack.splitlines()
        found = [
            SourceLine(frame["file"], int(frame["line"]), frame["function"], _code_after(texts, at))
            for at, text in enumerate(texts)
            if (frame := _FRAME.search(text)) is not None
        ]
        yield call.op_type, call.op_name, select_own_lines(found)


def _code_after(texts: Sequence[str], at: int) -> str:
    code = texts[at + 1].strip() if at + 1 < len(texts) else ""
    return "" if code.startswith('File "') else code


def _parse_log(data: bytes) -> list[_LoggedCall]:
    text = data.decode("utf-8", "backslashreplace")
    try:
        return list(_parse_json(text) if text.lstrip().startswith("{") else _parse_text(text))
    except RecursionError:
        raise CorruptedError("not a log of DebugMode: its values are nested too deep") from None


def _parse_json(text: str) -> Iterator[_LoggedCall]:
    try:
        body: Any = json.loads(text)
    except ValueError as error:
        raise CorruptedError(f"not a whole JSON file: {error}") from None
    if body.get("format") != LOG_FORMAT:
        raise CorruptedError("not a log that DebugMode.save_logs wrote")
    if body.get("version") != LOG_VERSION:
        raise CorruptedError(
            f"a log of version {body.get('version')!r:.40}; version {LOG_VERSION} is read"
        )
    logs = body.get("logs")
    for number, record in enumerate(cast("list[Any]", logs) if isinstance(logs, list) else [None]):
        try:
            yield _parse_record(record)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CorruptedError(
                f"record {number} is not one of DebugMode: {error!r:.80}"
            ) from None


def _parse_record(record: Any) -> _LoggedCall:
    kind, depth = record["type"], record["call_depth"]
    if type(depth) is not int:
        raise TypeError(f"call_depth {depth!r:.40}")
    forward = record.get("fwd_stack_trace") or ""
    stack = forward or record.get("stack_trace") or ""
    results = str(record.get("output_str") or "").removeprefix(_OUTPUT_SIGN)
    if kind == "annotate":
        is_module = str(record["header"]) == _MODULE_HEADER
        return _LoggedCall(depth, str(record["tag"]) if is_module else "")
    if kind == "op":
        arguments = str(record["args_str"]) + str(record["kwargs_str"])
        hashes: dict[str, Any] = _decode_value(record["log"]) if record.get("log") else {}
        name = str(record["op_name"])
        return _LoggedCall(depth, "", name, arguments, results, hashes, str(stack), bool(forward))
    if kind == "triton_kernel":
        hashes = {
            key: _decode_value(record[field])
            for key, field in (("input_hash", "pre_hashes"), ("hash", "post_hashes"))
            if record.get(field)
        }
        # A kernel writes to its arguments, so they are its results too.
        given = str(record["kwargs_str"])
        return _LoggedCall(depth, "", str(record["kernel_name"]), given, given, hashes, str(stack))
    if kind == "redistribute":
        return _LoggedCall(depth, "", "redistribute_input", str(record["arg_str"]), results)
    return _LoggedCall(depth, "")


def _decode_value(value: Any) -> Any:
    """Return a value that `save_logs` wrote together with its type."""
    kind = value["type"]
    if kind in ("tuple", "list"):
        return [_decode_value(item) for item in value["items"]]
    if kind == "dict":
        return {str(key): _decode_value(item) for key, item in value["items"]}
    return float(value["value"]) if kind == "nonfinite_float" else value["value"]


def _parse_text(text: str) -> Iterator[_LoggedCall]:
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.strip()
        if not content or content.startswith(("# ", "-> output")):
            continue
        depth = (len(line) - len(line.lstrip())) // 2
        mark = _MARK_LINE.fullmatch(content)
        if mark is not None and mark["header"] != "triton":
            yield _LoggedCall(depth, mark["tag"] if mark["header"] == _MODULE_HEADER else "")
            continue
        found = _CALL_LINE.fullmatch(mark["tag"] if mark is not None else content)
        if found is None or len(content) > _MAX_LINE_CHARACTERS:
            raise CorruptedError(f"line {number} is not one of DebugMode: {content[:60]!r}")
        rest, sign, log = found["rest"].partition(_LOG_SIGN)
        arguments, _, results = rest.partition(_OUTPUT_SIGN)
        hashes: Mapping[str, Any] = _parse_hashes(log, number) if sign else {}
        yield _LoggedCall(depth, "", found["name"], arguments.removesuffix(")"), results, hashes)


def _parse_hashes(text: str, number: int) -> Mapping[str, Any]:
    """Return the numbers after each key of a dictionary that Python printed; `text` lacks the
    beginning.
    """
    found: dict[str, list[float | int]] = {}
    depth, key, at = 1, "", 0
    while depth:
        token = _TOKEN.match(text, at)
        if token is None:
            raise CorruptedError(
                f"line {number}: the hashes behind `#` are not those of DebugMode: {text[:60]!r}"
            )
        at = token.end()
        word = token[1]
        depth += (word in _OPENING) - (word in _CLOSING)
        if word.startswith("'") and depth == 1 and token[2]:
            key = word.strip("'")
        elif _NUMBER.fullmatch(word):
            value = int(word) if word.lstrip("-").isdecimal() else float(word)
            found.setdefault(key, []).append(value)
    return found


def _name_calls(logged: Sequence[_LoggedCall]) -> Iterator[tuple[ForeignCall, _LoggedCall]]:
    """Yield the calls with their names, which consist of the module that they are in
    and a number.
    """
    modules: list[tuple[int, str]] = []
    counts: Counter[tuple[str, str, bool]] = Counter()
    for each in logged:
        while modules and modules[-1][0] >= each.depth:
            modules.pop()
        if each.module:
            modules.append((each.depth, each.module))
        if not each.name:
            continue
        path = modules[-1][1] if modules else ""
        op_type = _name_operator(each.name)
        number = counts[path, op_type, each.is_backward]
        counts[path, op_type, each.is_backward] += 1
        root, *inner = path.split(".") if path else ("",)
        scope = "/".join(("Default", *((f"network-{root}",) if root else ()), *inner))
        op_name = f"{scope}/{op_type.replace('/', '_')}-op{number}"
        collective = each.name.startswith(_COLLECTIVE_SPACES) and _WAIT not in each.name
        call = ForeignCall(
            each.name,
            op_type,
            f"{GRADIENTS_PREFIX}{op_name}" if each.is_backward else op_name,
            (
                *_find_tensors(TensorSide.INPUT, each.arguments, each.hashes.get("input_hash")),
                *_find_tensors(TensorSide.OUTPUT, each.results, each.hashes.get("hash")),
            ),
            _find_group(each) if collective else "",
            collective,
        )
        yield call, each


def _find_group(call: _LoggedCall) -> str:
    named = call.name.startswith(_NAMED_GROUP_SPACE)
    found = _LAST_TEXT.search(call.arguments) if named else None
    return found[1] if found is not None else _UNKNOWN_GROUP


def _name_operator(name: str) -> str:
    """Return the type of an operator, such as `add` for `aten::add.Tensor` and for `torch.add`."""
    method = _METHOD_NAME.fullmatch(name)
    if method is not None:
        return method["name"]
    _, spaced, operator = name.partition("::")
    return operator.partition(".")[0] if spaced else name.rpartition(".")[2]


def _find_tensors(side: TensorSide, text: str, hashes: object) -> Iterator[ForeignTensor]:
    found = list(_TENSOR.finditer(text))
    leaves = list(_list_leaves(hashes))
    each = len(leaves) // len(found) if found and len(leaves) % len(found) == 0 else 0
    for at, tensor in enumerate(found):
        shape = parse_extents([int(part) for part in tensor["shape"].split(",") if part.strip()])
        if shape is None:
            raise CorruptedError(f"shape [{tensor['shape'][:40]}] of a tensor")
        own = leaves[at * each : (at + 1) * each]
        norms = [leaf for leaf in own if isinstance(leaf, float)]
        sums = [leaf for leaf in own if isinstance(leaf, int)]
        yield ForeignTensor(
            side,
            at,
            "",
            _DTYPES[tensor["dtype"]],
            shape,
            {L1NORM_ITEM: norms[0]} if norms else {},
            f"{XOR_KIND}{sums[0]}" if sums else "",
        )


def _list_leaves(value: object) -> Iterator[float | int]:
    """Yield the numbers among the hashes of the tensors on one side."""
    if isinstance(value, dict):
        value = list(cast("dict[str, object]", value).values())
    if isinstance(value, (list, tuple)):
        for part in cast("list[object]", value):
            yield from _list_leaves(part)
    elif value == "nan":
        yield math.nan
    elif isinstance(value, (float, int)) and not isinstance(value, bool):
        yield value
