"""Tells when a model is called that is not inside another call: where an iteration begins.

Whoever is told may have hooks installed; a call that has begun already hears of them here.
"""

# torch's stubs leave hooks and handles untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from rankdump.adapters.torch.guard import uncompiled
from rankdump.adapters.torch.internals import pre_hooks_of, traced
from rankdump.adapters.torch.modules import in_a_copy, inert


class Outermost:
    """Watches models until `remove`; calls of one inside another's do not count."""

    def __init__(self, begins: Callable[[int], None]) -> None:
        """`begins` is given the number of the model, before anything of its call is observed."""
        self._begins = begins
        self._handles: list[RemovableHandle] = []
        self._watched = 0
        self._open = threading.local()

    def watch(self, model: Module) -> None:
        """Watch a model too; it has the next number, from 0."""
        before = _Before(self, model, self._watched)
        self._watched += 1
        self._handles += (
            model.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
            model.register_forward_hook(_After(self, model), always_call=True),
        )

    def remove(self) -> None:
        """Leave the models as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def enter(self, number: int) -> bool:
        """Count a call in; return whether it is an outermost one, which was told."""
        depth = self._depth
        self._open.depth = depth + 1
        if depth == 0:
            self._begins(number)
        return depth == 0

    def leave(self) -> None:
        """Count a call out."""
        self._open.depth = max(0, self._depth - 1)

    @property
    def _depth(self) -> int:
        return getattr(self._open, "depth", 0)


class _OfModel:
    """What stands in a model for us; a copy of the model gets one that does nothing."""

    def __init__(self, outermost: Outermost, model: Module) -> None:
        self._outermost = outermost
        self._model = model

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return inert

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return in_a_copy, ()


class _Before(_OfModel):
    def __init__(self, outermost: Outermost, model: Module, number: int) -> None:
        super().__init__(outermost, model)
        self._number = number

    @uncompiled
    def __call__(self, module: Module, args: Any, kwargs: Any) -> None:
        # A replica shares the hooks of its model.
        if module is not self._model or traced():
            return
        known = set(pre_hooks_of(module))
        if self._outermost.enter(self._number):
            # torch has listed the hooks of this call: those installed meanwhile are not among them.
            for key, hook in list(pre_hooks_of(module).items()):
                if key not in known:
                    hook(module, args, kwargs)


class _After(_OfModel):
    @uncompiled
    def __call__(self, module: Module, args: Any, result: Any) -> None:
        if module is self._model and not traced():
            self._outermost.leave()
