"""Dump plan: what is dumped, in which iterations and where to, and what the black box watches.
Every configuration dialect is parsed into this one model. Its JSON form is sent to the agent and
stored in the ledger. Pure: no clock, no disk, no network; decisions on a plan are in
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
    """A watch rule: an element of `rankdump.blackbox.watch` in the configuration."""

    when: WatchCondition
    operators: tuple[str, ...] = ()
    """Globs that match the type of an operator or its whole name in any spelling; these operators
    are measured in every step. Without globs, the rule applies to every tensor in the steps in
    which it is measured.
    """
    value: float = 0.0
    """For `too_large`: the largest magnitude that is allowed."""
    steps: int = 1
    """Number of consecutive steps in which the condition must be met, counting only steps that
    measure the tensor; for `unchanged`, the number of steps with the same pulse, at least two.
    """
    do: WatchAction = "note"
    iterations: int = 1
    """For `dump`: number of iterations whose tensors are kept, after the iteration in which the
    rule matches.
    """


def describe_rule(rule: WatchRule, number: int) -> str:
    """Return the name of a rule in messages: its place in the configuration and its condition."""
    return f"rankdump.blackbox.watch[{number}] ({rule.when})"


def check_rules(rules: tuple[WatchRule, ...]) -> None:
    """Raise ValueError for rules that no configuration could contain."""
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
"""Maximum number of patterns in a list; it is limited, as are the characters of a pattern, because
every pattern is tried on every name.
"""
NET_NAME_PATTERN = re.compile(r"[A-Za-z0-9_-]{1,255}")
"""Allowed names of networks, which become folders of the tree."""
STARTED_PATTERN = re.compile(r"[0-9]{14}")
UNNAMED_MODEL = "Net"
"""Name of a model that has no name of its own."""


@dataclass(frozen=True, slots=True)
class IterationSelection:
    """Selection of iterations; `spans` are pairs of first and last iteration, None selects all."""

    text: str = "all"
    spans: tuple[tuple[int, int], ...] | None = None

    def __contains__(self, iteration: int) -> bool:
        return self.spans is None or any(low <= iteration <= high for low, high in self.spans)


@dataclass(frozen=True, slots=True)
class TensorExclusion:
    """Tensors that are left out although their operator is selected."""

    name: str
    """Name of an operator, including its gradients and recomputed calls, or of a type
    of operators.
    """
    positions: tuple[str, ...] = ()
    """Excluded tensors, such as `input0` or `output1`; empty means all. A gradient has its own
    positions.
    """


@dataclass(frozen=True, slots=True)
class WatchedOperators:
    """Operators whose outputs are read again each time another operator has run."""

    layers: tuple[str, ...]
    """Operators after which the outputs are read again, by full scope name or any other spelling;
    empty means all other operators.
    """
    nodes: tuple[str, ...]
    """Operators of the same model whose outputs are read again."""


@dataclass(frozen=True, slots=True)
class OperatorSelection:
    """Selection of operators; if `everything` is set, the lists of names do not matter."""

    everything: bool = True
    names: tuple[str, ...] = ()
    """Full scope names that match exactly."""
    types: tuple[str, ...] = ()
    """Parts of the operator's type, in any case of letters."""
    patterns: tuple[str, ...] = ()
    """Regular expressions that match the whole scope name."""
    marked: bool = False
    """Whether the operators are those that the script marked with `set_dump`; the lists do not
    matter then.
    """
    ranges: tuple[tuple[str, str], ...] = ()
    """Ranges of the program by their first and last operator, in any spelling; added to
    the lists.
    """
    without_types: tuple[TensorExclusion, ...] = ()
    """Tensors that are left out of the selection, by type of operator."""
    without_names: tuple[TensorExclusion, ...] = ()
    """Tensors that are left out of the selection, by operator name in any spelling."""
    spelt: bool = False
    """Whether names may be spelt as in file names, or as the scope or path of the module."""

    @property
    def has_exclusions(self) -> bool:
        """Whether any tensor may be left out of the selection."""
        return bool(self.without_types or self.without_names)


@dataclass(frozen=True, slots=True)
class TensorSelection:
    """Selection of tensors: iterations, devices, operators and sides."""

    iterations: IterationSelection = IterationSelection()
    devices: tuple[int, ...] | None = None
    """Selected local device ids; None means all."""
    operators: OperatorSelection = OperatorSelection()
    inputs: bool = True
    outputs: bool = True
    initial_iteration: int = 0
    """Number of the job's first iteration."""
    trigger: TriggerMode = "always"
    """Condition for keeping an operator: `overflow` keeps operators that wrote a NaN or infinity,
    `exception` the operator that raised.
    """
    overflow_limit: int = 0
    """Number of operators with an overflow after which a rank stops dumping; 0 means never."""
    models: tuple[tuple[str, OperatorSelection], ...] = ()
    """Selections of operators for single models, by the name of the model's folder; they replace
    `operators`.
    """
    watched: WatchedOperators | None = None
    """Watched operators; if set, only their outputs are kept."""
    optimizer_states: bool = False
    """Whether the optimizers that step are found automatically; otherwise the script names the
    optimizers whose states are read.
    """

    def get_operators(self, model: str) -> OperatorSelection:
        """Return the selection of operators for a model."""
        return next((operators for name, operators in self.models if name == model), self.operators)

    @property
    def operator_lists(self) -> tuple[OperatorSelection, ...]:
        """All selections of operators: for all models, and for single models."""
        return (self.operators, *(operators for _, operators in self.models))


