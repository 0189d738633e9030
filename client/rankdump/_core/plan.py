"""Dump plan: what to dump, from where, to where, and what the black box watches. It is the one
model that every configuration dialect is parsed into, with its JSON form, which is sent to the
agent and stored in the ledger. Pure: no clock, no disk, no network; decisions on a plan are in
`_core.selection`, those on watch rules in `_recorder.pulse_decisions`.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from rankdump._core.json_values import make_plain, read_json
from rankdump._core.statistics import DEFAULT_STATISTICS, STATISTIC_TITLES
from rankdump.errors import ProtocolError

WatchCondition = Literal["non_finite", "jump", "zero", "unchanged", "too_large"]
WatchAction = Literal["note", "freeze", "dump"]
WATCH_CONDITIONS: tuple[WatchCondition, ...] = get_args(WatchCondition)
WATCH_ACTIONS: tuple[WatchAction, ...] = get_args(WatchAction)
MAX_RULES = 100
MAX_RULE_PATTERNS = 100
MAX_GLOB_CHARACTERS = 1000
MAX_RULE_STEPS = 4096
MIN_UNCHANGED_STEPS = 2


@dataclass(frozen=True, slots=True)
class WatchRule:
    """A rule of `rankdump.blackbox.watch`."""

    when: WatchCondition
    operators: tuple[str, ...] = ()
    """Globs over the type of an operator or its whole name, spelt in any way; these operators are
    measured in every step. Without any, the rule holds for every tensor in the steps in which it
    is measured."""
    value: float = 0.0
    """Of `too_large`: largest magnitude that is allowed."""
    steps: int = 1
    """Steps in a row in which the condition must be met, of those in which a tensor is measured;
    for `unchanged` the steps with one and the same pulse, two at least."""
    do: WatchAction = "note"
    iterations: int = 1
    """Of `dump`: iterations after the one in which the rule matches, of which tensors are kept."""


def describe_rule(rule: WatchRule, number: int) -> str:
    """Return the name of a rule: its place in the configuration and its condition."""
    return f"rankdump.blackbox.watch[{number}] ({rule.when})"


def check_rules(rules: tuple[WatchRule, ...]) -> None:
    """Raise ValueError for rules that no configuration has."""
    if len(rules) > MAX_RULES:
        raise ValueError(f"{len(rules)} watch rules, at most {MAX_RULES}")
    for rule in rules:
        if len(rule.operators) > MAX_RULE_PATTERNS or any(
            len(glob) > MAX_GLOB_CHARACTERS for glob in rule.operators
        ):
            raise ValueError("a watch rule has too many patterns of operators, or too long ones")
        if not math.isfinite(rule.value) or not 1 <= rule.steps <= MAX_RULE_STEPS:
            raise ValueError(f"a watch rule has the value {rule.value!r} and {rule.steps!r} steps")
        if not 1 <= rule.iterations <= MAX_RULE_STEPS:
            raise ValueError(f"a watch rule dumps {rule.iterations!r} iterations")


FullBufferPolicy = Literal["block", "drop", "statistic"]
DurabilityLevel = Literal["written", "synced"]
SavedDataMode = Literal["tensor", "statistic", "full"]
TriggerMode = Literal["always", "overflow", "exception"]
StatisticPrecision = Literal["high", "low"]
TensorFileFormat = Literal["npy", "bin"]
TableForm = Literal["folder", "operator"]

MAX_PATTERN_CHARACTERS = 1000
MAX_PATTERNS = 1000
"""Patterns of one list, and characters of each: every pattern is tried on every name."""
NET_NAME_PATTERN = re.compile(r"[A-Za-z0-9_-]{1,255}")
"""Names of networks, which are folders of the tree."""
STARTED_PATTERN = re.compile(r"[0-9]{14}")
UNNAMED_MODEL = "Net"
"""Name of a model without one."""


@dataclass(frozen=True, slots=True)
class IterationSelection:
    """Which iterations; `spans` are inclusive pairs, None means every one."""

    text: str = "all"
    spans: tuple[tuple[int, int], ...] | None = None

    def __contains__(self, iteration: int) -> bool:
        return self.spans is None or any(low <= iteration <= high for low, high in self.spans)


@dataclass(frozen=True, slots=True)
class TensorExclusion:
    """Tensors that are left out although their operator is selected."""

    name: str
    """Of an operator, with what belongs to it, or of a type of operators."""
    positions: tuple[str, ...] = ()
    """`input0`, `output1`; empty means every tensor. A gradient has positions of its own."""


@dataclass(frozen=True, slots=True)
class WatchedOperators:
    """Operators whose outputs are read again each time that another one has run."""

    layers: tuple[str, ...]
    """Operators after which outputs are read, by full scope name or in a form of `spelt`; empty
    means every other operator."""
    nodes: tuple[str, ...]
    """Operators whose outputs are read then, of the same model."""


@dataclass(frozen=True, slots=True)
class OperatorSelection:
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
    """First and last operator of a range of the program, spelt in any way; adds to the lists."""
    without_types: tuple[TensorExclusion, ...] = ()
    """Left out of what the lists select, by type of operator."""
    without_names: tuple[TensorExclusion, ...] = ()
    """Left out of what the lists select, by name, spelt in any way."""
    spelt: bool = False
    """Names may be spelt in any way: as files spell them, and as scope or path of the module."""

    @property
    def has_exclusions(self) -> bool:
        """Whether anything is left out of what the lists select."""
        return bool(self.without_types or self.without_names)


@dataclass(frozen=True, slots=True)
class TensorSelection:
    """Which tensors."""

    iterations: IterationSelection = IterationSelection()
    devices: tuple[int, ...] | None = None
    """Local device ids; None means every one."""
    operators: OperatorSelection = OperatorSelection()
    inputs: bool = True
    outputs: bool = True
    initial_iteration: int = 0
    """Number of the job's first iteration."""
    trigger: TriggerMode = "always"
    """`overflow`: operators that wrote something not finite; `exception`: the one that raised."""
    overflow_limit: int = 0
    """After how many operators with an overflow a rank stops; 0 is never."""
    models: tuple[tuple[str, OperatorSelection], ...] = ()
    """Operators of models by the name of the model's folder, in the place of `operators`."""
    watched: WatchedOperators | None = None
    """With this set, nothing but outputs that are read again is kept."""
    optimizer_states: bool = False
    """Find the optimizers that step; otherwise the script names those whose states are read."""

    def get_operators(self, model: str) -> OperatorSelection:
        """Return which operators of a model are selected."""
        return next((operators for name, operators in self.models if name == model), self.operators)

    @property
    def operator_lists(self) -> tuple[OperatorSelection, ...]:
        """All selections of operators, for every model."""
        return (self.operators, *(operators for _, operators in self.models))


