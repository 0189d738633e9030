"""Observation of one attached model: its module calls as events with their tensors, and the
gradients of each call's inputs and results. It is the composition root of the adapter, and costs
nothing in iterations that are not armed.

Each thread has its own stack of open calls. Of the calls that an error passes through, only the
innermost one is reported as raised. Module backward hooks are not used, because they wrap arguments
and results in a node of autograd, which makes in-place modules fail. A tensor hook sees the
gradient summed over all consumers, and changes nothing. A backward operator is one event, which is
recorded when its first gradient arrives; autograd's steps inside it are not visible. It ends when
the gradients of all inputs of the forward have arrived, or at once if it expects none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from torch import Tensor, is_grad_enabled
from torch.nn import Module, Parameter
from torch.utils.hooks import RemovableHandle

from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import ForwardPass, IterationHook, Recorder, StartedEvent
from rankdump._frameworks.model_observer import BACKWARD_SIDE
from rankdump._frameworks.operator_names import CallLeaf, list_call_leaves, list_result_leaves
from rankdump._frameworks.torch.card_observer import TorchCardObserver
from rankdump._frameworks.torch.collectives import CollectiveSubscription
from rankdump._frameworks.torch.forward_passes import ForwardPassFinder, continue_pass
from rankdump._frameworks.torch.graph_description import GraphDescriber, NodeDraft
from rankdump._frameworks.torch.internals import (
    explain_uncompilable_observation,
    find_backward_step,
    has_compiled_code,
    is_tracing,
    is_wrapped,
    read_structure,
)
from rankdump._frameworks.torch.layouts import LayoutFinder
from rankdump._frameworks.torch.module_hooks import (
    ErrorFingerprint,
    ModuleHooks,
    exclude_from_compilation,
    find_handled_error,
    find_raised_error,
    fingerprint_error,
    is_caused_by,
    run_shielded,
)
from rankdump._frameworks.torch.module_tree import (
    COMPILED_WARNING,
    INSIDE_COMPILED_HINT,
    OTHER_COMPILED_WARNING,
    REMOVED_HOOKS_WARNING,
    ModuleOperator,
    ModuleTree,
    build_module_tree,
    is_run_elsewhere,
    read_module_arguments,
)
from rankdump._frameworks.torch.parameters import ModuleMarkReporter, TorchParameterObserver
from rankdump._frameworks.torch.recomputation import (
    ForwardCallLog,
    TorchOperatorCall,
    find_first_tensor,
)
from rankdump._frameworks.torch.tensors import TorchObserver, make_compiled_source

if TYPE_CHECKING:
    from rankdump._frameworks.torch.compiled_regions import CompiledRegionObserver

# torch's stubs leave hooks and handles untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false


class ModuleGradientObserver:
    """Places the gradient hooks of one attached model."""

    def __init__(self, observer: TorchObserver, describer: GraphDescriber) -> None:
        self.observer = observer
        self._describer = describer
        self._hooks = TensorHookRegistry()

    def watch_gradients(
        self, call: TorchOperatorCall, side: TensorSide, leaves: Iterable[CallLeaf], *, again: bool
    ) -> None:
        """Add gradient hooks to the tensors that a call read or wrote.

        `again` says that the call is a recomputation: slots that its forward already watches are
        skipped, so that no gradient is recorded twice. Gradients have the number of the forward
        call.
        """
        arrivals = call.arrivals
        # Arriving gradients make the event of the backward, whether or not their values are wanted.
        is_watched = side is TensorSide.OUTPUT
        for leaf in leaves:
            tensor = leaf.value
            if not isinstance(tensor, Tensor) or not is_hookable(tensor):
                continue
            if not is_watched:
                is_watched = self.observer.is_selected(call.names.gradient, TensorSide.OUTPUT)
                if not is_watched:
                    return
            if not again:
                arrivals.watch_slot(side, leaf.slot)
            elif arrivals.watches(side, leaf.slot):
                continue
            self._hooks.add_hook(tensor, _ModuleGradientHook(self, call, side, leaf))
            arrivals.expect_gradient(side, leaf.slot, id(tensor))

    def remove_leaf_hooks(self) -> None:
        """Remove the hooks from tensors that may outlive the iteration."""
        self._hooks.remove_leaf_hooks()

    def record_gradient(
        self, call: TorchOperatorCall, side: TensorSide, leaf: CallLeaf, *, compiled: bool = False
    ) -> None:
        """Record a gradient that has arrived for a tensor on this side of the forward.

        `compiled` says that compiled code computed the gradient.
        """
        observer, name = self.observer, call.names.gradient
        if not observer.recorder.armed:
            return
        arrivals = call.arrivals
        if arrivals.begins_run(side, leaf.slot):
            observer.record_event(name)
            if self._describer.is_active:
                run_shielded(self._describer.describe_gradient, observer.report_failure, call)
        backward_side = BACKWARD_SIDE[side]
        op_type, forward_pass = call.scope.op_type, call.forward_pass
        read = make_compiled_source if compiled else None
        observer.record_tensors(op_type, name, backward_side, [leaf], forward_pass, read)
        if arrivals.is_complete:
            observer.end_call(name)


class _ModuleGradientHook:
    """Gradient hook of one slot; it keeps the description of a tensor, never the tensor."""

    __slots__ = ("_argument", "_call", "_gradients", "_side", "_slot")

    def __init__(
        self,
        gradients: ModuleGradientObserver,
        call: TorchOperatorCall,
        side: TensorSide,
        leaf: CallLeaf,
    ) -> None:
        self._gradients = gradients
        self._call = call
        self._side = side
        self._slot = leaf.slot
        self._argument = leaf.argument

    @exclude_from_compilation
    def __call__(self, gradient: Tensor) -> None:
        if not is_tracing():
            leaf, gradients = CallLeaf(self._slot, self._argument, gradient), self._gradients
            failed = gradients.observer.report_failure
            run_shielded(gradients.record_gradient, failed, self._call, self._side, leaf)


class TensorHookRegistry:
    """Gradient hooks on the tensors of one model; hooks on leaf tensors stay in place for later
    backwards until `remove_leaf_hooks`.
    """

    def __init__(self) -> None:
        self._on_leaves: list[RemovableHandle] = []

    def add_hook(self, tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
        """Register a hook for each gradient of a tensor."""
        handle = cast("Callable[[object], RemovableHandle]", tensor.register_hook)(hook)
        if tensor.is_leaf:
            self._on_leaves.append(handle)

    def remove_leaf_hooks(self) -> None:
        """Remove the hooks that may outlive the iteration."""
        handles, self._on_leaves = self._on_leaves, []
        for handle in handles:
            handle.remove()


def is_hookable(tensor: Tensor) -> bool:
    """Return whether a hook on the tensor will see a gradient that nothing else records."""
    # The class is compared first, because `isinstance(tensor, Parameter)` is a Python method of
    # torch and slow.
    if not tensor.requires_grad or (type(tensor) is not Tensor and isinstance(tensor, Parameter)):
        return False
    # Inside torch.func a hook would become part of the function that is transformed.
    return not is_wrapped(tensor)


@dataclass(slots=True, eq=False)
class OpenModuleCall:
    """A module call that has begun."""

    operator: ModuleOperator
    call: TorchOperatorCall | None
    """The numbered call; None inside the boundary of a compiled region, which is the same call."""
    name: str
    """Full scope name of the call; empty if `call` is None."""
    is_recomputation: bool
    """Whether the call is a recomputation."""
    prior_error: int
    """Identity of the error that the script was handling when the call began."""
    forward_pass: ForwardPass
    has_grad: bool
    """Whether gradients were enabled when the call began."""
    is_compiled: bool = False
    """Whether compiled code runs the call, which passes on tensors and gradients by itself."""
    begun: StartedEvent | None = None
    inner_error: ErrorFingerprint | None = None
    """Error with which a call inside this call ended."""
    node_draft: NodeDraft | None = None


class _OpenCallStack(threading.local):
    """Open calls of a thread, innermost last."""

    def __init__(self) -> None:
        self.frames: list[OpenModuleCall] = []
        self.generation = -1


class ModuleCallObserver:
    """Observes the module calls of one attached model."""

    def __init__(
        self,
        observer: TorchObserver,
        call_log: ForwardCallLog,
        gradients: ModuleGradientObserver,
        describer: GraphDescriber,
        mark_reporter: ModuleMarkReporter,
        pass_finder: ForwardPassFinder,
        card: TorchCardObserver | None = None,
    ) -> None:
        """`card` observes the causes of the step when the model is called."""
        self._observer, self._card = observer, card
        self._pass_finder = pass_finder
        self._call_log = call_log
        self._gradients = gradients
        self._describer = describer
        self._mark_reporter = mark_reporter
        self._stack = _OpenCallStack()
        self._generation = 0

    def restart(self) -> None:
        """Forget open calls, because an iteration begins or observation ends.

        Open calls of another thread are forgotten at that thread's next call.
        """
        self._generation += 1
        self._frames()

    def enter(
        self, operator: ModuleOperator, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        """Open a call and record its arguments."""
        if self._observer.recorder.armed:
            leaves = list_call_leaves(args, kwargs)
            self.open_call(operator, leaves, has_grad=is_grad_enabled())

    def open_call(
        self,
        operator: ModuleOperator,
        leaves: Sequence[CallLeaf],
        *,
        has_grad: bool,
        compiled: bool = False,
    ) -> OpenModuleCall:
        """Open a call with these arguments, and record them; `compiled` says that compiled code
        runs the call.
        """
        self._mark_reporter.report_changed_marks()
        frames = self._frames()
        around = frames[-1] if frames else None
        if around is None and self._card is not None:
            run_shielded(self._card.observe_call, self.report_failure, leaves)
        error = find_handled_error()
        if around is not None and _is_inside_boundary(around.operator, operator):
            inner_pass = around.forward_pass
            frames.append(OpenModuleCall(operator, None, "", False, error, inner_pass, has_grad))
            return frames[-1]
        call, again = self._number_call(operator, leaves)
        if not again:
            # Nearly all calls inherit their pass, so this is done without calling a function.
            if around is not None and around.has_grad is has_grad:
                call.forward_pass = around.forward_pass
            elif around is not None:
                call.forward_pass = continue_pass(around.forward_pass, has_grad=has_grad)
            else:
                recorder = self._observer.recorder
                begin_pass = self._pass_finder.begin_pass
                call.forward_pass = begin_pass(operator, recorder, has_grad=has_grad)
        names = call.names
        name = names.recomputation if again else names.forward
        frame = OpenModuleCall(
            operator, call, name, again, error, call.forward_pass, has_grad, compiled
        )
        frames.append(frame)
        graph, recorder = self._observer.graph, self._observer.recorder
        try:
            if not again:
                recorder.begin_call(graph, name)
            self._record_inputs(frame, call, leaves)
        finally:
            frame.begun = recorder.start_event(graph=graph, name=name)
        return frame

    def leave(self, operator: ModuleOperator, result: object) -> None:
        """Close a call and record its results; if the call raised, `result` is None."""
        frame = self._close_inner(operator)
        if frame is not None:
            raised = self._has_raised(frame)
            self._close_call(frame, lambda: list_result_leaves(result), raised=raised)

    def close_compiled_call(
        self, operator: ModuleOperator, leaves: Sequence[CallLeaf]
    ) -> OpenModuleCall | None:
        """Close a call that compiled code runs, and record its results."""
        frame = self._close_inner(operator)
        if frame is not None:
            self._close_call(frame, lambda: leaves, raised=False)
        return frame

    def _close_inner(self, operator: ModuleOperator) -> OpenModuleCall | None:
        """Remove the operator's innermost call, and end the calls inside it that never returned."""
        frames = self._frames()
        if frames and frames[-1].operator is operator:  # the usual case
            frame = frames.pop()
            self._finish_events((frame,))
            return frame
        at = len(frames) - 1
        while at >= 0 and frames[at].operator is not operator:
            at -= 1
        if at < 0:
            return None
        closing = frames[at:]
        del frames[at:]
        self._finish_events(closing)
        for frame in reversed(closing[1:]):
            self._end_frame(frame, [], raised=False)
        return closing[0]

    def _close_call(
        self, frame: OpenModuleCall, find: Callable[[], Sequence[CallLeaf]], *, raised: bool
    ) -> None:
        leaves: Sequence[CallLeaf] = []
        try:
            leaves = find()
            if frame.call is not None:
                self._record_side(frame, frame.call, TensorSide.OUTPUT, leaves)
        finally:
            self._end_frame(frame, leaves, raised=raised)

    def report_failure(self, error: Exception) -> None:
        """Report that a hook could not do its work."""
        self._observer.report_failure(error)

    def _frames(self) -> list[OpenModuleCall]:
        stack = self._stack
        if stack.generation != self._generation:
            self._finish_events(stack.frames)
            stack.frames.clear()
            stack.generation = self._generation
        return stack.frames

    def _record_inputs(
        self, frame: OpenModuleCall, call: TorchOperatorCall, leaves: Sequence[CallLeaf]
    ) -> None:
        recorder, op_type = self._observer.recorder, call.scope.op_type
        if self._describer.is_active:
            run_shielded(self._begin_description, self.report_failure, frame, call, leaves)
        if recorder.wants_arguments and not frame.is_recomputation:
            values = read_module_arguments(frame.operator.module)
            recorder.record_arguments(self._observer.graph, op_type, frame.name, values)
        self._record_side(frame, call, TensorSide.INPUT, leaves)

    def _record_side(
        self,
        frame: OpenModuleCall,
        call: TorchOperatorCall,
        side: TensorSide,
        leaves: Sequence[CallLeaf],
    ) -> None:
        op_type, forward_pass = call.scope.op_type, frame.forward_pass
        read = make_compiled_source if frame.is_compiled else None
        self._observer.record_tensors(op_type, frame.name, side, leaves, forward_pass, read)
        if not frame.is_compiled:
            self._gradients.watch_gradients(call, side, leaves, again=frame.is_recomputation)

    def _begin_description(
        self, frame: OpenModuleCall, call: TorchOperatorCall, leaves: Sequence[CallLeaf]
    ) -> None:
        if frame.is_compiled:
            leaves = hide_reuse(leaves)
        frame.node_draft = self._describer.begin_call(call, frame.operator.module, leaves)

    def _end_frame(
        self, frame: OpenModuleCall, leaves: Sequence[CallLeaf], *, raised: bool
    ) -> None:
        """Report the end of a call."""
        call, draft = frame.call, frame.node_draft
        if call is None:
            return
        if draft is not None:
            module = frame.operator.module
            leaves = hide_reuse(leaves) if frame.is_compiled else leaves
            ended = self._describer.end_call
            run_shielded(ended, self.report_failure, call, frame.name, module, draft, leaves)
        self._observer.end_call(frame.name, raised=raised)

    def _has_raised(self, frame: OpenModuleCall) -> bool:
        """Return whether a call raised an error of its own, and note the error at the enclosing
        call.
        """
        error = find_raised_error(frame.prior_error)
        if error is None:
            return False
        own = frame.call is not None and not is_caused_by(error, frame.inner_error)
        frames = self._frames()
        if frames:
            frames[-1].inner_error = (
                frame.inner_error if frame.call is None else fingerprint_error(error)
            )
        return own

    def _finish_events(self, frames: Sequence[OpenModuleCall]) -> None:
        for frame in reversed(frames):
            if frame.begun is not None:
                self._observer.recorder.finish_event(frame.begun)

    def _number_call(
        self, operator: ModuleOperator, leaves: Sequence[CallLeaf]
    ) -> tuple[TorchOperatorCall, bool]:
        first, step = find_first_tensor(leaves), find_backward_step()
        if step is not None:
            repeated = self._call_log.find_repeated_call(operator.scope, first, step)
            if repeated is not None:
                return repeated, True
        return self._call_log.add_forward_call(operator.scope, first), False


