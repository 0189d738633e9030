"""Hands tensors and events of one model to the recorder; a failure is counted here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from rankdump.adapters.mindspore.tensors import source_of
from rankdump.contract.key import Side
from rankdump.values import Begun, Observation, Recorder, TensorSource

logger = logging.getLogger(__name__)

HOOK_FAILED = "hook_failed"
"""Reason of a tensor lost through an error of our own."""

_Result = TypeVar("_Result")


class Observer:
    """What the parts of the adapter share: the recorder, and the number of the graph."""

    def __init__(self, recorder: Recorder, graph: int) -> None:
        self.recorder = recorder
        self.graph = graph

    @property
    def armed(self) -> bool:
        """Whether this process records the running iteration; never in a forked worker."""
        return self.recorder.armed

    def wants(self, op_name: str, side: Side) -> bool:
        """Return whether tensors of that operator and side are kept in this iteration."""
        return self.recorder.wants(self.graph, op_name, side)

    def begins(self, op_name: str) -> Begun:
        """Record the begin of an operator."""
        return self.recorder.started(graph=self.graph, name=op_name)

    def event(self, op_name: str) -> None:
        """Record an event without duration."""
        self.recorder.finished(self.begins(op_name))

    def settled(self, op_name: str, *, raised: bool = False) -> None:
        """Say that one call of an operator is over."""
        self.recorder.settled(self.graph, op_name, raised=raised)

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

    def failed(self, error: Exception) -> None:
        """Report that a hook could not do its work."""
        logger.debug("hook failed", exc_info=error)
        self.recorder.warn_once(f"a hook failed: {type(error).__name__}: {error}")


def reader_of(tensor: Any) -> Callable[[], TensorSource | str]:
    """Return what reads a tensor when it is asked to."""
    return lambda: source_of(tensor)
