"""Window from one `api_dump_start` to its stop, with one session; while no window is open, calls
are counted and nothing is recorded.
"""

from __future__ import annotations

from dataclasses import replace

from rankdump._compat.dump_request import ApiCallScope, ApiDumpRequest
from rankdump._core.rank_identity import RankIdentity
from rankdump._core.recorder_protocol import IterationHook, Recorder
from rankdump._frameworks.api_calls import ApiOptions
from rankdump._frameworks.null_recorder import NullRecorder
from rankdump._layout.api_tree import LAYER_KIND, ApiCall
from rankdump._session.framework_adapters import ApiIterationHook
from rankdump._session.rank_session import Session

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
