"""From paired calls to paired tensors, in the order of troubleshooter's tables. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rankdump.contract.key import Side
from rankdump.contract.layout.api_name import Direction
from rankdump.diff.flow import Span, aligned
from rankdump.migrator.comparing.info import InfoTensor
from rankdump.migrator.comparing.steps import Step

Pair: TypeAlias = tuple[InfoTensor | None, InfoTensor | None]
"""A tensor of each side; one of them is None when it has no partner."""
Held: TypeAlias = Mapping[tuple[str, Direction], Sequence[InfoTensor]]
"""Tensors of each call, by its name and direction, those of one side by their places."""

_LEAST_DEPTH = 2


@dataclass(frozen=True, slots=True)
class _Ends:
    """The tensors of calls that stand for others, as the tables list them."""

    inputs: list[InfoTensor]
    """Of the first call."""
    inner: tuple[list[InfoTensor], list[InfoTensor], list[InfoTensor]]
    """Outputs of the first call, all of those between, inputs of the last."""
    outputs: list[InfoTensor]
    """Of the last call."""


def held(tensors: Iterable[InfoTensor], files: Container[str] | None) -> Held:
    """Return the tensors to be compared: all, or those that have files.

    Of several with one name the last counts, at the place of the first.
    """
    found: dict[tuple[str, Direction], list[InfoTensor]] = {}
    named = {tensor.name: tensor for tensor in tensors if files is None or tensor.name in files}
    for tensor in named.values():
        found.setdefault((tensor.call.stem, tensor.call.direction), []).append(tensor)
    return {call: sorted(each, key=_place) for call, each in found.items()}


def pairs(
    spans: Sequence[Span], a: tuple[Step, Held], b: tuple[Step, Held], direction: Direction
) -> list[Pair]:
    """Return the rows of one direction; those of the backward in the order of its execution."""
    (step_a, held_a), (step_b, held_b) = a, b
    found: list[Pair] = []
    for span in spans:
        one = _ends([held_a.get((step_a.names[at], direction), ()) for at in span.a])
        other = _ends([held_b.get((step_b.names[at], direction), ()) for at in span.b])
        found.extend(_aligned(one.inputs, other.inputs))
        for inner_a, inner_b in zip(one.inner, other.inner, strict=True):
            found.extend((tensor, None) for tensor in inner_a)
            found.extend((None, tensor) for tensor in inner_b)
        found.extend(_aligned(one.outputs, other.outputs))
    return found if direction == "forward" else found[::-1]


def _ends(calls: Sequence[Sequence[InfoTensor]]) -> _Ends:
    if not calls:
        return _Ends([], ([], [], []), [])
    several = len(calls) > 1
    inner = (
        _of(calls[0], Side.OUTPUT) if several else [],
        [tensor for call in calls[1:-1] for tensor in call],
        _of(calls[-1], Side.INPUT) if several else [],
    )
    return _Ends(_of(calls[0], Side.INPUT), inner, _of(calls[-1], Side.OUTPUT))


def _of(call: Sequence[InfoTensor], side: Side) -> list[InfoTensor]:
    return [tensor for tensor in call if tensor.place.side is side]


def _aligned(a: Sequence[InfoTensor], b: Sequence[InfoTensor]) -> Iterator[Pair]:
    for at_a, at_b in aligned([each.shape for each in a], [each.shape for each in b]):
        yield (a[at_a] if at_a is not None else None, b[at_b] if at_b is not None else None)


def _place(tensor: InfoTensor) -> tuple[tuple[int, int, str], ...]:
    """Return what sorts the tensors of a call: by number, then keywords by name."""
    parts = tensor.place.path.split(".") if tensor.place.path else []
    keys = [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]
    # `output`, `output.0` and `output.0.0` are the same place to the tool.
    return tuple(keys + [(0, 0, "")] * (_LEAST_DEPTH - len(keys)))
