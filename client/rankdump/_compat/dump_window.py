"""Window from one `api_dump_start` to its stop, which is one session of the process, and the
recorder that discards everything while no window is open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from rankdump._compat.dump_request import ApiCallScope, ApiDumpRequest
from rankdump._core.graph import GraphNode, GraphParameter
from rankdump._core.plan import DumpPlan
from rankdump._core.rank_identity import RankIdentity
from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import (
    CollectiveCall,
    IterationHook,
    Recorder,
    StartedEvent,
    TensorObservation,
)
from rankdump._core.timeouts import GroupTimeout
from rankdump._frameworks.api_calls import ApiOptions
from rankdump._layout.api_tree import LAYER_KIND, ApiCall
from rankdump._session.agent_finder import AgentAddress
from rankdump._session.framework_adapters import ApiIterationHook
from rankdump._session.rank_session import Session


class NullRecorder:
    """A `Recorder` without a session."""

    armed = False
    is_describing = False
    wants_arguments = False

    def begin_call(self, graph: int, op_name: str) -> None:
        """Do nothing."""

    def is_wanted(self, graph: int, op_name: str, side: TensorSide) -> bool:
        """Return that nothing is kept."""
        return False

    def observe(self, observation: TensorObservation) -> None:
        """Do nothing."""

    def count_loss(
        self, graph: int, op_type: str, op_name: str, side: TensorSide, slot: int, reason: str
    ) -> None:
        """Count nothing."""

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
        self, begun: StartedEvent, *, name: str = "", collective: CollectiveCall | None = None
    ) -> None:
        """Do nothing."""

    def record_group_timeout(self, timeout: GroupTimeout) -> None:
        """Do nothing."""

    def warn_once(self, message: str) -> None:
        """Write no warning: warnings are written while a dump runs."""


COUNTING_OPTIONS = ApiOptions()
"""How calls are counted while nothing is dumped."""


@dataclass(frozen=True, slots=True)
class DumpDestination:
    """Plan, rank and agent of a dump."""

    plan: DumpPlan
    identity: RankIdentity
    agent: AgentAddress
    step: int
    """The step that runs when it begins."""


def make_window_identity(identity: RankIdentity, number: int) -> RankIdentity:
    """Return who a process is in its dump of that number, from 0.

    A rank has one session of a job, and orders are told apart by their jobs.
    """
    return replace(identity, job_id=f"{identity.job_id}-{number + 1}") if number else identity


class DumpWindow:
    """One session, from now until `close`; the hook is its owner's and only lent to it."""

    def __init__(
        self, destination: DumpDestination, hook: ApiIterationHook, options: ApiOptions
    ) -> None:
        self.selected_calls = 0
        """Calls that the scope selected so far."""
        self.selected_marks = 0
        """Marks of modules that it selected."""
        self._scope = options.scope
        self._hook = hook
        self._options = ApiOptions(
            retain_backward=options.retain_backward,
            filter_data=options.filter_data,
            filter_stack=options.filter_stack,
            layers_once=options.layers_once,
            scope=self._select_call,
        )
        self._session = Session(
            destination.plan, identity=destination.identity, agent=destination.agent
        )
        self._session.step(destination.step)
        self._session.observe(self._lend_hook, "")

    @property
    def undelivered(self) -> int:
        """Tensors that had not reached an agent at the end."""
        return self._session.undelivered

    def begin_step(self, number: int) -> None:
        """Begin a step."""
        self._session.step(number)

    def close(self) -> None:
        """End it; what was dumped is in the tree then."""
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
    """Hook of a session that continues to count calls after the session has detached it."""

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
    """Return what of the calls is recorded."""
    holds: Callable[[ApiCall], bool] = scope.is_selected
    return ApiOptions(
        retain_backward=retain_backward,
        filter_data=request.filter_data,
        filter_stack=request.filter_stack,
        layers_once=request.keeps_elements,
        scope=holds,
    )
