"""What is dumped from one `api_dump_start` to its stop: one session of the process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from rankdump.adapters.api_calls import ApiOptions
from rankdump.contract.layout.api_name import LAYER, ApiCall
from rankdump.contract.plan import DumpPlan
from rankdump.identity import Identity
from rankdump.migrator.request import Request
from rankdump.migrator.scopes import Scope
from rankdump.migrator.silence import Silence
from rankdump.session import Session
from rankdump.session.agent import AgentAddress
from rankdump.session.apis import ApiHook
from rankdump.values import IterationHook, Recorder

SILENT = ApiOptions()
"""How calls are counted while nothing is dumped."""


@dataclass(frozen=True, slots=True)
class Going:
    """Whose dump it is, and where it goes."""

    plan: DumpPlan
    identity: Identity
    agent: AgentAddress
    step: int
    """The step that runs when it begins."""


def windowed(identity: Identity, number: int) -> Identity:
    """Return who a process is in its dump of that number, from 0.

    A rank has one session of a job, and orders are told apart by their jobs.
    """
    return replace(identity, job_id=f"{identity.job_id}-{number + 1}") if number else identity


class Window:
    """One session, from now until `close`; the hook is its owner's and only lent to it."""

    def __init__(self, going: Going, hook: ApiHook, options: ApiOptions) -> None:
        self.calls = 0
        """Calls that the scope selected so far."""
        self.marks = 0
        """Marks of modules that it selected."""
        self._scope = options.scope
        self._hook = hook
        self._options = ApiOptions(
            retain_backward=options.retain_backward,
            filter_data=options.filter_data,
            filter_stack=options.filter_stack,
            layers_once=options.layers_once,
            scope=self._holds,
        )
        self._session = Session(going.plan, identity=going.identity, agent=going.agent)
        self._session.step(going.step)
        self._session.observe(self._lend, "")

    @property
    def undelivered(self) -> int:
        """Tensors that had not reached an agent at the end."""
        return self._session.undelivered

    def step(self, number: int) -> None:
        """Begin a step."""
        self._session.step(number)

    def close(self) -> None:
        """End it; what was dumped is in the tree then."""
        self._session.close()

    def _holds(self, call: ApiCall) -> bool:
        held = self._scope(call)
        if call.kind == LAYER:
            self.marks += held
        else:
            self.calls += held
        return held

    def _lend(self, recorder: Recorder, *, graph: int) -> IterationHook:
        self._hook.record_with(recorder, self._options)
        return _Lent(self._hook)


class _Lent:
    """A hook that goes on counting when the session lets go of it."""

    def __init__(self, hook: ApiHook) -> None:
        self._hook = hook
        self._iteration = 0

    def iteration_begins(self, iteration: int, armed: bool) -> None:
        self._iteration = iteration
        self._hook.iteration_begins(iteration, armed)

    def iteration_ends(self, iteration: int, armed: bool) -> None:
        self._hook.iteration_ends(iteration, armed)

    def detach(self) -> None:
        self._hook.record_with(Silence(), SILENT)
        self._hook.iteration_begins(self._iteration, False)


def options_of(request: Request, scope: Scope, *, retain_backward: bool) -> ApiOptions:
    """Return what of the calls is recorded."""
    holds: Callable[[ApiCall], bool] = scope.holds
    return ApiOptions(
        retain_backward=retain_backward,
        filter_data=request.filter_data,
        filter_stack=request.filter_stack,
        layers_once=request.keeps_elements,
        scope=holds,
    )