@dataclass(frozen=True, slots=True)
class ContentSettings:
    """Form in which a selected tensor is kept."""

    saved: SavedDataMode = "tensor"
    """Its elements, statistics about them, or both."""
    statistics: tuple[str, ...] = DEFAULT_STATISTICS
    """Which statistics, by the names of `_core.statistics`, in the order of their columns."""
    on_device: bool = False
    """Compute statistics of a tensor on its accelerator, and read them back once a step."""
    precision: StatisticPrecision = "high"
    """`high` accumulates on the device in float32 at least, `low` in the tensor's own type."""
    sample_elements: int = 0
    """A larger tensor is cut to that many first elements; 0 keeps all."""
    kernel_arguments: bool = False
    """Whether an operator's arguments are written beside its tensors."""
    tables: TableForm = "folder"
    """Statistics are in one `statistic.csv` of a folder, or in a table of each operator."""
    fingerprints: bool = False
    """Whether the fingerprint of each tensor is recorded beside the manifest."""
    run_card: bool = True
    """Whether the run card of each iteration is recorded in the manifest."""
    baseline: str = ""
    """Absolute folder of an earlier tree, whose tensors are not stored again; empty for none."""

    @property
    def has_tables(self) -> bool:
        """Whether statistics are written."""
        return self.saved != "tensor"


