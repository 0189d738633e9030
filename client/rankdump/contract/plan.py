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
from rankdump.contract.statistics import DEFAULT_ITEMS, ITEMS

OnFull = Literal["block", "drop", "statistic"]
Durability = Literal["written", "synced"]
SavedData = Literal["tensor", "statistic", "full"]
Trigger = Literal["always", "overflow", "exception"]
Precision = Literal["high", "low"]

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
    marked: bool = False
    """Those that the script marked with `set_dump`; the lists do not matter then."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which tensors."""

    iterations: Iterations = Iterations()
    devices: tuple[int, ...] | None = None
    """Local device ids; None means every one."""
    operators: Operators = Operators()
    inputs: bool = True
    outputs: bool = True
    initial_iteration: int = 0
    """Number of the job's first iteration."""
    trigger: Trigger = "always"
    """`overflow`: operators that wrote something not finite; `exception`: the one that raised."""
    overflow_limit: int = 0
    """After how many operators with an overflow a rank stops; 0 is never."""


@dataclass(frozen=True, slots=True)
class Content:
    """What is kept of a selected tensor."""

    saved: SavedData = "tensor"
    """Its elements, figures about them, or both."""
    statistics: tuple[str, ...] = DEFAULT_ITEMS
    """Which figures, by the names of `contract.statistics`, in the order of their columns."""
    on_device: bool = False
    """Figures of a tensor on an accelerator are computed there, and read back once a step."""
    precision: Precision = "high"
    """`high` accumulates on the device in float32 at least, `low` in the tensor's own type."""
    sample_elements: int = 0
    """A larger tensor is cut to that many first elements; 0 keeps all."""
    kernel_arguments: bool = False
    """Whether an operator's arguments are written beside its tensors."""

    @property
    def tabulated(self) -> bool:
        """Whether figures are written."""
        return self.saved != "tensor"


@dataclass(frozen=True, slots=True)
class Output:
    """Where the tree stands and what it looks like."""

    root: str
    """Absolute folder that holds the rank folders."""
    net_name: str = "Net"
    layout: str = "mindspore-sync"
    profile: str = "ms2.3"
    """Which release's names and tables the layout follows: a name of `contract.layout.profile`."""
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
    shared_memory: bool = True
    """Whether tensors go through the agent's shared memory where it offers some."""


@dataclass(frozen=True, slots=True)
class DumpPlan:
    """Everything a configuration says, resolved."""

    output: Output
    selection: Selection = Selection()
    content: Content = Content()
    delivery: Delivery = Delivery()
    dialect: str = "plan"
    """Which dialect it was written in; `mindspore` for a data_dump.json."""
    warnings: tuple[str, ...] = ()
    """What in the configuration will surprise its author, one sentence each."""

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
    return DumpPlan(
        output=_output(body["output"]),
        selection=_selection(body["selection"]),
        content=_content(body["content"]),
        delivery=_delivery(body["delivery"]),
        dialect=str(body["dialect"]),
        warnings=_texts(body["warnings"]),
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
    )


def _operators(body: dict[str, Any]) -> Operators:
    lists = {name: _texts(body[name]) for name in ("names", "types", "patterns")}
    for pattern in lists["patterns"]:
        re.compile(pattern)
    return Operators(everything=bool(body["everything"]), marked=bool(body["marked"]), **lists)


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
    )


def _output(body: dict[str, Any]) -> Output:
    # The agent makes paths of these: a rank may not talk it out of its tree.
    texts = [body[name] for name in ("root", "net_name", "layout", "profile", "codec")]
    modes = [body[name] for name in ("file_mode", "folder_mode")]
    if not all(isinstance(text, str) and "\0" not in text for text in texts):
        raise ValueError(f"output with {texts!r}")
    if not all(type(mode) is int and 0 <= mode <= 0o777 for mode in modes):
        raise ValueError(f"output with modes {modes!r}")
    if not body["root"].startswith("/") or not NET_NAME.fullmatch(body["net_name"]):
        raise ValueError(f"output with root {body['root']!r}, net_name {body['net_name']!r}")
    return Output(**body)


def _delivery(body: dict[str, Any]) -> Delivery:
    return Delivery(
        on_full=_one_of(OnFull, body["on_full"]),
        block_timeout_s=float(body["block_timeout_s"]),
        buffer_bytes=int(body["buffer_bytes"]),
        durability=_one_of(Durability, body["durability"]),
        strict=bool(body["strict"]),
        shared_memory=bool(body["shared_memory"]),
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
