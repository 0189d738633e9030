"""The steps of a dump: which calls belong together. Pure.

Where both dumps counted their steps, they are taken as they are. troubleshooter has none; its
compare takes forward records up to the first backward one for a step, so that a run without
gradients is one, and what is only forward behind the last gradient belongs to none (api-dump.md
A.6). Beside a dump of its own, ours is parted in that way too, or the parts would not be alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from rankdump.contract.key import Side
from rankdump.contract.layout.api_name import LAYER
from rankdump.diff.flow import FlowCall, Shape, shared_name
from rankdump.migrator.comparing.info import InfoTensor


@dataclass(frozen=True, slots=True)
class Step:
    """The forward calls of one step, in order."""

    number: int | None
    """None where the dump did not count."""
    names: tuple[str, ...]
    """Of the calls, with their numbers: `NN_Conv2d_0`."""
    calls: tuple[FlowCall, ...]
    """The same calls, as they are paired."""


@dataclass(slots=True)
class _Call:
    tensor: InfoTensor
    """The first of its tensors."""
    shapes: dict[tuple[Side, str], Shape] = field(default_factory=dict[tuple[Side, str], Shape])

    def flow(self, framework: str) -> FlowCall:
        call = self.tensor.call
        return FlowCall(
            call.api,
            shared_name(framework, call.kind, call.api),
            tuple(shape for (side, _), shape in self.shapes.items() if side is Side.INPUT),
            tuple(shape for (side, _), shape in self.shapes.items() if side is Side.OUTPUT),
        )


def guessed_steps(tensors: Iterable[InfoTensor], framework: str) -> list[Step]:
    """Return the steps that troubleshooter takes a dump for, whoever wrote it."""
    return [_step(None, block, framework) for block in _blocks(tensors)]


def counted_steps(
    tensors: Iterable[InfoTensor], framework: str, *, recomputed: bool = False
) -> list[Step]:
    """Return the steps that a dump counted: those calls that are recomputations, or all others."""
    blocks: dict[int, list[InfoTensor]] = {}
    for tensor in tensors:
        if tensor.call.direction == "forward" and tensor.recomputed == recomputed:
            blocks.setdefault(tensor.step, []).append(tensor)
    return [_step(number, block, framework) for number, block in sorted(blocks.items())]


def paired(a: Sequence[Step], b: Sequence[Step]) -> tuple[list[tuple[Step, Step]], str]:
    """Return which steps are compared, and a sentence about those that are not, if any.

    By their numbers where both dumps counted and have some in common, else by their order.
    """
    numbered_a = {step.number: step for step in a if step.number is not None}
    numbered_b = {step.number: step for step in b if step.number is not None}
    common = [number for number in numbered_a if number in numbered_b]
    if common:
        alone = sorted(set(numbered_a) ^ set(numbered_b))
        said = f"steps of one side only are left out: {', '.join(map(str, alone))}" if alone else ""
        return [(numbered_a[number], numbered_b[number]) for number in common], said
    pairs = [(one, other) for one, other in zip_longest(a, b) if one and other]
    if len(a) == len(b):
        return pairs, ""
    counts = f"{len(a)} steps in origin_path, {len(b)} in target_path"
    return pairs, f"{counts}: the first {len(pairs)} are compared"


def _blocks(tensors: Iterable[InfoTensor]) -> list[list[InfoTensor]]:
    """Return the forward records up to each backward; all where there is no backward at all."""
    blocks: list[list[InfoTensor]] = []
    block: list[InfoTensor] = []
    for tensor in tensors:
        if tensor.call.direction == "forward":
            block.append(tensor)
        elif block:
            blocks.append(block)
            block = []
    return blocks or ([block] if block else [])


def _step(number: int | None, tensors: Sequence[InfoTensor], framework: str) -> Step:
    calls: list[_Call] = []
    places: dict[str, _Call] = {}
    for tensor in tensors:
        stem = tensor.call.stem
        call = places.get(stem)
        # A layer has no number: it is another call unless nothing came between.
        if call is None or (tensor.call.kind == LAYER and call is not calls[-1]):
            call = places[stem] = _Call(tensor)
            calls.append(call)
        call.shapes[tensor.place.side, tensor.place.path] = tensor.shape
    names = tuple(call.tensor.call.stem for call in calls)
    return Step(number, names, tuple(call.flow(framework) for call in calls))