@dataclass(frozen=True, slots=True)
class OutputSettings:
    """Place and form of the tree."""

    root: str
    """Absolute folder that holds the rank folders."""
    net_name: str = "Net"
    """Name of every model; empty where each has its own."""
    layout: str = "mindspore-sync"
    """Form of the tree: a name of `LAYOUTS`."""
    profile: str = "ms2.3"
    """Release whose names and tables the layout follows: a name of `PROFILES`."""
    codec: str = "zstd"
    file_mode: int = 0o440
    folder_mode: int = 0o750
    file_format: TensorFileFormat = "npy"
    """`npy`: a file for each tensor; `bin`: CANN's format, a file for each operator."""
    started: str = ""
    """`YYYYmmddHHMMSS`, local time, for layouts with a folder of that name; a session sets it."""


@dataclass(frozen=True, slots=True)
class DeliverySettings:
    """Delivery from the rank to the tree."""

    on_full: FullBufferPolicy = "block"
    """Action of a rank for a tensor when its buffer is full."""
    block_timeout_s: float = 30.0
    """Longest time `block` waits without the agent making progress."""
    buffer_bytes: int = 256 << 20
    """Tensor bytes that a rank holds until the agent has received them."""
    durability: DurabilityLevel = "written"
    """When a record counts as safe: `written` survives any process, `synced` a power loss."""
    strict: bool = False
    """Raise into the training script instead of counting a loss."""
    shared_memory: bool = True
    """Whether tensors go through the agent's shared memory where it offers some."""
    embedded: bool = True
    """Whether a job without an agent starts one of its own."""
    max_step_overhead: float = 0.0
    """Most time that dumping may take of the training thread, as a share of the time of a step
    without it; 0 for no limit."""


MAX_RING_STEPS = 4096
MAX_TENSOR_BYTES = 1 << 30
"""Most bytes of full tensors that the black box of a rank may have."""


@dataclass(frozen=True, slots=True)
class BlackBoxSettings:
    """What a plan says about the black box; without steps there is none."""

    steps: int = 0
    """Steps of each rank that are kept."""
    post_steps: int = 2
    """Steps after the one that the ring was frozen for."""
    max_overhead: float = 0.01
    """Most time that it may take, as a share of a step."""
    max_bytes: int = 1 << 30
    """Most bytes of frozen trees beside one tree."""
    pause_s: float = 300.0
    """Shortest time between two freezes of a job."""
    watch: tuple[WatchRule, ...] = ()
    """Rules for tensors that a rank measures."""
    tensor_bytes: int = 16 << 20
    """Most bytes of full tensors of each rank that are kept; 0 for none."""


@dataclass(frozen=True, slots=True)
class DumpPlan:
    """A configuration with every setting resolved."""

    output: OutputSettings
    selection: TensorSelection = TensorSelection()
    content: ContentSettings = ContentSettings()
    delivery: DeliverySettings = DeliverySettings()
    black_box: BlackBoxSettings = BlackBoxSettings()
    dialect: str = "plan"
    """Which dialect it was written in: `mindspore` for a data_dump.json, `acl`, `tf`."""
    warnings: tuple[str, ...] = ()
    """Settings with surprising effects, one sentence each."""
    enabled: bool = True
    """False when the configuration switches dumping off."""


PLAN_VERSION = 1
MAX_ROOT_CHARACTERS = 4096


def plan_to_json(plan: DumpPlan) -> bytes:
    """Return the plan as it is sent to the agent."""
    body = {"version": PLAN_VERSION} | make_plain(plan)
    return json.dumps(body, separators=(",", ":"), default=make_plain).encode()