@dataclass(frozen=True, slots=True)
class ContentSettings:
    """Form in which selected tensors are kept."""

    saved: SavedDataMode = "tensor"
    """Whether elements, statistics, or both are kept."""
    statistics: tuple[str, ...] = DEFAULT_STATISTICS
    """Names of the statistics, as in `_core.statistics`, in the order of their columns."""
    on_device: bool = False
    """Whether the statistics of a tensor are computed on its accelerator and read back once per
    step.
    """
    precision: StatisticPrecision = "high"
    """Precision of statistics on a device: `high` accumulates in float32 at least, `low` in the
    tensor's own type.
    """
    sample_elements: int = 0
    """A larger tensor is cut to this number of first elements; 0 keeps all elements."""
    kernel_arguments: bool = False
    """Whether an operator's arguments are written beside its tensors."""
    tables: TableForm = "folder"
    """Place of statistics: one `statistic.csv` per folder, or a table for each operator."""
    fingerprints: bool = False
    """Whether the fingerprint of each tensor is recorded beside the manifest."""
    run_card: bool = True
    """Whether the manifest of each iteration has a run card."""
    baseline: str = ""
    """Absolute path of an earlier tree whose tensors are not stored again; empty for none."""

    @property
    def has_tables(self) -> bool:
        """Whether statistics are written."""
        return self.saved != "tensor"


@dataclass(frozen=True, slots=True)
class OutputSettings:
    """Place and form of the tree."""

    root: str
    """Absolute path of the folder that holds the rank folders."""
    net_name: str = "Net"
    """Name used for every model; empty if each model has its own."""
    layout: str = "mindspore-sync"
    """Layout of the tree: a key of `LAYOUTS`."""
    profile: str = "ms2.3"
    """Release of MindSpore whose names and tables are used: a key of `PROFILES`."""
    codec: str = "zstd"
    file_mode: int = 0o440
    folder_mode: int = 0o750
    file_format: TensorFileFormat = "npy"
    """`npy` writes a file for each tensor; `bin`, CANN's format, a file for each operator."""
    started: str = ""
    """Local time as `YYYYmmddHHMMSS`, for layouts with a folder of that name; set by
    the session.
    """


@dataclass(frozen=True, slots=True)
class DeliverySettings:
    """Delivery of tensors from the rank to the tree."""

    on_full: FullBufferPolicy = "block"
    """What a rank does with a tensor while its buffer is full."""
    block_timeout_s: float = 30.0
    """Longest time in seconds that `block` waits while the agent makes no progress."""
    buffer_bytes: int = 256 << 20
    """Maximum bytes of tensors that a rank holds until the agent has received them."""
    durability: DurabilityLevel = "written"
    """When a record counts as stored: `written` survives the end of any process, `synced` a power
    failure.
    """
    strict: bool = False
    """Whether a loss raises an error in the training script instead of only being counted."""
    shared_memory: bool = True
    """Whether tensors are sent through the agent's shared memory if it offers any."""
    embedded: bool = True
    """Whether a job without an agent starts one of its own."""
    max_step_overhead: float = 0.0
    """Maximum time that dumping may take of the training thread, as a share of the time of a step
    without dumping; 0 means no limit.
    """


MAX_RING_STEPS = 4096
MAX_TENSOR_BYTES = 1 << 30
"""Maximum of the setting `tensor_bytes` of the black box."""


@dataclass(frozen=True, slots=True)
class BlackBoxSettings:
    """Settings of the black box; if `steps` is 0, there is none."""

    steps: int = 0
    """Number of latest steps of each rank that are kept."""
    post_steps: int = 2
    """Number of steps that are kept after the step for which the ring was frozen."""
    max_overhead: float = 0.01
    """Maximum time that the black box may take, as a share of a step."""
    max_bytes: int = 1 << 30
    """Maximum bytes of the frozen trees beside one tree."""
    pause_s: float = 300.0
    """Minimum seconds between two freezes of a job."""
    watch: tuple[WatchRule, ...] = ()
    """Watch rules for the tensors that a rank measures."""
    tensor_bytes: int = 16 << 20
    """Maximum bytes of full tensors that are kept of each rank; 0 keeps none."""


@dataclass(frozen=True, slots=True)
class DumpPlan:
    """A configuration with every setting resolved."""

    output: OutputSettings
    selection: TensorSelection = TensorSelection()
    content: ContentSettings = ContentSettings()
    delivery: DeliverySettings = DeliverySettings()
    black_box: BlackBoxSettings = BlackBoxSettings()
    dialect: str = "plan"
    """Dialect of the configuration: `mindspore` for a data_dump.json, `acl`, `tf`, or `plan`."""
    warnings: tuple[str, ...] = ()
    """Sentences about settings with surprising effects."""
    enabled: bool = True
    """Whether dumping is on; a configuration may switch it off."""


PLAN_VERSION = 1
MAX_ROOT_CHARACTERS = 4096


def plan_to_json(plan: DumpPlan) -> bytes:
    """Return the plan as JSON, as it is sent to the agent."""
    body = {"version": PLAN_VERSION} | make_plain(plan)
    return json.dumps(body, separators=(",", ":"), default=make_plain).encode()


def plan_from_json(data: bytes) -> DumpPlan:
    """Parse the JSON of a plan; ProtocolError if it is not valid."""
    try:
        body: dict[str, Any] = json.loads(data)
        if body.pop("version") != PLAN_VERSION:
            raise ValueError("its version is not supported")
        # Older clients do not send these fields, and an agent does not need the clients' values.
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
    # The agent makes paths from these texts, which must not lead out of its tree.
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
            # The length is checked before the pattern is compiled, because compiling a long one can
            # take a while.
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
