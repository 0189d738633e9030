"""The stack file of a dump of APIs to its calls and the source lines they came from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from rankdump.contract.errors import DamagedError
from rankdump.contract.layout.api_name import ApiCall, call_of
from rankdump.contract.layout.api_stacks import op_name_of, source_line
from rankdump.reader.ir import Frame, IrOperator


def calls(path: Path) -> Iterator[IrOperator]:
    """Yield the calls of a stack file in their order; DamagedError when it is none."""
    try:
        body: object = json.loads(path.read_bytes())
    except OSError as error:
        raise DamagedError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path}: no stack file: {error}") from None
    if not isinstance(body, dict):
        raise DamagedError(f"{path}: no stack file: it holds no object")
    for key, lines in cast("dict[str, object]", body).items():
        op_name = op_name_of(key)
        if op_name:
            call = call_of(op_name)
            yield IrOperator(call.op_type if call else op_name, op_name, _frames(lines))


def backward_of(op_name: str) -> str:
    """Return the name of the backward of a call; empty for what is no forward call of an API."""
    call = call_of(op_name)
    if call is None or call.direction != "forward":
        return ""
    return ApiCall(call.kind, call.api, call.number, "backward").name


def _frames(lines: object) -> tuple[Frame, ...]:
    """Return the places of a stack, outermost first; what says no place is passed over."""
    texts = cast("list[Any]", lines) if isinstance(lines, list) else []
    found = [source_line(text) for text in reversed(texts) if isinstance(text, str)]
    return tuple(Frame(at.file, at.line, at.line, at.code) for at in found if at is not None)
