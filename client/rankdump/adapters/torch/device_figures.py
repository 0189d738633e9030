"""Figures about a tensor, computed where it lies and read back for many tensors at once.

Nothing here waits for an accelerator before `read`. Takes tensors of any device, so that the
host's can be held against those that `contract.statistics` computes.
"""

# torch's stubs do not know its linear algebra.
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from rankdump.adapters.torch.internals import unobserved
from rankdump.contract.errors import ProtocolError
from rankdump.contract.plan import Precision
from rankdump.contract.statistics import DEVICE_ITEMS, number
from rankdump.values import Deferred

Kind = Literal["number", "truth", "null"]

NULL = "null"
"""Stands where no figure can be computed (mindspore-dump.md 3.7)."""

_BLOCK = 1 << 24
"""Integers converted at a time for their norm: what is taken from the accelerator is bounded."""
_COMPARABLE = {
    "uint16": torch.int32,
    "uint32": torch.int64,
    "uint64": torch.float64,
}


@dataclass(frozen=True, slots=True, eq=False)
class DeviceFigures:
    """The figures of one tensor, still on its device."""

    row: Tensor
    """One number for each item that is not null."""
    kinds: tuple[Kind, ...]
    """How each item's text comes from its number."""
    stream: Any
    """Where the row is being computed; None on a device without streams."""

    def read(self, others: Sequence[Deferred]) -> list[tuple[str, ...]]:
        """Return the texts of these others: one copy to the host for each device they lie on."""
        texts: dict[int, tuple[str, ...]] = {}
        by_device: dict[torch.device, list[tuple[int, DeviceFigures]]] = {}
        for index, other in enumerate(others):
            if not isinstance(other, DeviceFigures):
                raise ProtocolError(f"figures {index}: {type(other).__name__} is of another kind")
            by_device.setdefault(other.row.device, []).append((index, other))
        for device, found in by_device.items():
            numbers = iter(_fetched(device, [figures for _, figures in found]))
            texts.update((index, _texts(figures.kinds, numbers)) for index, figures in found)
        return [texts[index] for index in range(len(others))]


def start(tensor: Tensor, items: Sequence[str], precision: Precision) -> DeviceFigures:
    """Start computing the items of a tensor that has elements.

    `high` takes mean and norm in float32 at least, `low` in the tensor's own type; of integers
    both are taken in float64. Maximum and minimum keep the tensor's type.
    """
    with unobserved():
        wide = _widest(tensor.device)
        kinds: list[Kind] = []
        numbers: list[Tensor] = []
        compute = _Computing(tensor, precision)
        for item in items:
            found = compute.item(item)
            kinds.append(NULL if found is None else _kind(found))
            numbers += [] if found is None else [found.to(wide)]
        row = torch.stack(numbers) if numbers else torch.empty(0, dtype=wide, device=tensor.device)
    return DeviceFigures(row, tuple(kinds), _stream(tensor.device))


def comparable(tensor: Tensor) -> Tensor:
    """Return the elements in a type that has an order in torch; of complex ones, both parts."""
    tensor = tensor.detach()
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    name = str(tensor.dtype).removeprefix("torch.")
    if name.startswith("float8"):
        # Holds every value of every such type, exactly.
        return tensor.to(torch.bfloat16)
    kind = _COMPARABLE.get(name)
    return tensor if kind is None else tensor.to(kind)


class _Computing:
    """The items of one tensor; maximum and minimum are found together, in one pass."""

    def __init__(self, tensor: Tensor, precision: Precision) -> None:
        self._complex = tensor.is_complex()
        self._elements = comparable(tensor)
        self._type = _accumulator(self._elements, precision)
        self._extremes: tuple[Tensor, Tensor] | None = None
        self._by_item: dict[str, Callable[[], Tensor]] = dict(
            zip(DEVICE_ITEMS, (self._max, self._min, self._mean, self._norm), strict=True)
        )

    def item(self, name: str) -> Tensor | None:
        """Return the item as a scalar; None for one that is not to be had here."""
        compute = self._by_item.get(name)
        if compute is None or self._complex:
            return None
        try:
            return compute()
        except NotImplementedError:
            # The device has no such function for that type.
            return None

    def _max(self) -> Tensor:
        return self._both()[1]

    def _min(self) -> Tensor:
        return self._both()[0]

    def _both(self) -> tuple[Tensor, Tensor]:
        if self._extremes is None:
            low, high = torch.aminmax(self._elements)
            self._extremes = (low, high)
        return self._extremes

    def _mean(self) -> Tensor:
        return torch.mean(self._elements, dtype=self._type)

    def _norm(self) -> Tensor:
        if self._elements.is_floating_point():
            return _norm(self._elements, self._type)
        flat = self._elements.reshape(-1)
        blocks = (flat[at : at + _BLOCK] for at in range(0, flat.numel(), _BLOCK))
        norms = [_norm(block.to(self._type), self._type) for block in blocks]
        return _norm(torch.stack(norms), self._type)


def _norm(elements: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.linalg.vector_norm(elements, dtype=dtype)


def _accumulator(elements: Tensor, precision: Precision) -> torch.dtype:
    if not elements.is_floating_point():
        return _widest(elements.device)
    if precision == "low":
        return elements.dtype
    return torch.promote_types(elements.dtype, torch.float32)


def _widest(device: torch.device) -> torch.dtype:
    # Apple's devices have no float64.
    return torch.float32 if device.type == "mps" else torch.float64


def _kind(found: Tensor) -> Kind:
    return "truth" if found.dtype is torch.bool else "number"


def _texts(kinds: Sequence[Kind], numbers: Iterator[float]) -> tuple[str, ...]:
    return tuple(NULL if kind == NULL else _text(kind, next(numbers)) for kind in kinds)


def _text(kind: Kind, value: float) -> str:
    return str(bool(value)) if kind == "truth" else number(value)


def _fetched(device: torch.device, figures: Sequence[DeviceFigures]) -> list[float]:
    """Return all numbers of these figures, which lie on one device."""
    with unobserved():
        now = _stream(device)
        for stream in {each.stream for each in figures} - {now, None}:
            now.wait_stream(stream)
        joined = torch.cat([each.row for each in figures]).cpu()
    return cast("list[float]", joined.tolist())


def _stream(device: torch.device) -> Any:
    """Return the stream that this thread's work on the device goes into, if it has any."""
    current = getattr(getattr(torch, device.type, None), "current_stream", None)
    return None if current is None or device.type == "cpu" else current(device)
