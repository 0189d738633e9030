"""Observer of function and module calls in every thread, and the function mode through which torch
reports them. It numbers API calls.

A function that is called inside another call is not observed. torch's own modules count as calls,
also if one is inside another; other modules only have a mark.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any

from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from rankdump._frameworks.api_calls import ApiCallCounter
from rankdump._frameworks.torch.apis.api_names import (
    TorchApi,
    TorchApiCatalogue,
    find_module_api,
    make_torch_api,
)
from rankdump._frameworks.torch.apis.api_recorder import OpenTorchApiCall, TorchApiRecorder
from rankdump._frameworks.torch.apis.call_sites import CallSites, CodeOwner
from rankdump._frameworks.torch.internals import (
    call_past_modes,
    has_mode,
    is_tracing,
    push_mode,
    remove_mode,
)
from rankdump._frameworks.torch.module_hooks import (
    ErrorFingerprint,
    exclude_from_compilation,
    find_handled_error,
    find_raised_error,
    fingerprint_error,
    is_caused_by,
    run_shielded,
)
from rankdump._frameworks.torch.module_tree import (
    COMPILED_WARNING,
    FUSED_WARNING,
    ModuleOperator,
    ModuleTree,
    build_module_tree,
)
from rankdump._frameworks.torch.tensors import TorchObserver
from rankdump._layout.api_tree import ApiCall


class ApiMode(TorchFunctionMode):
    """Function mode that intercepts function calls in the threads in which it is installed.

    Calls inside a call are not intercepted, because torch removes a mode from the stack while it
    runs.
    """

    def __init__(self, handler: TorchApiCallObserver) -> None:
        super().__init__()
        self._handler: TorchApiCallObserver | None = handler
        self._catalogue = TorchApiCatalogue()

    @exclude_from_compilation
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a call; if it is an API call, the handler runs it."""
        handler = self._handler
        # When a compiler traces this function, it returns here.
        if handler is None or is_dynamo_compiling():
            return func(*args, **(kwargs or {}))
        try:
            found = self._catalogue[func]
        except TypeError:  # an unhashable callable belongs to the user
            found = None
        # Most functions of tensors are not API calls, and return here.
        if found is None or is_tracing():
            return func(*args, **(kwargs or {}))
        return handler.handle_call(found, func, types, args, kwargs or {}, inspect.currentframe())

    def retire(self) -> None:
        """Stop intercepting calls in all threads, and remove the mode from this one."""
        self._handler = None
        remove_mode(self)


@dataclass(frozen=True, slots=True)
class ModuleRole:
    """Role of a module's calls in an API dump."""

    layer: str
    """Dotted path of the module; empty for the model itself."""
    api: TorchApi | None
    """API of the module; None if the module does not count as a call."""
    hides_inner_calls: bool
    """Whether functions called inside it do not count as calls."""


def build_observed_tree(model: Module) -> ModuleTree:
    """Return the modules of a model that have a role in an API dump, with notes on the others.

    Modules inside a compiled region are part of the region and left out.
    """
    tree = build_module_tree(model)
    boundaries = [each.module for each in tree.operators if each.boundary]
    bounded = set(map(id, boundaries))
    compiled = {
        id(inner) for module in boundaries for inner in module.modules() if inner is not module
    }
    operators = [
        each
        for each in (*tree.operators, *tree.fused)
        if id(each.module) not in compiled and (each.boundary or id(each.module) not in bounded)
    ]
    notes = tuple(note for note in tree.notes if note != FUSED_WARNING)
    return replace(tree, operators=tuple(operators), notes=notes)


def find_module_role(operator: ModuleOperator) -> ModuleRole:
    """Return the role of an observed module's calls."""
    components = operator.scope.path.split("/")[1:]
    layer = ".".join(each.rpartition("-")[0] for each in components)
    called = find_module_api(operator.module)
    return ModuleRole(layer, called, called is not None or operator.boundary)


@dataclass(slots=True, eq=False)
class OpenApiModuleCall:
    """Call of a module that has begun."""

    operator: ModuleOperator
    role: ModuleRole
    prior_error: int
    """Identity of the error that the script was handling when the call began."""
    is_mode_removed: bool = False
    """Whether the function mode is removed during the call."""
    open_call: OpenTorchApiCall | None = None


class ApiThreadState(threading.local):
    """Open calls and function mode of one thread."""

    def __init__(self) -> None:
        self.frames: list[OpenApiModuleCall] = []
        self.generation = 0
        self.is_known = False
        """Whether the function mode was installed in this thread before."""
        self.running = 0
        """Number of running functions for which torch has removed the mode."""
        self.paused = False
        self.last_error: ErrorFingerprint | None = None
        """Last error with which a module call ended."""


