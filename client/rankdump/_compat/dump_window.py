"""Window from one `api_dump_start` to its stop, with one session, and the recorder that discards
everything while no window is open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rankdump._compat.dump_request import ApiCallScope, ApiDumpRequest
from rankdump._core.events import CallOutcome, UnseenReason
from rankdump._core.graph import GraphNode, GraphParameter
from rankdump._core.rank_identity import RankIdentity
from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import (
    UNDIVIDED_PASS,
    CollectiveCall,
    IterationHook,
    Recorder,
    StartedEvent,
    TensorObservation,
)
from rankdump._core.timeouts import GroupTimeout
from rankdump._frameworks.api_calls import ApiOptions
from rankdump._layout.api_tree import LAYER_KIND, ApiCall
from rankdump._session.framework_adapters import ApiIterationHook
from rankdump._session.rank_session import Session


class NullRecorder:
    """A `Recorder` that records nothing."""

    armed = False
    is_describing = False
    wants_arguments = False
    declared_pass = UNDIVIDED_PASS
    card = None

    def begin_call(self, graph: int, op_name: str) -> None:
        """Do nothing."""

    def is_wanted(self, graph: int, op_name: str, side: TensorSide) -> bool:
        """Return False."""
        return False

    def names_operators(self, graph: int) -> bool:
        """Return False."""
        return False

    def observe(self, observation: TensorObservation) -> None:
        """Do nothing."""

    def count_loss(
        self, graph: int, op_type: str, op_name: str, side: TensorSide, slot: int, reason: str
    ) -> None:
        """Do nothing."""

    def end_call(self, graph: int, op_name: str, *, raised: bool = False) -> None:
        """Do nothing."""

    def set_marks(self, graph: int, names: frozenset[str]) -> None:
        """Do nothing."""

    def describe(self, graph: int, node: GraphNode) -> None:
        """Do nothing."""

    def describe_parameter(self, graph: int, parameter: GraphParameter) -> None:
        """Do nothing."""

    def record_arguments(
        self, graph: int, op_type: str, op_name: str, values: Mapping[str, str]
    ) -> None:
        """Do nothing."""

    def record_call_stack(self, graph: int, op_name: str, stack: tuple[str, ...]) -> None:
        """Do nothing."""

    def start_event(
        self, *, graph: int, name: str, collective: CollectiveCall | None = None
    ) -> StartedEvent:
        """Return an event that is not recorded."""
        return StartedEvent(0, 0, graph, name, collective, 0)

    def finish_event(
        self,
        begun: StartedEvent,
        *,
        name: str = "",
        collective: CollectiveCall | None = None,
        outcome: int = CallOutcome.UNKNOWN,
    ) -> None:
        """Do nothing."""

    def record_group_timeout(self, timeout: GroupTimeout) -> None:
        """Do nothing."""

    def report_unseen_collectives(self, group: str, reason: UnseenReason, count: int) -> None:
        """Do nothing: an API dump has no order."""

    def warn_once(self, message: str) -> None:
        """Do nothing."""


COUNTING_OPTIONS = ApiOptions()
"""Options for counting calls while nothing is dumped."""


def make_window_identity(identity: RankIdentity, number: int) -> RankIdentity:
    """Return the identity of a rank in its dump of that number, from 0.

    A rank has one session of a job, so each further dump is a job of its own.
    """
    return replace(identity, job_id=f"{identity.job_id}-{number + 1}") if number else identity


class DumpWindow:
    """One session, from creation to `close`, with a borrowed hook."""

    def __init__(
        self, session: Session, step: int, hook: ApiIterationHook, options: ApiOptions
    ) -> None:
        """The window begins in `step`."""
        self.selected_calls = 0
        """Number of calls that the scope selected."""
        self.selected_marks = 0
        """Number of layer marks that the scope selected."""
        self._scope = options.scope
        self._hook = hook
        self._options = replace(options, scope=self._select_call)
        self._session = session
        self._session.step(step)
        self._session.observe(self._lend_hook, "")

    @property
    def undelivered(self) -> int:
        """Number of tensors that were not delivered to an agent."""
        return self._session.undelivered

    def begin_step(self, number: int) -> None:
        """Begin a step."""
        self._session.step(number)

    def close(self) -> None:
        """Close the session; afterwards the tree has everything that was dumped."""
        self._session.close()

    def _select_call(self, call: ApiCall) -> bool:
        selected = self._scope(call)
        if call.kind == LAYER_KIND:
            self.selected_marks += selected
        else:
            self.selected_calls += selected
        return selected

    def _lend_hook(self, recorder: Recorder, *, graph: int) -> IterationHook:
        self._hook.record_with(recorder, self._options)
        return _LentHook(self._hook)


class _LentHook:
    """Hook for a session; after `detach`, the borrowed hook continues to count calls."""

    def __init__(self, hook: ApiIterationHook) -> None:
        self._hook = hook
        self._iteration = 0

    def iteration_begins(self, iteration: int, armed: bool) -> None:
        self._iteration = iteration
        self._hook.iteration_begins(iteration, armed)

    def iteration_ends(self, iteration: int, armed: bool) -> None:
        self._hook.iteration_ends(iteration, armed)

    def detach(self) -> None:
        self._hook.record_with(NullRecorder(), COUNTING_OPTIONS)
        self._hook.iteration_begins(self._iteration, False)


def make_api_options(
    request: ApiDumpRequest, scope: ApiCallScope, *, retain_backward: bool
) -> ApiOptions:
    """Return the options of a hook for a request and a scope."""
    return ApiOptions(
        retain_backward=retain_backward,
        filter_data=request.filter_data,
        filter_stack=request.filter_stack,
        layers_once=request.keeps_elements,
        scope=scope.is_selected,
    )
