"""The stack file of an api dump: how its keys and lines are spelt, both ways. Pure.

One JSON object with an indent of 4: for each call the lines of its stack, innermost first.

    torch.nn.Conv2d(0) forward       torch.nn.functional.relu(3) forward
    torch.Tensor.permute(0) forward  torch.matmul(0) forward
    LAYER: blocks.0.conv forward     NN_Conv2d_0_forward_stack_info

Source: api-dump.md A.4 and 0. The last form is that of MindSpore, of releases up to 1.0.15, and of
calls that are none of torch's. The real tool spells most modules of a LAYER wrongly; here they have
their path, if it came with dots.
"""

from __future__ import annotations

import json
import re

from rankdump.contract.graph import SourceLine
from rankdump.contract.layout.api_name import LAYER, ApiCall, call_of

_OPENS = {
    "Functional": "torch.nn.functional.",
    "NN": "torch.nn.",
    "Tensor": "torch.Tensor.",
    "Torch": "torch.",
}
"""What a key of torch begins with, by kind; longer ones stand first."""
_PLAIN = "_stack_info"
_MODULE = re.compile(rf"{LAYER}: (?P<path>.+) (?P<direction>forward|backward)", re.S)
_CALL = re.compile(r"(?P<api>.+)\((?P<number>[0-9]{1,18})\) (?P<direction>forward|backward)", re.S)
_LINE = re.compile(
    r"File (?P<file>.*), line (?P<line>[0-9]{1,9}), in (?P<function>.*?), \n ?", re.S
)
_MOST_CHARACTERS = 1 << 14
"""Of a line; in a longer one it could take seconds to find what says its place."""
_text = json.encoder.encode_basestring_ascii
_INDENT = " " * 4


def key_of(framework: str, op_name: str) -> str:
    """Return the key of a call by its name, `NN_Conv2d_0_forward`.

    A module's may be `LAYER_blocks.0.conv_forward`, where its path is known.
    """
    call = call_of(op_name) if framework == "torch" else None
    if call is not None and call.kind == LAYER:
        return f"{LAYER}: {call.api} {call.direction}"
    if call is None or call.kind not in _OPENS:
        return f"{op_name}{_PLAIN}"
    return f"{_OPENS[call.kind]}{call.api}({call.number}) {call.direction}"


def op_name_of(key: str) -> str:
    """Return the name of the call that a key means, as its tensors have it; empty if it is none."""
    if key.endswith(_PLAIN):
        return key.removesuffix(_PLAIN)
    module = _MODULE.fullmatch(key)
    if module is not None:
        return f"{LAYER}_{module['path'].replace('.', '_')}_{module['direction']}"
    for kind, opens in _OPENS.items():
        found = _CALL.fullmatch(key.removeprefix(opens)) if key.startswith(opens) else None
        if found is not None:
            number, backward = int(found["number"]), found["direction"] == "backward"
            return ApiCall(kind, found["api"], number, "backward" if backward else "forward").name
    return ""


def is_module(key: str) -> bool:
    """Return whether a key is a module's, which comes again whenever the module is called."""
    return key.startswith((f"{LAYER}: ", f"{LAYER}_"))


def entry(key: str, lines: tuple[str, ...]) -> str:
    """Return an entry of the file, without the comma behind it."""
    if not lines:
        return f"{_INDENT}{_text(key)}: []"
    body = ",\n".join(f"{_INDENT}{_INDENT}{_text(line)}" for line in lines)
    return f"{_INDENT}{_text(key)}: [\n{body}\n{_INDENT}]"


def key_in(line: str) -> str:
    """Return the key of the entry that begins in a line of the file; empty when none does."""
    if not line.startswith(f'{_INDENT}"') or not line.endswith((": [", ": []", ": [],")):
        return ""
    try:
        key: object = json.loads(line.rpartition(": [")[0])
    except ValueError:
        return ""
    return key if isinstance(key, str) else ""


def source_line(text: str) -> SourceLine | None:
    """Return the place that a line of a stack says; None when it says none."""
    found = _LINE.match(text) if len(text) <= _MOST_CHARACTERS else None
    if found is None:
        return None
    return SourceLine(found["file"], int(found["line"]), found["function"], text[found.end() :])
