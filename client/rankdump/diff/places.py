"""A pair of calls to pairs of tensors, each side by itself. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from rankdump.contract.layout.api_name import place_of
from rankdump.diff.pairing.kinds import extents
from rankdump.diff.values import PairedCalls, Tensor, TensorPair


def tensor_pairs(paired: PairedCalls) -> list[TensorPair]:
    """Return the tensors of a pair of calls in pairs: inputs first, by slot of side a.

    Those of one keyword belong together, then those of one argument, then those of one slot where
    an argument is unknown or the shapes agree, then those of one shape in order, then the only ones
    that are left. What has no partner stands behind the others of its side.
    """
    a, b = paired.a, paired.b
    return [
        *_pairs(a.inputs if a else (), b.inputs if b else ()),
        *_pairs(a.outputs if a else (), b.outputs if b else ()),
    ]


def _pairs(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[TensorPair]:
    if len(a) == len(b) == 1:
        return [TensorPair(a[0], b[0])]
    if not (a and b):
        return [TensorPair(own, None) for own in a] + [TensorPair(None, other) for other in b]
    left = list(b)
    partner: dict[int, Tensor] = {}
    for same in (_by_word, _by_argument, _by_slot, _by_shape):
        _join(a, left, partner, same)
    alone = [tensor for tensor in a if tensor.slot not in partner]
    if len(alone) == len(left) == 1:
        partner[alone[0].slot] = left.pop()
    paired = [TensorPair(tensor, partner.get(tensor.slot)) for tensor in a]
    return [*paired, *(TensorPair(None, tensor) for tensor in left)]


def _join(
    a: Sequence[Tensor],
    left: list[Tensor],
    partner: dict[int, Tensor],
    key: Callable[[Tensor, bool], Hashable],
) -> None:
    """Give each tensor of a the first of b that is left and has the same key; None is no key."""
    known = all(tensor.argument for tensor in (*a, *left))
    for tensor in a:
        own = key(tensor, known)
        if tensor.slot in partner or own is None:
            continue
        at = next((at for at, other in enumerate(left) if key(other, known) == own), None)
        if at is not None:
            partner[tensor.slot] = left.pop(at)


def _by_word(tensor: Tensor, known: bool) -> Hashable:
    # Keywords may come in any order, and have the numbers of theirs.
    place = place_of(tensor.argument)
    return None if place is None else place.word or None


def _by_argument(tensor: Tensor, known: bool) -> Hashable:
    # Behind a colon stands what else is known: that it was a number, or is recomputed.
    return tensor.argument.partition(":")[0] or None if known else None


def _by_slot(tensor: Tensor, known: bool) -> Hashable:
    # With filters that differ, slots are shifted: then the shape has to agree as well.
    return (tensor.slot, extents(tensor.shape)) if known else tensor.slot


def _by_shape(tensor: Tensor, known: bool) -> Hashable:
    return extents(tensor.shape)
