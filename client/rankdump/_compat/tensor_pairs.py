"""Pairs of tensors of two API dumps: from info files to tensors, steps, paired calls and paired
tensors, in the order of troubleshooter's tables. Pairing is pure; only the info files are read.

If both dumps have real steps, these are used. troubleshooter does not count steps: in its
comparison, a step consists of the forward records up to the first backward one, so a run without
gradients is one step, and forward records after the last gradient belong to no step (troubleshooter
1.0.17, api_dump_compare). If one of the dumps is troubleshooter's, both are split in this way.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TypeAlias

from rankdump._analysis.reader.statistic_tables import read_info
from rankdump._compat.api_pairs import (
    CallSpan,
    FlowCall,
    TensorShape,
    align_shapes,
    unify_api_name,
)
from rankdump._core.record import TensorSide
from rankdump._layout.api_files import SUMMARY_ITEMS, InfoLine
from rankdump._layout.api_tree import (
    LAYER_KIND,
    ApiCall,
    ApiPlace,
    CallDirection,
    parse_tensor_name,
)
from rankdump.errors import CorruptedError

_CallShapes: TypeAlias = dict[tuple[TensorSide, str], TensorShape]
"""Shapes of the tensors of a call, by side and place."""


@dataclass(frozen=True, slots=True)
class ApiInfoTensor:
    """The tensor of one line of an info file."""

    name: str
    call: ApiCall
    place: ApiPlace
    step: int
    recomputed: bool
    shape: TensorShape
    statistics: tuple[float, float, float]
    """Largest, smallest and mean element; NaN if the line has no such number."""


@dataclass(frozen=True, slots=True)
class ApiDumpInfo:
    """Content of an info file."""

    tensors: tuple[ApiInfoTensor, ...]
    """Tensors in the order of the lines."""
    counted: bool = False
    """Whether the steps of the dump are real and not guessed."""
    notes: tuple[str, ...] = ()
    """Sentences about what is left out."""

    @property
    def has_no_statistics(self) -> bool:
        """Whether no tensor has any statistic."""
        return all(math.isnan(number) for tensor in self.tensors for number in tensor.statistics)


def read_dump_info(path: Path, *, counted: bool = False) -> ApiDumpInfo:
    """Return the content of an info file; `counted` says that its steps are known to be real.

    An incomplete last line is omitted; CorruptedError names any other damaged line.
    """
    info = read_info(path, stepped=counted)
    if info.damage and not info.is_torn:
        raise CorruptedError(info.damage)
    notes = [f"{info.damage}; the line is omitted"] if info.is_torn else []
    pairs = [(noted.line, _make_info_tensor(noted.line)) for noted in info.lines]
    foreign = [line.name for line, tensor in pairs if tensor is None]
    if foreign:
        count, example = len(foreign), foreign[0]
        notes.append(f"{path}: {count} names of no API call are omitted, such as {example!r}")
    tensors = tuple(tensor for _, tensor in pairs if tensor is not None)
    return ApiDumpInfo(tensors, info.has_steps, tuple(notes))


def _make_info_tensor(line: InfoLine) -> ApiInfoTensor | None:
    found = parse_tensor_name(line.name)
    if found is None:
        return None
    largest, smallest, mean = (line.statistics.get(item, math.nan) for item in SUMMARY_ITEMS)
    statistics = (largest, smallest, mean)
    return ApiInfoTensor(line.name, *found, line.step, line.recomputed, line.shape, statistics)


@dataclass(frozen=True, slots=True)
class ApiDumpStep:
    """The forward calls of one step, in order."""

    number: int | None
    """Number of the step; None if steps are guessed."""
    names: tuple[str, ...]
    """Names of the calls with their numbers, such as `NN_Conv2d_0`."""
    calls: tuple[FlowCall, ...]
    """The calls in the form in which they are paired."""


def guess_steps(tensors: Iterable[ApiInfoTensor], framework: str) -> list[ApiDumpStep]:
    """Return the steps of a dump as troubleshooter splits them."""
    return [_make_step(None, block, framework) for block in _split_blocks(tensors)]


def group_counted_steps(
    tensors: Iterable[ApiInfoTensor], framework: str, *, recomputed: bool = False
) -> list[ApiDumpStep]:
    """Return the real steps of a dump, with its recomputed calls only, or with all other calls."""
    blocks: dict[int, list[ApiInfoTensor]] = {}
    for tensor in tensors:
        if tensor.call.direction == "forward" and tensor.recomputed == recomputed:
            blocks.setdefault(tensor.step, []).append(tensor)
    return [_make_step(number, block, framework) for number, block in sorted(blocks.items())]


def pair_steps(
    a: Sequence[ApiDumpStep], b: Sequence[ApiDumpStep]
) -> tuple[list[tuple[ApiDumpStep, ApiDumpStep]], str]:
    """Return pairs of steps, and a sentence about steps without a partner, if there are any.

    Steps are paired by their numbers if both dumps have real steps with common numbers, else by
    their order.
    """
    numbered_a = {step.number: step for step in a if step.number is not None}
    numbered_b = {step.number: step for step in b if step.number is not None}
    common = [number for number in numbered_a if number in numbered_b]
    if common:
        alone = sorted(set(numbered_a) ^ set(numbered_b))
        note = f"steps that only one dump has are omitted: {', '.join(map(str, alone))}"
        pairs = [(numbered_a[number], numbered_b[number]) for number in common]
        return pairs, note if alone else ""
    pairs = [(one, other) for one, other in zip_longest(a, b) if one and other]
    if len(a) == len(b):
        return pairs, ""
    counts = f"{len(a)} steps in origin_path, {len(b)} in target_path"
    return pairs, f"{counts}: the first {len(pairs)} are compared"


def _split_blocks(tensors: Iterable[ApiInfoTensor]) -> list[list[ApiInfoTensor]]:
    """Return the forward records before each backward; all of them if there is no
    backward at all.
    """
    blocks: list[list[ApiInfoTensor]] = []
    block: list[ApiInfoTensor] = []
    for tensor in tensors:
        if tensor.call.direction == "forward":
            block.append(tensor)
        elif block:
            blocks.append(block)
            block = []
    return blocks or ([block] if block else [])


def _make_step(number: int | None, tensors: Sequence[ApiInfoTensor], framework: str) -> ApiDumpStep:
    calls: list[tuple[ApiCall, _CallShapes]] = []
    latest: dict[str, _CallShapes] = {}
    for tensor in tensors:
        stem = tensor.call.stem
        shapes = latest.get(stem)
        # A LAYER mark has no number: lines of it that are not adjacent belong to different calls.
        if shapes is None or (tensor.call.kind == LAYER_KIND and shapes is not calls[-1][1]):
            shapes = latest[stem] = {}
            calls.append((tensor.call, shapes))
        shapes[tensor.place.side, tensor.place.path] = tensor.shape
    names = tuple(call.stem for call, _ in calls)
    return ApiDumpStep(number, names, tuple(_make_flow_call(*each, framework) for each in calls))


def _make_flow_call(call: ApiCall, shapes: _CallShapes, framework: str) -> FlowCall:
    inputs, outputs = (
        tuple(shape for (side, _), shape in shapes.items() if side is wanted)
        for wanted in (TensorSide.INPUT, TensorSide.OUTPUT)
    )
    return FlowCall(call.api, unify_api_name(framework, call.kind, call.api), inputs, outputs)


TensorPair: TypeAlias = tuple[ApiInfoTensor | None, ApiInfoTensor | None]
"""The tensors of both sides; one is None if the other has no partner."""
TensorsByCall: TypeAlias = Mapping[tuple[str, CallDirection], Sequence[ApiInfoTensor]]
"""Tensors of each call, by name and direction of the call, sorted by place."""

_MIN_PLACE_DEPTH = 2


def group_by_call(tensors: Iterable[ApiInfoTensor], files: Container[str] | None) -> TensorsByCall:
    """Return the tensors to compare: all of them, or those that have files.

    If several tensors have the same name, the last one is used, at the position of the first.
    """
    found: dict[tuple[str, CallDirection], list[ApiInfoTensor]] = {}
    named = {tensor.name: tensor for tensor in tensors if files is None or tensor.name in files}
    for tensor in named.values():
        found.setdefault((tensor.call.stem, tensor.call.direction), []).append(tensor)
    return {call: sorted(each, key=_make_sort_key) for call, each in found.items()}


def pair_tensors(
    spans: Sequence[CallSpan],
    a: tuple[ApiDumpStep, TensorsByCall],
    b: tuple[ApiDumpStep, TensorsByCall],
    direction: CallDirection,
) -> list[TensorPair]:
    """Return the rows of one direction, in execution order."""
    (step_a, held_a), (step_b, held_b) = a, b
    found: list[TensorPair] = []
    for span in spans:
        parts = zip(
            _split_span([held_a.get((step_a.names[at], direction), ()) for at in span.a]),
            _split_span([held_b.get((step_b.names[at], direction), ()) for at in span.b]),
            strict=True,
        )
        inputs, *inner, outputs = parts
        found.extend(_align_tensors(*inputs))
        for inner_a, inner_b in inner:
            found.extend((tensor, None) for tensor in inner_a)
            found.extend((None, tensor) for tensor in inner_b)
        found.extend(_align_tensors(*outputs))
    return found if direction == "forward" else found[::-1]


def _split_span(calls: Sequence[Sequence[ApiInfoTensor]]) -> list[list[ApiInfoTensor]]:
    """Return the tensors of one side of a span in the order of the tables: the inputs of the first
    call, its outputs, all tensors of the calls between, the inputs of the last call, its outputs.
    """
    if not calls:
        return [[], [], [], [], []]
    sides = [
        [tensor for tensor in call if tensor.place.side is side]
        for call in (calls[0], calls[-1])
        for side in (TensorSide.INPUT, TensorSide.OUTPUT)
    ]
    if len(calls) == 1:
        return [sides[0], [], [], [], sides[1]]
    between = [tensor for call in calls[1:-1] for tensor in call]
    return [*sides[:2], between, *sides[2:]]


def _align_tensors(a: Sequence[ApiInfoTensor], b: Sequence[ApiInfoTensor]) -> Iterator[TensorPair]:
    for at_a, at_b in align_shapes([each.shape for each in a], [each.shape for each in b]):
        yield (a[at_a] if at_a is not None else None, b[at_b] if at_b is not None else None)


def _make_sort_key(tensor: ApiInfoTensor) -> tuple[tuple[int, int, str], ...]:
    """Return the sort key of a tensor within its call: by number, then keywords by name."""
    parts = tensor.place.path.split(".") if tensor.place.path else []
    keys = [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]
    # The tool does not distinguish `output`, `output.0` and `output.0.0`.
    return tuple(keys + [(0, 0, "")] * (_MIN_PLACE_DEPTH - len(keys)))
