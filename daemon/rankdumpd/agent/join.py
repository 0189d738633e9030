"""Tensors of an operator, each in a `bin` file of its own, to one file of the operator.

Elements are copied as they lie on the disk, packed or not. A crash between any two steps leaves
the operator's file whole or its tensors' files whole, and doing it again ends the same.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence

from rankdump.codec import Codec
from rankdump.codec.packing import pack_each
from rankdump.contract.key import Side
from rankdump.contract.layout.layouts import Layout
from rankdumpd.agent.binhead import bin_head
from rankdumpd.agent.members import Joined, Member, Piece
from rankdumpd.agent.names import Names
from rankdumpd.agent.tree import Tree


class Joiner:
    """Joins tensors of one session; not for several threads."""

    def __init__(self, tree: Tree, names: Names, codec: Codec, layout: Layout) -> None:
        self._tree, self._names = tree, names
        self._codec, self._layout = codec, layout

    def join(self, members: Sequence[Member], *, mark: str) -> list[Joined]:
        """Write the file of an operator, or raise OSError and leave everything as it is.

        The tensors' own files stay until `remove`, but for that of the only one.
        """
        first = members[0]
        if len({(each.tensor.side, each.tensor.slot) for each in members}) < len(members):
            raise OSError(errno.EEXIST, "an operator with two tensors in one slot")
        self._names.note(first.whole)
        if len(members) == 1:
            self._tree.move(first.path, first.whole.name)
            return [Joined(first.sequence, first.bytes_stored)]
        ordered = sorted(members, key=_place)
        tensors = [each.tensor for each in ordered]
        header = bin_head(first.op_name, first.timestamp_us, tensors, self._layout)
        head = b"".join(pack_each(self._codec, (header,)).parts)
        pieces = [_piece(each) for each in ordered]
        self._tree.join(first.whole.folder, first.whole.name, head, pieces, mark=mark)
        shares = [piece.length for piece in pieces]
        shares[0] += len(head)
        return [Joined(each.sequence, share) for each, share in zip(ordered, shares, strict=True)]

    def remove(self, members: Iterable[Member]) -> None:
        """Remove the own files of tensors that stand in their operators' files."""
        self._tree.remove(each.path for each in members if each.path != each.whole.path)


def _place(member: Member) -> tuple[bool, int]:
    """Return what sorts tensors as their elements stand in a file: inputs first."""
    return member.tensor.side is Side.OUTPUT, member.tensor.slot


def _piece(member: Member) -> Piece:
    return Piece(member.path, member.head_bytes, member.bytes_stored - member.head_bytes)
