"""What to dump, from where, and to where: the one model every configuration dialect parses into.

Frozen values; their JSON form is in `contract.plan_json`, decisions on them in
`contract.selection`. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from rankdump.contract.statistics import DEFAULT_ITEMS

OnFull = Literal["block", "drop", "statistic"]
Durability = Literal["written", "synced"]
SavedData = Literal["tensor", "statistic", "full"]
Trigger = Literal["always", "overflow", "exception"]
Precision = Literal["high", "low"]
FileFormat = Literal["npy", "bin"]
Tables = Literal["folder", "operator"]

MAX_PATTERN = 1000
MAX_PATTERNS = 1000
"""Of one list, and characters of each: every one is tried on every name."""
NET_NAME = re.compile(r"[A-Za-z0-9_-]{1,255}")
"""What may name a network: it is a folder of the tree."""
STARTED = re.compile(r"[0-9]{14}")
UNNAMED = "Net"
"""What a model without a name is called."""


@dataclass(frozen=True, slots=True)
class Iterations:
    """Which iterations; `spans` are inclusive pairs, None means every one."""

    text: str = "all"
    spans: tuple[tuple[int, int], ...] | None = None

    def __contains__(self, iteration: int) -> bool:
        return self.spans is None or any(low <= iteration <= high for low, high in self.spans)


@dataclass(frozen=True, slots=True)
class Excluded:
    """Tensors that are left out although their operator is selected."""

    name: str
    """Of an operator, or of a type of operators. What belongs to an operator goes with it."""
    positions: tuple[str, ...] = ()
    """`input0`, `output1`; empty stands for every tensor. Those of a gradient are its own."""


@dataclass(frozen=True, slots=True)
class Watched:
    """Operators whose outputs are read, and again each time that another one has run."""

    layers: tuple[str, ...]
    """Operators after which it is done, by full scope name or as `Operators.spelt` says; none for
    every other operator."""
    nodes: tuple[str, ...]
    """Operators whose outputs are read then, of the same model."""


@dataclass(frozen=True, slots=True)
class Operators:
    """Which operators; with `everything` the lists of names do not matter."""

    everything: bool = True
    names: tuple[str, ...] = ()
    """Full scope names, exact."""
    types: tuple[str, ...] = ()
    """Substrings of the operator's type, case-insensitive."""
    patterns: tuple[str, ...] = ()
    """Regular expressions that match a whole scope name."""
    marked: bool = False
    """Those that the script marked with `set_dump`; the lists do not matter then."""
    ranges: tuple[tuple[str, str], ...] = ()
    """First and last of a stretch of the program, spelt in any way: they add to the lists."""
    without_types: tuple[Excluded, ...] = ()
    """Left out of what the lists select, by type of operator."""
    without_names: tuple[Excluded, ...] = ()
    """Left out of what the lists select, by name, spelt in any way."""
    spelt: bool = False
    """Names may be spelt in any way: as files spell them, and as scope or path of the module."""

    @property
    def excludes(self) -> bool:
        """Whether anything is left out of what the lists select."""
        return bool(self.without_types or self.without_names)


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
    models: tuple[tuple[str, Operators], ...] = ()
    """Operators of models by the name of the model's folder, in the place of `operators`."""
    watched: Watched | None = None
    """With this set, nothing but outputs that are read again is kept."""

    def operators_of(self, model: str) -> Operators:
        """Return which operators of a model are selected."""
        return next((operators for name, operators in self.models if name == model), self.operators)

    @property
    def lists(self) -> tuple[Operators, ...]:
        """All that is said of operators, for whichever model."""
        return (self.operators, *(operators for _, operators in self.models))


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
    tables: Tables = "folder"
    """Figures stand in one `statistic.csv` of a folder, or in a table of each operator."""

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
    """Name of every model; empty where each has its own."""
    layout: str = "mindspore-sync"
    """Which tree it is: a name of `contract.layout.LAYOUTS`."""
    profile: str = "ms2.3"
    """Which release's names and tables the layout follows: a name of `contract.layout.profile`."""
    codec: str = "zstd"
    file_mode: int = 0o440
    folder_mode: int = 0o750
    file_format: FileFormat = "npy"
    """A tensor a file, or `bin`: CANN's, an operator a file."""
    started: str = ""
    """`YYYYmmddHHMMSS`, local time, for layouts with a folder of that name; a session sets it."""


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
    embedded: bool = True
    """Whether a job without any agent brings one along."""


@dataclass(frozen=True, slots=True)
class DumpPlan:
    """Everything a configuration says, resolved."""

    output: Output
    selection: Selection = Selection()
    content: Content = Content()
    delivery: Delivery = Delivery()
    dialect: str = "plan"
    """Which dialect it was written in: `mindspore` for a data_dump.json, `acl`, `tf`."""
    warnings: tuple[str, ...] = ()
    """What in the configuration will surprise its author, one sentence each."""
    enabled: bool = True
    """Without it the configuration asks for no dump at all: a session is off."""
