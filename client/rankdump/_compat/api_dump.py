"""Life cycle of a dump that a script controls with troubleshooter's calls: init, then start and
stop, and the count of a model's steps. Wrong calls of a script raise an error; internal failures
are logged, and training continues.

Between a start and its stop a window with one session is open; outside of a window, calls are
counted and nothing is recorded.

A step ends at the first call of the model after a step of its optimizer. Several optimizers in one
step count once, and so do several forward passes before it (accumulation, closures). A call in
another mode, such as an evaluation, or without gradients is a step of its own; without an
optimizer, every call is a step.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rankdump._compat import dump_files
from rankdump._compat.dump_request import (
    ApiCallScope,
    ApiDumpRequest,
    ApiDumpSetting,
    make_call_scope,
    make_dump_plan,
)
from rankdump._core.log_once import LogOnce
from rankdump._core.rank_identity import RankIdentity, identify_rank
from rankdump._core.recorder_protocol import IterationHook, Recorder
from rankdump._frameworks.api_calls import ApiOptions
from rankdump._frameworks.null_recorder import NullRecorder
from rankdump._layout.api_tree import LAYER_KIND, ApiCall
from rankdump._session import default_session
from rankdump._session.agent_finder import AgentFinder, default_agent_finder
from rankdump._session.framework_adapters import (
    MODEL_TYPES,
    ApiFramework,
    ApiIterationHook,
    ModelStepWatch,
    find_api_framework,
)
from rankdump._session.rank_session import Session, load_session_modules, never_raises
from rankdump.errors import RankdumpError

_logger = logging.getLogger("rankdump")


class StepCounter:
    """Counts the steps of one model from 0; safe to use from several threads."""

    def __init__(self) -> None:
        self.number = 0
        """Number of the current step."""
        self._manner = ""
        """Mode of the model's last call; empty before the first call."""
        self._trained = False
        self._optimized = False
        self._set_by_script = False
        self._lock = threading.Lock()

    @property
    def upcoming_step(self) -> int:
        """Number of the step of the next call, as far as it is known."""
        return self.number + self._optimized

    def note_call(self, manner: str, *, trains: bool, has_optimizer: Callable[[], bool]) -> bool:
        """Count a call of the model; return whether a step begins with it.

        `has_optimizer` returns whether there is an optimizer whose step is yet to come.
        """
        with self._lock:
            if self._set_by_script:
                return False
            goes_on = not self._manner or (
                not self._optimized
                and manner == self._manner
                and self._trained
                and trains
                and has_optimizer()
            )
            self._manner, self._trained, self._optimized = manner, trains, False
            if not goes_on:
                self.number += 1
            return not goes_on

    def note_optimizer_step(self) -> None:
        """Count the end of an optimizer's step."""
        with self._lock:
            # A step of an optimizer before any call of the model is not a step of this model.
            self._optimized = self._optimized or bool(self._manner)

    def set_step(self, number: int | None = None) -> int:
        """Set the number of the step, by default the next one; calls are no longer counted as
        steps.
        """
        with self._lock:
            following = self.number + 1 if self._set_by_script or self._manner else self.number
            self._set_by_script, self._optimized = True, False
            self.number = following if number is None else number
            return self.number


@dataclass(slots=True)
class _ObservedModel:
    """The model of `api_dump_init`, with its hooks and its step counter."""

    setting: ApiDumpSetting
    framework: ApiFramework
    hook: ApiIterationHook
    watch: ModelStepWatch
    steps: StepCounter
    is_fresh: bool = True
    """Whether nothing was dumped yet, so that the files in the folder belong to an earlier dump."""

    def detach(self) -> None:
        """Remove all hooks from the model."""
        self.watch.remove()
        self.hook.detach()