def plan_from_json(data: bytes) -> DumpPlan:
    """Read a plan; ProtocolError when the bytes are not a valid one."""
    try:
        body: dict[str, Any] = json.loads(data)
        if body.pop("version") != PLAN_VERSION:
            raise ValueError("its version is not supported")
        # Older clients do not send these, and no agent needs them otherwise.
        body["delivery"] = {"embedded": True, "max_step_overhead": 0.0} | body["delivery"]
        body["selection"] = {"optimizer_states": False} | body["selection"]
        without = {"fingerprints": False, "run_card": False, "baseline": ""}
        body["content"] = without | body["content"]
        body["black_box"] = (
            make_plain(BlackBoxSettings()) | {"watch": []} | body.get("black_box", {})
        )
        plan = read_json(DumpPlan, body, unknown=True)
        _check_output(read_json(OutputSettings, body["output"]))
        _check_selection(plan.selection)
        _check_content(plan.content)
        _check_share(plan.delivery.max_step_overhead)
        _check_black_box(plan.black_box)
    except _UNREADABLE_ERRORS as error:
        raise ProtocolError(f"plan cannot be read: {error}") from None
    return plan


_UNREADABLE_ERRORS = (ValueError, TypeError, KeyError, AttributeError, RecursionError, re.error)


def _check_output(output: OutputSettings) -> None:
    # The agent makes paths of these: they must not lead out of its tree.
    texts = [text for text in make_plain(output).values() if isinstance(text, str)]
    modes = [output.file_mode, output.folder_mode]
    if any("\0" in text for text in texts):
        raise ValueError(f"the output has invalid texts: {texts!r}")
    if not all(0 <= mode <= 0o777 for mode in modes):
        raise ValueError(f"the output has invalid modes: {modes!r}")
    if len(output.root) > MAX_ROOT_CHARACTERS:
        raise ValueError(f"the output root has {len(output.root)} characters")
    if not output.root.startswith("/"):
        raise ValueError(f"the output root is not absolute: {output.root!r}")
    if output.net_name and not NET_NAME_PATTERN.fullmatch(output.net_name):
        raise ValueError(f"the output has an invalid net_name: {output.net_name[:300]!r}")
    if output.started and not STARTED_PATTERN.fullmatch(output.started):
        raise ValueError(f"the output has an invalid start time: {output.started!r}")


def _check_selection(selection: TensorSelection) -> None:
    _check_count(selection.initial_iteration)
    _check_count(selection.overflow_limit)
    for operators in selection.operator_lists:
        if len(operators.patterns) > MAX_PATTERNS:
            raise ValueError(f"{len(operators.patterns)} patterns, at most {MAX_PATTERNS}")
        for pattern in operators.patterns:
            # Before it is compiled: that alone can take a while.
            if len(pattern) > MAX_PATTERN_CHARACTERS:
                raise ValueError(
                    f"pattern of {len(pattern)} characters, at most {MAX_PATTERN_CHARACTERS}"
                )
            re.compile(pattern)


def _check_content(content: ContentSettings) -> None:
    _check_count(content.sample_elements)
    if not all(item in STATISTIC_TITLES for item in content.statistics):
        raise ValueError(f"unknown statistics in {content.statistics!r}")
    baseline = content.baseline
    if baseline and (baseline[0] != "/" or "\0" in baseline or len(baseline) > MAX_ROOT_CHARACTERS):
        raise ValueError(f"the baseline is no absolute folder: {baseline[:300]!r}")


def _check_black_box(settings: BlackBoxSettings) -> None:
    _check_share(settings.max_overhead)
    _check_count(settings.max_bytes)
    if not 0 <= settings.tensor_bytes <= MAX_TENSOR_BYTES:
        raise ValueError(f"{settings.tensor_bytes!r} is not a size up to {MAX_TENSOR_BYTES}")
    for steps in (settings.steps, settings.post_steps):
        if not 0 <= steps <= MAX_RING_STEPS:
            raise ValueError(f"{steps!r} is not a number of steps up to {MAX_RING_STEPS}")
    if not 0 <= settings.pause_s < float("inf"):
        raise ValueError(f"{settings.pause_s!r} is not a number of seconds")
    check_rules(settings.watch)


def _check_share(share: float) -> None:
    if not 0 <= share <= 1:
        raise ValueError(f"{share!r} is not a share from 0 to 1")


def _check_count(number: int) -> None:
    if not 0 <= number < 1 << 63:
        raise ValueError(f"{number!r} is not a valid count")
