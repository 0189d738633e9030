"""Layouts that a script declared for tensors by name, and their tensors. A declaration covers the
gradient of its tensor too. Never raises.
"""

from __future__ import annotations

from collections.abc import Callable

from rankdump._core.layout_declaration import LayoutDeclaration
from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import TensorObservation
from rankdump._core.selection import GRADIENTS_PREFIX
from rankdump._core.tensor_layout import TensorLayout

_OPERATORS_PREFIX = "Default/"
_OTHER_SIDE = {TensorSide.INPUT: TensorSide.OUTPUT, TensorSide.OUTPUT: TensorSide.INPUT}


class DeclaredLayouts:
    """Declarations of one session."""

    def __init__(self, warn_once: Callable[[str], None]) -> None:
        self._warn_once = warn_once
        self.declarations: dict[tuple[str, TensorSide, int], LayoutDeclaration] = {}
        """By operator, side and slot; without any a tensor costs one branch."""
        self._made: dict[tuple[LayoutDeclaration, tuple[int, ...]], TensorLayout | str] = {}

    def add(
        self, op_name: str, side: TensorSide, slot: int, declaration: LayoutDeclaration
    ) -> None:
        """Declare a tensor; the last declaration of a tensor counts."""
        self.declarations[op_name, side, slot] = declaration
        # A backward reads gradients of what the forward wrote; a parameter's has one output.
        is_operator = op_name.startswith(_OPERATORS_PREFIX)
        gradient_side = _OTHER_SIDE[side] if is_operator else side
        self.declarations[GRADIENTS_PREFIX + op_name, gradient_side, slot] = declaration

    def apply_to(self, observation: TensorObservation) -> None:
        """Set the layout of an observed tensor, if it was declared and agrees with its shape."""
        name, side, slot = observation.op_name, observation.side, observation.slot
        declaration = self.declarations.get((name, side, slot))
        if declaration is None:
            return
        source = observation.tensor
        layout = self._make_layout(declaration, source.shape)
        if isinstance(layout, str):
            self._warn_once(f"layout of {name} {side.value} {slot} is not recorded: {layout}")
        else:
            source.layout = layout

    def find_layout(self, name: str, shape: tuple[int, ...]) -> TensorLayout | None:
        """Return the layout of a parameter of that shape, if it was declared and agrees with it."""
        declaration = self.declarations.get((name, TensorSide.OUTPUT, 0))
        layout = None if declaration is None else self._make_layout(declaration, shape)
        return None if isinstance(layout, str) else layout

    def _make_layout(
        self, declaration: LayoutDeclaration, shape: tuple[int, ...]
    ) -> TensorLayout | str:
        key = (declaration, shape)
        layout = self._made.get(key)
        if layout is None:
            layout = self._made[key] = declaration.make_layout(shape)
        return layout
