"""What adapters of every framework hand to the recorder of one model; failures are counted here."""

from __future__ import annotations

import logging

from rankdump.contract.key import Side
from rankdump.values import Begun, Recorder

logger = logging.getLogger(__name__)

HOOK_FAILED = "hook_failed"
"""Reason of a tensor lost through an error of our own."""


class ModelObserver:
    """What the parts of an adapter share: the recorder, and the number of the graph."""

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

    def failed(self, error: Exception) -> None:
        """Report that a hook could not do its work."""
        logger.debug("hook failed", exc_info=error)
        self.recorder.warn_once(f"a hook failed: {type(error).__name__}: {error}")
