"""Knows which operator or parameter made a tensor, for as long as an iteration is described.

A tensor is known by its identity, a view by what it shows, and what came of unobserved
arithmetic by the graph that autograd keeps: there it may have several makers. Keeps no tensor
and no part of that graph alive.
"""

# torch's stubs leave the nodes of autograd's graph partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rankdump.adapters.torch.internals import node_number, version_of, viewed

_MAX_NODES = 256
"""Nodes of autograd's graph looked at for one tensor."""


@dataclass(frozen=True, slots=True)
class _Known:
    tensor: weakref.ref[Tensor]
    version: int
    maker: str


class Producers:
    """The makers of one iteration's tensors, by name."""

    def __init__(self) -> None:
        self._by_identity: dict[int, _Known] = {}
        self._by_node: dict[tuple[int, int], str] = {}

    def forget(self) -> None:
        """Know nothing any more."""
        self._by_identity.clear()
        self._by_node.clear()

    def made(self, tensor: Tensor, name: str) -> str:
        """Note that an operator returned a tensor; return which one made it.

        That is another one when the tensor was only handed through.
        """
        known = self._known(tensor)
        if known is not None and known.version == _version(tensor):
            return known.maker
        self._by_identity[id(tensor)] = _Known(weakref.ref(tensor), _version(tensor), name)
        node = tensor.grad_fn
        if node is not None:
            self._by_node[threading.get_ident(), node_number(node)] = name
        return name

    def makers(self, tensor: Tensor) -> tuple[str, ...]:
        """Return who made a tensor; nobody for one from outside."""
        known = self._known(tensor)
        if known is not None and known.version == _version(tensor):
            return (known.maker,)
        behind = self._behind(tensor.grad_fn)
        if behind:
            return behind
        base = viewed(tensor)
        known = known or (None if base is None else self._known(base))
        return () if known is None else (known.maker,)

    def _known(self, tensor: Tensor) -> _Known | None:
        known = self._by_identity.get(id(tensor))
        return known if known is not None and known.tensor() is tensor else None

    def _behind(self, start: Any) -> tuple[str, ...]:
        """Return the nearest known makers in autograd's graph."""
        found: dict[str, None] = {}
        waiting, seen = deque([start]), {None}
        while waiting and len(seen) <= _MAX_NODES:
            node = waiting.popleft()
            if node in seen:
                continue
            seen.add(node)
            maker = self._of_node(node)
            if maker is not None:
                found[maker] = None
            else:
                waiting.extend(following for following, _ in node.next_functions)
        return tuple(found)

    def _of_node(self, node: Any) -> str | None:
        leaf = None if node.next_functions else getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            known = self._known(leaf)
            return None if known is None else known.maker
        return self._by_node.get((threading.get_ident(), node_number(node)))


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else version_of(tensor)