class ApiDumpController:
    """State of the API dump of a process; safe to use from several threads."""

    def __init__(
        self,
        environ: Mapping[str, str] | None = None,
        agents: AgentFinder = default_agent_finder,
        framework_of: Callable[[object], ApiFramework | None] = find_api_framework,
    ) -> None:
        """`environ` and `agents` are by default those of the process."""
        self._framework_of = framework_of
        self._environ = os.environ if environ is None else environ
        self._agents = agents
        self._lock = threading.RLock()
        self._observed: _ObservedModel | None = None
        self._request = ApiDumpRequest()
        self._scope = ApiCallScope()
        self._window: DumpWindow | None = None
        self._windows = 0
        self._log_once = LogOnce(_logger)

    def init(self, net: object, setting: ApiDumpSetting) -> None:
        """Count the calls of a model from now on; TypeError for an unknown framework."""
        framework = self._framework_of(net)
        if framework is None:
            raise TypeError(f"api_dump_init: net {net!r} is not allowed; allowed: {MODEL_TYPES}")
        with self._lock:
            self._prepare_session()
            self._observe(net, setting, framework)

    def start(self, request: ApiDumpRequest) -> None:
        """Dump from now on; RuntimeError before `init`, ValueError for an impossible request."""
        with self._lock:
            observed = self._get_observed("api_dump_start")
            make_dump_plan(observed.setting, request, observed.framework.NAME)
            if request.overflow_check:
                self._log(
                    "overflow_check is not used: every call is dumped, and `rankdump stats "
                    f"{observed.setting.output_path} --nonfinite` lists those with an overflow"
                )
            self._open_window(observed, request)

    def stop(self) -> None:
        """Stop dumping until the next `start`, and deliver everything that was dumped."""
        with self._lock:
            observed = self._get_observed("api_dump_stop")
            self._close_window(observed)

    def step(self, number: int | None = None) -> None:
        """Begin a step, by default the next one; from now on steps are no longer detected."""
        with self._lock:
            if self._observed is not None:
                self._begin_step(self._observed.steps.set_step(number))

    # -- notifications of the model

    @never_raises
    def called(self, manner: str, *, trains: bool) -> None:
        """Count a call of the model."""
        observed = self._observed
        if observed is None:
            return
        with self._lock:
            if observed.steps.note_call(
                manner, trains=trains, has_optimizer=observed.watch.has_optimizer
            ):
                self._begin_step(observed.steps.number)

    @never_raises
    def stepped(self) -> None:
        """Count the step of an optimizer of the model."""
        if self._observed is not None:
            self._observed.steps.note_optimizer_step()

    # -- implementation

    def _get_observed(self, call: str) -> _ObservedModel:
        if self._observed is None:
            raise RuntimeError(f"{call}: api_dump_init was not called; call it first")
        return self._observed

    @never_raises
    def _prepare_session(self) -> None:
        """Prepare what takes a second, so that no step has to wait; the agent starts while the
        script runs.
        """
        self._agents.prepare(self._environ)
        load_session_modules()

    @never_raises
    def _observe(self, net: object, setting: ApiDumpSetting, framework: ApiFramework) -> None:
        earlier, self._observed = self._observed, None
        self._end_window()
        if earlier is not None:
            earlier.detach()
        dropouts = framework.without_dropout(net)
        layers = f"{dropouts} {'layer' if dropouts == 1 else 'layers'} of the model"
        self._log(f"dropout is turned off from now on, in {layers} and in functional calls")
        hook = framework.api_hook(net, NullRecorder(), graph=0, options=COUNTING_OPTIONS)
        hook.iteration_begins(0, False)
        watch = framework.watch_steps(net, self)
        self._observed = _ObservedModel(setting, framework, hook, watch, StepCounter())
        default_session.set_step_listener(self.step)
        if setting.compare_statedict:
            rank = self._identify(setting).rank
            framework.save_state(net, dump_files.make_rank_folder(setting.output_path, rank))

    @never_raises
    def _open_window(self, observed: _ObservedModel, request: ApiDumpRequest) -> None:
        self._end_window()
        if request != self._request or observed.is_fresh:
            self._request, self._scope = request, make_call_scope(request.mode, request.scope)
        setting, framework = observed.setting, observed.framework.NAME
        try:
            plan = make_dump_plan(setting, request, framework)
            identity = make_window_identity(self._identify(setting), self._windows)
            agent = self._agents.find(self._environ, waits=False)
            step = observed.steps.upcoming_step
            if observed.is_fresh and not agent.missing:
                dump_files.clear_rank_folder(setting.output_path, identity.rank, framework)
                observed.is_fresh = False
        except (RankdumpError, OSError) as error:
            _logger.error("rankdump: nothing will be dumped: %s", error)
            return
        options = ApiOptions(
            retain_backward=setting.retain_backward,
            filter_data=request.filter_data,
            filter_stack=request.filter_stack,
            layers_once=request.keeps_elements,
            scope=self._scope.is_selected,
        )
        session = Session(plan, identity=identity, agent=agent)
        self._window = DumpWindow(session, step, observed.hook, options)
        self._windows += 1
        if not agent.missing:
            self._log(f"API dump is written to {self._find_folder(observed)}")

    @never_raises
    def _close_window(self, observed: _ObservedModel) -> None:
        window = self._window
        self._end_window()
        if window is None:
            self._log("api_dump_stop: no API dump was running")
            return
        for sentence in self._scope.list_missing():
            self._log(f"API dump: {sentence}")
        if window.session.undelivered:
            self._log("API dump stopped", about="stopped")
        elif window.selected_calls or window.selected_marks:
            count, folder = window.selected_calls, self._find_folder(observed)
            text = f"API dump stopped: {count} calls were dumped to {folder}"
            self._log(text, about="stopped")
        else:
            every = self._request.mode == "all"
            why = "no API call was made" if every else "no call is in scope"
            self._log(f"API dump stopped and nothing was dumped: {why}")

    def _begin_step(self, number: int) -> None:
        if self._window is not None:
            self._window.session.step(number)

    def _end_window(self) -> None:
        window, self._window = self._window, None
        if window is not None:
            # After this call the tree has everything that was dumped.
            window.session.close()

    def _find_folder(self, observed: _ObservedModel) -> Path:
        rank = self._identify(observed.setting).rank
        return dump_files.find_rank_folder(observed.setting.output_path, rank)

    def _identify(self, setting: ApiDumpSetting) -> RankIdentity:
        return identify_rank(self._environ, tree=str(setting.output_path))

    def _log(self, text: str, *, about: str = "") -> None:
        # A script that starts and stops in every step must not fill the job's log.
        level = logging.WARNING if self._log_once.is_new(about or text) else logging.INFO
        _logger.log(level, "rankdump: %s", text)


COUNTING_OPTIONS = ApiOptions()
"""Options that are used for counting calls while nothing is dumped."""


def make_window_identity(identity: RankIdentity, number: int) -> RankIdentity:
    """Return the identity of a rank in its dump with this number, counted from 0.

    A rank has only one session of a job, so each further dump is a job of its own.
    """
    return replace(identity, job_id=f"{identity.job_id}-{number + 1}") if number else identity


class DumpWindow:
    """One session, from its creation to `close`, that uses a borrowed hook."""

    def __init__(
        self, session: Session, step: int, hook: ApiIterationHook, options: ApiOptions
    ) -> None:
        """`step` is the step in which the window begins."""
        self.selected_calls = 0
        """Number of calls that the scope selected."""
        self.selected_marks = 0
        """Number of layer marks that the scope selected."""
        self._scope = options.scope
        self._hook = hook
        self._options = replace(options, scope=self._select_call)
        self.session = session
        session.step(step)
        session.observe(self._lend_hook, "")

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
    """Hook that is lent to a session; after `detach`, the borrowed hook keeps counting calls."""

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
