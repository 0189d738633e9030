"""A plan as it travels to the agent and stands in its ledger, and back. Pure."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any, get_args

from rankdump.contract.errors import ProtocolError
from rankdump.contract.plan import (
    MAX_PATTERN,
    MAX_PATTERNS,
    NET_NAME,
    STARTED,
    Content,
    Delivery,
    DumpPlan,
    Durability,
    Excluded,
    FileFormat,
    Iterations,
    OnFull,
    Operators,
    Output,
    Precision,
    SavedData,
    Selection,
    Tables,
    Trigger,
    Watched,
)
from rankdump.contract.statistics import ITEMS

PLAN_VERSION = 1
MAX_ROOT = 4096


def plan_to_json(plan: DumpPlan) -> bytes:
    """Return the plan as it travels to the agent."""
    body = {"version": PLAN_VERSION, **dataclasses.asdict(plan)}
    return json.dumps(body, separators=(",", ":")).encode()


def plan_from_json(data: bytes) -> DumpPlan:
    """Read the travelling form back; ProtocolError when it is anything else."""
    try:
        body: dict[str, Any] = json.loads(data)
        if body.pop("version") != PLAN_VERSION:
            raise ValueError("another version")
        return _plan(body)
    except _UNREADABLE as error:
        raise ProtocolError(f"plan cannot be read: {error}") from None


_UNREADABLE = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    RecursionError,
    OverflowError,
    re.error,
)


def _plan(body: dict[str, Any]) -> DumpPlan:
    return DumpPlan(
        output=_output(body["output"]),
        selection=_selection(body["selection"]),
        content=_content(body["content"]),
        delivery=_delivery(body["delivery"]),
        dialect=str(body["dialect"]),
        warnings=_texts(body["warnings"]),
        enabled=bool(body["enabled"]),
    )


def _selection(body: dict[str, Any]) -> Selection:
    spans, devices = body["iterations"]["spans"], body["devices"]
    return Selection(
        iterations=Iterations(
            str(body["iterations"]["text"]),
            None if spans is None else tuple((int(low), int(high)) for low, high in spans),
        ),
        devices=None if devices is None else tuple(map(int, devices)),
        operators=_operators(body["operators"]),
        inputs=bool(body["inputs"]),
        outputs=bool(body["outputs"]),
        initial_iteration=_count(body["initial_iteration"]),
        trigger=_one_of(Trigger, body["trigger"]),
        overflow_limit=_count(body["overflow_limit"]),
        models=tuple((str(name), _operators(each)) for name, each in body["models"]),
        watched=None if body["watched"] is None else _watched(body["watched"]),
    )


def _operators(body: dict[str, Any]) -> Operators:
    lists = {name: _texts(body[name]) for name in ("names", "types", "patterns")}
    if len(lists["patterns"]) > MAX_PATTERNS:
        raise ValueError(f"{len(lists['patterns'])} patterns, at most {MAX_PATTERNS}")
    for pattern in lists["patterns"]:
        # Before it is compiled: that alone can take a while.
        if len(pattern) > MAX_PATTERN:
            raise ValueError(f"pattern of {len(pattern)} characters, at most {MAX_PATTERN}")
        re.compile(pattern)
    return Operators(
        everything=bool(body["everything"]),
        marked=bool(body["marked"]),
        spelt=bool(body["spelt"]),
        ranges=tuple((str(first), str(last)) for first, last in body["ranges"]),
        without_types=tuple(map(_excluded, body["without_types"])),
        without_names=tuple(map(_excluded, body["without_names"])),
        **lists,
    )


def _excluded(body: dict[str, Any]) -> Excluded:
    return Excluded(str(body["name"]), _texts(body["positions"]))


def _watched(body: dict[str, Any]) -> Watched:
    return Watched(_texts(body["layers"]), _texts(body["nodes"]))


def _content(body: dict[str, Any]) -> Content:
    items = _texts(body["statistics"])
    if not all(item in ITEMS for item in items):
        raise ValueError(f"statistics {items!r}")
    return Content(
        saved=_one_of(SavedData, body["saved"]),
        statistics=items,
        on_device=bool(body["on_device"]),
        precision=_one_of(Precision, body["precision"]),
        sample_elements=_count(body["sample_elements"]),
        kernel_arguments=bool(body["kernel_arguments"]),
        tables=_one_of(Tables, body["tables"]),
    )


def _output(body: dict[str, Any]) -> Output:
    # The agent makes paths of these: a rank may not talk it out of its tree.
    texts = [body[name] for name in ("root", "net_name", "layout", "profile", "codec", "started")]
    modes = [body[name] for name in ("file_mode", "folder_mode")]
    if not all(isinstance(text, str) and "\0" not in text for text in texts):
        raise ValueError(f"output with {texts!r}")
    if not all(type(mode) is int and 0 <= mode <= 0o777 for mode in modes):
        raise ValueError(f"output with modes {modes!r}")
    if len(body["root"]) > MAX_ROOT:
        raise ValueError(f"output with a root of {len(body['root'])} characters")
    if not body["root"].startswith("/"):
        raise ValueError(f"output with root {body['root']!r}")
    if body["net_name"] and not NET_NAME.fullmatch(body["net_name"]):
        raise ValueError(f"output with net_name {body['net_name'][:300]!r}")
    if body["started"] and not STARTED.fullmatch(body["started"]):
        raise ValueError(f"output started at {body['started']!r}")
    _one_of(FileFormat, body["file_format"])
    return Output(**body)


def _delivery(body: dict[str, Any]) -> Delivery:
    return Delivery(
        on_full=_one_of(OnFull, body["on_full"]),
        block_timeout_s=float(body["block_timeout_s"]),
        buffer_bytes=int(body["buffer_bytes"]),
        durability=_one_of(Durability, body["durability"]),
        strict=bool(body["strict"]),
        shared_memory=bool(body["shared_memory"]),
        # Older clients do not say it, and no agent needs it.
        embedded=bool(body.get("embedded", True)),
    )


def _one_of(words: Any, word: Any) -> Any:
    if word not in get_args(words):
        raise ValueError(f"{word!r} is none of {', '.join(get_args(words))}")
    return word


def _texts(items: Any) -> tuple[str, ...]:
    return tuple(map(str, items))


def _count(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 1 << 63:
        raise ValueError(f"count {number!r}")
    return number
