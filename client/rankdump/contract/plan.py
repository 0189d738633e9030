"""What to dump, from where, and to where: the one model every configuration dialect parses into.

Frozen values and their JSON form; decisions on them are in `contract.selection`. Pure.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from rankdump.contract.errors import ProtocolError

OnFull = Literal["block", "drop", "statistic"]
Durability = Literal["written", "synced"]

PLAN_VERSION = 1
NET_NAME = re.compile(r"[A-Za-z0-9_-]+")
"""What may name a network: it is a folder of the tree."""


@dataclass(frozen=True, slots=True)
class Iterations:
    """Which iterations; `spans` are inclusive pairs, None means every one."""

    text: str = "all"
    spans: tuple[tuple[int, int], ...] | None = None

    def __contains__(self, iteration: int) -> bool:
        return self.spans is None or any(low <= iteration <= high for low, high in self.spans)


@dataclass(frozen=True, slots=True)
class Operators:
    """Which operators; with `everything` the lists do not matter."""

    everything: bool = True
    names: tuple[str, ...] = ()
    """Full scope names, exact."""
    types: tuple[str, ...] = ()
    """Substrings of the operator's type, case-insensitive."""
    patterns: tuple[str, ...] = ()
    """Regular expressions that match a whole scope name."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which tensors."""

    iterations: Iterations = Iterations()
    devices: tuple[int, ...] | None = None
    """Local device ids; None means every one."""
    operators: Operators = Operators()
    inputs: bool = True
    outputs: bool = True


@dataclass(frozen=True, slots=True)
class Output:
    """Where the tree stands and what it looks like."""

    root: str
    """Absolute folder that holds the rank folders."""
    net_name: str = "Net"
    layout: str = "mindspore-sync"
    codec: str = "zstd"
    file_mode: int = 0o440
    folder_mode: int = 0o750


@dataclass(frozen=True, slots=True)
class Delivery:
    """What happens between the rank and the tree."""

    on_full: OnFull = "block"
    """What a rank does with a tensor when its buffer is full."""
    block_timeout_s: float = 30.0
    """Longest time `block` waits without the agent making progress."""
    buffer_bytes: int = 256 << 20
    """Tensor bytes a rank holds before the agent has taken them."""
    durability: Durability = "written"
    """When a record counts as safe: `written` survives any process, `synced` a power loss."""
    strict: bool = False
    """Raise into the training script instead of counting a loss."""


@dataclass(frozen=True, slots=True)
class DumpPlan:
    """Everything a configuration says, resolved."""

    output: Output
    selection: Selection = Selection()
    delivery: Delivery = Delivery()
    dialect: str = "plan"
    """Which dialect it was written in; `mindspore` for a data_dump.json."""

    def to_json(self) -> bytes:
        """Return the plan as it travels to the agent."""
        body = {"version": PLAN_VERSION, **dataclasses.asdict(self)}
        return json.dumps(body, separators=(",", ":")).encode()

    @staticmethod
    def from_json(data: bytes) -> DumpPlan:
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
    selection = body["selection"]
    iterations = selection["iterations"]
    spans = iterations["spans"]
    operators = selection["operators"]
    devices = selection["devices"]
    lists = {name: tuple(map(str, operators[name])) for name in ("names", "types", "patterns")}
    for pattern in lists["patterns"]:
        re.compile(pattern)
    return DumpPlan(
        output=_output(body["output"]),
        selection=Selection(
            iterations=Iterations(
                str(iterations["text"]),
                None if spans is None else tuple((int(low), int(high)) for low, high in spans),
            ),
            devices=None if devices is None else tuple(map(int, devices)),
            operators=Operators(everything=bool(operators["everything"]), **lists),
            inputs=bool(selection["inputs"]),
            outputs=bool(selection["outputs"]),
        ),
        delivery=_delivery(body["delivery"]),
        dialect=str(body["dialect"]),
    )


def _output(body: dict[str, Any]) -> Output:
    # The agent makes paths of these: a rank may not talk it out of its tree.
    texts = [body[name] for name in ("root", "net_name", "layout", "codec")]
    modes = [body[name] for name in ("file_mode", "folder_mode")]
    if not all(isinstance(text, str) and "\0" not in text for text in texts):
        raise ValueError(f"output with {texts!r}")
    if not all(type(mode) is int and 0 <= mode <= 0o777 for mode in modes):
        raise ValueError(f"output with modes {modes!r}")
    if not body["root"].startswith("/") or not NET_NAME.fullmatch(body["net_name"]):
        raise ValueError(f"output with root {body['root']!r}, net_name {body['net_name']!r}")
    return Output(**body)


def _delivery(body: dict[str, Any]) -> Delivery:
    if body["on_full"] not in get_args(OnFull) or body["durability"] not in get_args(Durability):
        raise ValueError(f"delivery {body['on_full']!r}, {body['durability']!r}")
    return Delivery(
        on_full=body["on_full"],
        block_timeout_s=float(body["block_timeout_s"]),
        buffer_bytes=int(body["buffer_bytes"]),
        durability=body["durability"],
        strict=bool(body["strict"]),
    )
