"""Hands tensors and events of one model to the recorder; a failure is counted here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from rankdump.adapters.mindspore.tensors import source_of
from rankdump.adapters.observing import HOOK_FAILED, ModelObserver
from rankdump.contract.key import Side
from rankdump.values import Observation, TensorSource

_Result = TypeVar("_Result")


class Observer(ModelObserver):
    """What the parts of the adapter share: the recorder, and the number of the graph."""

    def tensor(
        self,
        op_type: str,
        op_name: str,
        side: Side,
        slot: int,
        argument: str,
        read: Callable[[], TensorSource | str],
        *,
        state: bool = False,
    ) -> None:
        """Hand over what `read` gives, or count it as lost for the reason it gives."""
        place = (self.graph, op_type, op_name, side, slot)
        try:
            source = read()
            if isinstance(source, str):
                self.recorder.lose(*place, source)
                return
            self.recorder.observe(Observation(*place, argument, source, state))
        except Exception as error:
            self.recorder.lose(*place, HOOK_FAILED)
            self.failed(error)

    def shielded(self, body: Callable[..., _Result], *args: Any) -> _Result | None:
        """Run a hook's body; None after an error, which is reported. Interrupts pass through."""
        try:
            return body(*args)
        except Exception as error:
            self.failed(error)
            return None


def reader_of(tensor: Any) -> Callable[[], TensorSource | str]:
    """Return what reads a tensor when it is asked to."""
    return lambda: source_of(tensor)