def _is_inside_boundary(outer: ModuleOperator, inner: ModuleOperator) -> bool:
    return outer.boundary and not inner.boundary and outer.scope == inner.scope


def hide_reuse(leaves: Sequence[CallLeaf]) -> list[CallLeaf]:
    """Return leaves with new objects for their tensors: compiled code reuses the objects, so an
    object does not identify the operator that produced its elements.
    """
    return [
        leaf._replace(value=leaf.value.detach()) if isinstance(leaf.value, Tensor) else leaf
        for leaf in leaves
    ]


def attach_model(
    model: Module, recorder: Recorder, graph: int, *, inside_compiled: bool = False
) -> IterationHook:
    """Observe a model from its next armed iteration on.

    `inside_compiled` also observes operators inside regions that torch.compile compiles from now
    on; if this torch does not allow that, a warning gives the reason once.
    """
    refusal = explain_uncompilable_observation() if inside_compiled else ""
    if refusal:
        recorder.warn_once(refusal)
    return TorchModelHook(model, recorder, graph, inside_compiled=inside_compiled and not refusal)


class TorchModelHook:
    """Hook of one attached model; it costs nothing in iterations that are not armed."""

    def __init__(
        self,
        model: Module,
        recorder: Recorder,
        graph: int,
        *,
        inside_compiled: bool = False,
        collectives: bool = True,
    ) -> None:
        self._model = model
        self._observer = TorchObserver(recorder, graph)
        self._call_log = ForwardCallLog()
        self._describer = GraphDescriber(self._observer)
        self._gradients = ModuleGradientObserver(self._observer, self._describer)
        self._mark_reporter = ModuleMarkReporter(model, self._observer)
        self._pass_finder = ForwardPassFinder()
        self._parameters = TorchParameterObserver(model, self._observer)
        self._card: TorchCardObserver | None = None
        if recorder.card is not None:
            self._card = TorchCardObserver(recorder.card, self._observer, self._parameters)
            self._parameters.use_causes(self._card.causes)
        self._calls = ModuleCallObserver(
            self._observer,
            self._call_log,
            self._gradients,
            self._describer,
            self._mark_reporter,
            self._pass_finder,
            self._card,
        )
        self._regions: CompiledRegionObserver | None = None
        if inside_compiled:
            # This import loads torch's compiler.
            from rankdump._frameworks.torch.compiled_regions import CompiledRegionObserver

            self._regions = CompiledRegionObserver(
                self._observer, self._calls, self._gradients, self._call_log
            )
        self._installed: ModuleHooks | None = None
        self._structure: list[object] | None = None
        self._iteration = -1
        self._is_idle = False
        """Whether nothing is installed or waiting, because the last iteration was not armed."""
        self._collectives = CollectiveSubscription(self._observer, wanted=collectives)

    def iteration_begins(self, iteration: int, armed: bool) -> None:
        """Install the hooks if the iteration is armed, else remove them.

        An iteration may be armed and disarmed several times; its call numbers continue.
        """
        self._is_idle = self._is_idle and not armed
        if not self._is_idle and iteration != self._iteration:
            self._restart(iteration)
        self._collectives.begin_iteration(iteration)
        if not self._is_idle:
            run_shielded(self._arm if armed else self._disarm, self._observer.report_failure)

    def iteration_ends(self, iteration: int, armed: bool) -> None:
        """Record parameters, buffers, and gradients that no optimizer used."""
        self._collectives.end_iteration()
        if self._is_idle:
            return
        if armed:
            run_shielded(self._mark_reporter.report_changed_marks, self._observer.report_failure)
            run_shielded(self._parameters.record_all, self._observer.report_failure)
            # Parameters are described at the end because lazy parameters get their shape only
            # within the iteration.
            run_shielded(self._describe_parameters, self._observer.report_failure)
            run_shielded(self._check_compiled_code, self._observer.report_failure)
            run_shielded(self._check_hooks, self._observer.report_failure)
        self._describer.clear()
        run_shielded(self._gradients.remove_leaf_hooks, self._observer.report_failure)
        self._is_idle = not armed and self._installed is None
        if self._is_idle:
            self._iteration = -1

    def _restart(self, iteration: int) -> None:
        """Forget the calls that were counted in the last iteration."""
        self._iteration = iteration
        self._call_log.restart()
        self._pass_finder.restart()
        self._parameters.restart()
        if self._card is not None:
            self._card.begin_step(iteration)
        if self._regions is not None:
            self._regions.restart()

    def _check_hooks(self) -> None:
        """Warn of hooks that the script removed; the next armed iteration has new ones."""
        if self._installed is not None and not self._installed.is_in_place():
            self._observer.recorder.warn_once(REMOVED_HOOKS_WARNING)
            self._uninstall()

    def _check_compiled_code(self) -> None:
        """Warn about compiled code that runs modules of the model without being observed."""
        if self._installed is None or not has_compiled_code():
            return
        tree = self._installed.tree
        if self._regions is not None:
            self._regions.check_regions(tree)
        has_gradients = self._parameters.has_gradients
        if is_run_elsewhere(tree, self._call_log.has_calls, has_gradients=has_gradients):
            self._observer.recorder.warn_once(OTHER_COMPILED_WARNING)

    @property
    def graph(self) -> int:
        """Number of the model's graph."""
        return self._observer.graph

    def iterate_named(self) -> Iterator[tuple[str, object]]:
        """Yield the parameters and buffers of the model with their names."""
        return self._parameters.iterate_named()

    def find_layout(self, tensor: object) -> LayoutFinder | None:
        """Return a function that finds the layout of a parameter, for a tensor that is a part of
        one.
        """
        return self._parameters.find_layout(tensor)

    def detach(self) -> None:
        """Restore the model."""
        regions, self._regions = self._regions, None
        if regions is not None:
            regions.detach()
        run_shielded(self._disarm, self._observer.report_failure)
        self._call_log.restart()
        self._collectives.unsubscribe()

    def _arm(self) -> None:
        self._calls.restart()
        self._describer.clear()
        self._pass_finder.watch_stages()
        structure = read_structure(self._model)
        self._parameters.start(structure)
        # The installed hooks keep the objects alive whose identities are in the structure.
        if self._installed is None or structure is None or structure != self._structure:
            self._install(build_module_tree(self._model))
            # The structure is read after the installation, because hooks around compiled regions
            # are part of it.
            self._structure = read_structure(self._model)
        else:
            self._mark_reporter.report_changed_marks()
        self._describe_parameters()

    def _install(self, tree: ModuleTree) -> None:
        for note in tree.notes:
            if note != COMPILED_WARNING:
                self._observer.recorder.warn_once(note)
            elif self._regions is None:
                hint = "" if explain_uncompilable_observation() else INSIDE_COMPILED_HINT
                self._observer.recorder.warn_once(note + hint)
        self._mark_reporter.report_marks(tree)
        if self._installed is None or not self._installed.tree.has_same_modules(tree):
            self._uninstall()
            self._install_hooks(tree)
        self._pass_finder.start(self._model, tree)

    def _install_hooks(self, tree: ModuleTree) -> None:
        if self._regions is None:
            self._installed = ModuleHooks(tree, self._calls)
        else:
            self._regions.set_operators(tree)
            self._installed = ModuleHooks(tree, self._calls, self._regions.make_tracer)

    def _disarm(self) -> None:
        if self._regions is None:
            self._uninstall()
        elif self._installed is None:
            # The hooks stay, because regions may be compiled in any iteration and must not be
            # compiled again.
            self._install_hooks(build_module_tree(self._model))
        self._pass_finder.stop()
        self._calls.restart()
        self._parameters.stop()
        self._gradients.remove_leaf_hooks()
        self._describer.clear()

    def _describe_parameters(self) -> None:
        if self._describer.is_active:
            self._describer.describe_parameters(self._parameters.iterate_named())

    def _uninstall(self) -> None:
        installed, self._installed = self._installed, None
        if installed is not None:
            installed.remove()