class TorchApiCallObserver:
    """Observes all function calls of a process, and the module calls of one model."""

    def __init__(
        self,
        observer: TorchObserver,
        sites: CallSites,
        recorder: TorchApiRecorder,
    ) -> None:
        self.mode = ApiMode(self)
        self._observer = observer
        self._sites = sites
        self._recorder = recorder
        self._roles: dict[ModuleOperator, ModuleRole] = {}
        self._numbers = ApiCallCounter()
        self._thread = ApiThreadState()
        self._generation = 0

    def restart(self) -> None:
        """Observe the calling thread, in which no paused or hidden call is still running."""
        self._generation += 1
        self._frames()
        if not self._thread.running:
            self._install_mode()

    def handle_call(
        self,
        found: TorchApi,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        frame: FrameType | None,
    ) -> Any:
        """Run a call of a function that `frame` makes, and record it if it counts; return or raise
        what the function does.
        """
        # A subclass of tensors must receive an operator as a whole.
        if found.is_composite and (not found.kind or set(types) <= {Tensor}):
            return self._call_composite(function, types, args, kwargs)
        open_call = self._begin_function(
            found, args, kwargs, None if frame is None else frame.f_back
        )
        thread = self._thread
        thread.running += 1
        try:
            result = function(*args, **kwargs)
        except BaseException:
            if open_call is not None:
                end_raised = partial(self._recorder.end_call, raised=True)
                run_shielded(end_raised, self.report_failure, open_call, None)
            raise
        finally:
            thread.running -= 1
        if open_call is not None:
            run_shielded(self._recorder.end_call, self.report_failure, open_call, result)
        return result

    def enter(
        self, operator: ModuleOperator, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        """Open a call of a module."""
        thread, frames = self._thread, self._frames()
        if thread.running:
            return
        if not thread.is_known:  # a thread is observed from its first call of a module on
            self._install_mode()
        role = self._find_role(operator)
        frame = OpenApiModuleCall(operator, role, find_handled_error())
        frames.append(frame)
        if role.hides_inner_calls:
            frame.is_mode_removed = remove_mode(self.mode)
        if role.api is not None:
            number = self._numbers.next_number(role.api.op_type)
            if self._observer.armed:
                self._record_mark(role)
                frame.open_call = _open_call(role.api, number)
                self._recorder.begin_call(frame.open_call, args, kwargs, inspect.currentframe())

    def leave(self, operator: ModuleOperator, result: object) -> None:
        """Close a call of a module, and the calls inside it that never returned."""
        thread, frames = self._thread, self._frames()
        at = len(frames) - 1
        while at >= 0 and frames[at].operator is not operator:
            at -= 1
        if at < 0 or thread.running:
            return
        closing = frames[at:]
        del frames[at:]
        if any(frame.is_mode_removed for frame in closing):
            self._install_mode()
        for frame in reversed(closing[1:]):
            if frame.open_call is not None:
                self._recorder.end_call(frame.open_call, None)
        self._close_frame(closing[0], result)

    def pause(self) -> None:
        """Stop observing in this thread until `resume`."""
        self._thread.paused = remove_mode(self.mode)

    def resume(self) -> None:
        """Continue observing in this thread."""
        if self._thread.paused:
            self._thread.paused = False
            self._install_mode()

    def report_failure(self, error: Exception) -> None:
        """Report that a hook could not do its work."""
        self._observer.report_failure(error)

    def _close_frame(self, frame: OpenApiModuleCall, result: object) -> None:
        thread, error = self._thread, find_raised_error(frame.prior_error)
        raised = error is not None and not is_caused_by(error, thread.last_error)
        thread.last_error = None if error is None else fingerprint_error(error)
        if frame.open_call is not None:
            self._recorder.end_call(frame.open_call, result, raised=raised)
        elif frame.role.api is None and error is None and self._observer.armed:
            self._record_mark(frame.role)

    def _record_mark(self, role: ModuleRole) -> None:
        if role.layer:
            self._recorder.record_layer_mark(role.layer, inspect.currentframe())

    def _call_composite(
        self, function: Callable[..., Any], types: Any, args: Sequence[Any], kwargs: Any
    ) -> Any:
        """Run a composite function and keep observing, because the calls inside it count."""
        push_mode(self.mode)
        try:
            return call_past_modes(function, types, args, kwargs)
        finally:
            remove_mode(self.mode)

    def _begin_function(
        self,
        found: TorchApi,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        frame: FrameType | None,
    ) -> OpenTorchApiCall | None:
        """Begin the call of a function; return None if the call is not recorded."""
        try:
            named = self._find_name_at(found, args, frame)
            if named is None:
                return None
            number = self._numbers.next_number(named.op_type)
            if not self._observer.armed:
                return None
        except Exception as error:
            self.report_failure(error)
            return None
        open_call = _open_call(named, number)
        run_shielded(self._recorder.begin_call, self.report_failure, open_call, args, kwargs, frame)
        return open_call

    def _find_name_at(
        self, found: TorchApi, args: Sequence[Any], frame: FrameType | None
    ) -> TorchApi | None:
        """Return the API of a function at this place of the script; None if it does not count as a
        call there.
        """
        whose = self._sites.find_owner(frame)
        if whose is not CodeOwner.USER:
            if whose is CodeOwner.COMPILED:
                self._observer.recorder.warn_once(COMPILED_WARNING)
            return None
        if found.kind != "Tensor" or frame is None:
            return found
        function, operator = self._sites.find_wrapping_names(frame)
        if function:
            return make_torch_api("Functional", function)
        return make_torch_api("Tensor", operator) if operator else found

    def _install_mode(self) -> None:
        self._thread.is_known = True
        if not has_mode(self.mode):
            push_mode(self.mode)

    def _find_role(self, operator: ModuleOperator) -> ModuleRole:
        role = self._roles.get(operator)
        if role is None:
            role = self._roles[operator] = find_module_role(operator)
        return role

    def _frames(self) -> list[OpenApiModuleCall]:
        thread = self._thread
        if thread.generation != self._generation:
            thread.frames.clear()
            thread.generation = self._generation
        return thread.frames


def _open_call(found: TorchApi, number: int) -> OpenTorchApiCall:
    call = ApiCall(found.kind, found.name, number)
    return OpenTorchApiCall(call, call.name, found.op_type)
