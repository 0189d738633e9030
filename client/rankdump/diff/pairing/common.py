"""The longest common subsequence of two lists, exactly, in little memory. Pure.

One row of the classic table is one number, a bit for each element of the other list (H. Hyyro,
"Bit-parallel LCS-length computation revisited", 2004), so 64 cells cost one operation of the
processor; halves are solved by themselves (D. Hirschberg, 1975), so two rows are kept and not all.
Two programs of 20,000 calls in any order take some tenths of a second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

_SMALL_CELLS = 1 << 22
"""Tables of up to that size are kept whole: half a megabyte."""


def common(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Return the places of a longest common subsequence, in each list rising."""
    numbers: dict[Hashable, int] = {}
    first = [numbers.setdefault(token, len(numbers)) for token in a]
    second = [numbers.setdefault(token, len(numbers)) for token in b]
    return list(_between(first, second, 0, 0))


def _between(a: list[int], b: list[int], at_a: int, at_b: int) -> Iterator[tuple[int, int]]:
    """Yield the pairs of two parts that begin at these places."""
    head = _shared(a, b)
    tail = _shared(a[head:][::-1], b[head:][::-1])
    inner_a, inner_b = a[head : len(a) - tail], b[head : len(b) - tail]
    yield from ((at_a + at, at_b + at) for at in range(head))
    if inner_a and inner_b:
        yield from _inner(inner_a, inner_b, at_a + head, at_b + head)
    end_a, end_b = at_a + len(a) - tail, at_b + len(b) - tail
    yield from ((end_a + at, end_b + at) for at in range(tail))


def _shared(a: list[int], b: list[int]) -> int:
    """Return how long the beginning is that both have."""
    for at, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return at
    return min(len(a), len(b))


def _inner(a: list[int], b: list[int], at_a: int, at_b: int) -> Iterator[tuple[int, int]]:
    if len(a) == 1 or len(a) * len(b) <= _SMALL_CELLS:
        yield from ((at_a + i, at_b + j) for i, j in _whole(a, b))
        return
    middle = len(a) // 2
    before = _lengths(a[:middle], b)
    behind = _lengths(a[middle:][::-1], b[::-1])[::-1]
    cut = int(np.argmax(before + behind))
    yield from _between(a[:middle], b[:cut], at_a, at_b)
    yield from _between(a[middle:], b[cut:], at_a + middle, at_b + cut)


def _rows(a: list[int], b: list[int]) -> Iterator[int]:
    """Yield the rows of the table; a bit that is not set is a place where the length rises."""
    places: dict[int, int] = {}
    for at, token in enumerate(b):
        places[token] = places.get(token, 0) | 1 << at
    mask = (1 << len(b)) - 1
    row = mask
    for token in a:
        hits = row & places.get(token, 0)
        row = ((row + hits) | (row - hits)) & mask
        yield row


def _lengths(a: list[int], b: list[int]) -> npt.NDArray[np.int64]:
    """Return how long the common subsequence of a and each beginning of b is."""
    row = deque(_rows(a, b), maxlen=1).pop()
    packed = np.frombuffer(row.to_bytes(len(b) // 8 + 1, "little"), np.uint8)
    flat = np.unpackbits(packed, count=len(b), bitorder="little")
    return np.concatenate(([0], np.cumsum(1 - flat.astype(np.int64))))


def _whole(a: list[int], b: list[int]) -> list[tuple[int, int]]:
    """Return the pairs of two lists whose table is kept, found from its end."""
    rows = list(_rows(a, b))
    found: list[tuple[int, int]] = []
    i, j = len(a), len(b)
    while i and j:
        if rows[i - 1] >> (j - 1) & 1:
            j -= 1
            continue
        i -= 1
        if i == 0 or rows[i - 1] >> (j - 1) & 1:
            j -= 1
            found.append((i, j))
    return found[::-1]
