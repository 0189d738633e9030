"""Programs and rows of a comparison, written by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

from rankdump._analysis.compare.report import (
    CallPair,
    ComparisonRow,
    DumpedCall,
    DumpedProgram,
    DumpedTensor,
    PairingRule,
    PairOutcome,
    TensorPair,
    TensorVerdict,
)
from rankdump._core.record import TensorSide

SHAPE = (4, 8)
VERDICTS = {
    "=": TensorVerdict.SAME,
    "~": TensorVerdict.NORMAL,
    "!": TensorVerdict.DIFFERENT,
    "n": TensorVerdict.NAN,
    "?": TensorVerdict.UNKNOWN,
    "-": TensorVerdict.UNMATCHED,
}


def tensor(
    side: TensorSide,
    slot: int = 0,
    *,
    argument: str = "",
    shape: tuple[int, ...] | None = SHAPE,
    digest: str = "",
    seen: int = 0,
) -> DumpedTensor:
    return DumpedTensor(side, slot, argument, "float32", shape, digest, seen_order=seen)


def call(
    op_name: str,
    op_type: str = "",
    *,
    inputs: Sequence[tuple[int, ...] | None] = (SHAPE,),
    outputs: Sequence[tuple[int, ...] | None] = (SHAPE,),
    backward: bool = False,
) -> DumpedCall:
    """A call with tensors of these shapes; its position is that in the program it is put in."""
    return DumpedCall(
        position=0,
        op_type=op_type or op_name.rpartition("/")[2].split("-")[0],
        op_name=op_name,
        inputs=tuple(tensor(TensorSide.INPUT, at, shape=shape) for at, shape in enumerate(inputs)),
        outputs=tuple(
            tensor(TensorSide.OUTPUT, at, shape=shape) for at, shape in enumerate(outputs)
        ),
        backward=backward or op_name.startswith("Gradients/"),
    )


def program(*calls: DumpedCall | str, rank: int = 0, iteration: int = 0) -> DumpedProgram:
    """A program of these calls, or of calls of these names."""
    made = [call(each) if isinstance(each, str) else each for each in calls]
    placed = [
        DumpedCall(at, c.op_type, c.op_name, c.inputs, c.outputs, c.graph, c.backward, c.recomputed)
        for at, c in enumerate(made)
    ]
    return DumpedProgram(rank, iteration, tuple(placed))


def names(paired: Sequence[CallPair]) -> list[tuple[str, str, str]]:
    """What is paired with what, by which rule."""
    return [
        (each.a.op_name if each.a else "", each.b.op_name if each.b else "", each.rule)
        for each in paired
    ]


def rows(
    text: str,
    *,
    rank: int = 0,
    iteration: int = 0,
    nonfinite: Mapping[str, bool | None] | None = None,
    types: Mapping[str, str] | None = None,
) -> list[ComparisonRow]:
    """Rows of a program in the order in which its tensors were seen.

    Each word is a tensor: `fc1<=` an input of fc1 that agrees, `fc1>!` an output that differs; the
    words of one call need not be adjacent. `+` in front: side b alone has the call, `*` side a.
    `nonfinite` says it of words without their last sign, of both sides.
    """
    positions: dict[str, int] = {}
    slots: dict[tuple[str, TensorSide], count[int]] = {}
    found: list[ComparisonRow] = []
    for seen, word in enumerate(text.split()):
        sign = next(sign for sign in "<>" if sign in word)
        marked, verdict = word.split(sign)
        name, alone = marked.lstrip("+*"), marked[0] if marked[0] in "+*" else ""
        side = TensorSide.INPUT if sign == "<" else TensorSide.OUTPUT
        position = positions.setdefault(name, len(positions))
        slot = next(slots.setdefault((name, side), count()))
        one = tensor(side, slot, digest=f"{name}{sign}{slot}", seen=seen)
        pair = TensorPair(None if alone == "+" else one, None if alone == "*" else one)
        bad = (nonfinite or {}).get(f"{name}{sign}", False)
        found.append(
            ComparisonRow(
                rank=rank,
                iteration=iteration,
                position=position,
                rule=_rule(alone),
                op_type=(types or {}).get(name, "Op"),
                name_a="" if alone == "+" else name,
                name_b="" if alone == "*" else name,
                backward=name.startswith("Gradients/"),
                pair=pair,
                outcome=PairOutcome(VERDICTS[verdict], nonfinite_a=bad, nonfinite_b=bad),
            )
        )
    return found


def _rule(alone: str) -> PairingRule:
    return "" if alone else "exact"
