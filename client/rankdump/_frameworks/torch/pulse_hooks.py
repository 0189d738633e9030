"""Pulses of a torch model for the black box: extremes, sums of squares and counts of NaN and
infinities, of the outputs of the model's innermost modules and of the gradients of its parameters.

Only the modules and parameters in the part that the running step measures have hooks, because torch
calls a module without hooks faster. A gradient is measured when it arrives, before ranks reduce it,
or else when an optimizer is about to use it. A gradient that is not finite is a fault only if an
optimizer uses it: if the loss scale was too high, `GradScaler` skips the step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from rankdump._core.black_box import FaultKind
from rankdump._core.bounded_cache import remember
from rankdump._core.record import TensorKind, TensorSide
from rankdump._core.recorder_protocol import (
    LateRow,
    PulseRecorder,
    Recorder,
    TensorSource,
    TurnSpending,
)
from rankdump._core.tensor_fingerprint import compute_fingerprint, place_fingerprint
from rankdump._frameworks.model_observer import ModelObserver, capture_source_lines
from rankdump._frameworks.operator_names import (
    PARAMETER_TYPE,
    CallLeaf,
    list_call_leaves,
    list_result_leaves,
    make_gradient_name,
)
from rankdump._frameworks.tensor_turns import TensorTurns, TurnHook, clear_turns
from rankdump._frameworks.torch.communication import collective_recorder
from rankdump._frameworks.torch.device_tensors import (
    DevicePulses,
    LateStep,
    PulsePlace,
    is_measurable,
)
from rankdump._frameworks.torch.graph_description import FOREIGN_FILES
from rankdump._frameworks.torch.internals import is_tracing, is_wrapped
from rankdump._frameworks.torch.layouts import find_distribution, strip_distribution
from rankdump._frameworks.torch.module_hooks import (
    CopyableHook,
    exclude_from_compilation,
    run_shielded,
)
from rankdump._frameworks.torch.module_tree import (
    ModuleOperator,
    build_module_tree,
    iterate_parameters,
)
from rankdump._frameworks.torch.step_causes import StepCauseObserver
from rankdump._frameworks.torch.tensors import find_dtype_name, is_dense, make_torch_source
from rankdump._kernels.element_moments import COUNTS, ELEMENT_CODES, EXTREMES, SUMS
from rankdump._kernels.kernel_functions import KERNELS, FoundMoments

# torch's stubs leave hooks and handles untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

_PARTS = EXTREMES | SUMS | COUNTS
_FLOAT_CODES: Mapping[torch.dtype, int] = {
    getattr(torch, name): ELEMENT_CODES[name]
    for name in ("float16", "bfloat16", "float32", "float64")
}
_MAX_CACHED_KINDS = 64
"""Maximum number of cached kinds for each call of a module: shapes may differ from step to step."""
_TREE_CHECK_STEPS = 16
"""Number of steps after which the modules of a model are read again, because they may
have changed.
"""
_SETTLE_STEPS = 16
"""Number of steps after which it is settled how much of a model can be measured."""

_UNUSED_STEPS = 2
"""Number of consecutive steps without an optimizer after which gradients are measured when they
arrive.
"""

_measure = KERNELS.functions.measure_elements
_clock_ns = time.perf_counter_ns


def measure_tensor(tensor: Tensor) -> FoundMoments | None:
    """Return the moments of a floating-point tensor in host memory; None for any other tensor."""
    code = _FLOAT_CODES.get(tensor.dtype)
    if code is None or is_wrapped(tensor):
        return None
    # Nearly all tensors are plain, and each further function call would cost as much as the
    # measuring.
    if type(tensor) is not Tensor or not tensor.is_cpu or not tensor.is_contiguous():
        tensor = strip_distribution(tensor).detach()
        if not tensor.is_cpu:
            return None
        if not is_dense(tensor):
            tensor = tensor.contiguous()
    address = tensor.data_ptr()
    return _measure(address, tensor.numel(), code, _PARTS) if address else None


def fingerprint_tensor(tensor: Tensor, kind: TensorKind) -> bytes:
    """Return the fingerprint of a tensor that `measure_tensor` can measure; empty if it has none,
    such as a shard without a single place in its logical tensor.
    """
    placement = place_fingerprint(kind.dtype, kind.shape, kind.layout)
    if placement is None:
        return b""
    local = strip_distribution(tensor).detach().contiguous()
    return compute_fingerprint(local.data_ptr(), placement)


def describe_non_finite(moments: FoundMoments) -> str:
    """Return a text with the numbers of elements that are not finite.

    >>> describe_non_finite((4, 0.0, 0.0, 0.0, 0.0, 1, 0, 2, 0, 0, 0))
    '1 NaN and 2 -inf'
    """
    counts = zip(moments[5:8], ("NaN", "+inf", "-inf"), strict=True)
    return " and ".join(f"{count:,} {name}" for count, name in counts if count)


class PulsedModel(NamedTuple):
    """A measured model, and the recorder of its pulses."""

    pulses: PulseRecorder
    device: DevicePulses
    observer: ModelObserver
    graph: int
    name: str


class UsedParameters(NamedTuple):
    """Parameters that an optimizer steps."""

    counts: tuple[int, ...]
    """Number of parameters in each group, whether they belong to the model or not."""
    of_model: frozenset[int]
    """Identities of the parameters that belong to the model."""


class TorchPulseHook:
    """Measures the tensors of one attached model in every step."""

    def __init__(
        self, model: Module, recorder: Recorder, pulses: PulseRecorder, *, graph: int, name: str
    ) -> None:
        self._model, self._pulses = model, pulses
        self._observer = ModelObserver(recorder, graph)
        self._causes = StepCauseObserver(pulses if recorder.card is None else recorder.card)
        self._device = DevicePulses()
        pulses.use_call_lister(collective_recorder.list_calls)
        self._context = PulsedModel(pulses, self._device, self._observer, graph, name)
        self._modules: list[_ModulePulseHook] = []
        self._watched: list[_ModulePulseHook] = []
        self._parameters: list[_GradientPulseHook] = []
        self._wanted: list[_GradientPulseHook] = []
        """Gradient hooks that measure in this step."""
        self._named_modules: list[_ModulePulseHook] = []
        self._named_parameters: list[_GradientPulseHook] = []
        """Gradient hooks of parameters that watch rules name: they measure in every step."""
        self._parameter_ids: set[int] = set()
        self._used: dict[int, UsedParameters] = {}
        """Parameters that each optimizer steps, by identity of the optimizer, until the model is
        read again.
        """
        self._turns = TensorTurns()
        self._due: list[TurnHook] = []
        """Hooks whose tensors get a fingerprint in this step or are kept in full."""
        self._iteration = 0
        self._stepped_in = -1
        """Last iteration in which an optimizer used gradients of the model."""
        self._is_stepped = False
        """Whether an optimizer used gradients of the model in this step."""
        self._unused_steps = 0
        """Number of latest consecutive steps that called the model but in which no optimizer used
        its gradients.
        """
        self._handles: list[RemovableHandle] = []
        self._fixed: list[RemovableHandle] = []
        self._left_out = 0
        """Number of tensors that have no hook in this step."""
        self._installed = (0, 0, False)
        """Stride and part whose hooks are installed, and whether hooks of gradients are."""
        self._steps = 0
        self._module_ids: list[int] = []

    def iteration_begins(self, iteration: int, armed: bool) -> None:
        """Install the hooks of the part that this step measures."""
        self._iteration = iteration
        self._causes.begin_step(iteration)
        run_shielded(self._begin_step, self._observer.report_failure)

    def iteration_ends(self, iteration: int, armed: bool) -> None:
        """Add the pulses that were measured on accelerators in the step before."""
        run_shielded(self._end_step, self._observer.report_failure)

    def detach(self) -> None:
        """Restore the model."""
        run_shielded(self._finish_device, self._observer.report_failure)
        self._remove_hooks()
        for handle in self._fixed:
            handle.remove()
        self._fixed = []

    def hide(self, on: bool) -> None:
        """Suspend measuring, or resume it: a step that is repeated counts once."""
        self._observer.is_hidden = on

    def _end_step(self) -> None:
        begun_ns = _clock_ns()
        if self._is_stepped:
            self._unused_steps = 0
        else:
            self._unused_steps += self._causes.is_called
            if not self._installed[2]:
                # No optimizer stepped, as when gradients are accumulated over several iterations.
                self._measure_gradients([hook for hook in self._wanted if not hook.is_named])
        self._add_late_step(self._device.end_step(self._iteration))
        self._pulses.add_time(_clock_ns() - begun_ns, 0)

    def _finish_device(self) -> None:
        self._add_late_step(self._device.end_step(self._iteration))
        self._add_late_step(self._device.finish())

    def _add_late_step(self, step: LateStep | None) -> None:
        """Add the pulses that were measured on accelerators in an earlier step, and report its
        first fault.
        """
        if step is None:
            return
        rows = [
            LateRow(each.number, moments, each.gradient, each.source)
            for each, moments in step.pulses
        ]
        self._pulses.add_late_rows(step.iteration, rows)
        bad = [place for place, moments in step.pulses if any(moments[5:8])]
        place = next((each for each in bad if each.gradient is None), None)
        if place is not None:
            text = "the output of a module is the first of its step that is not finite"
            self._pulses.report_fault(
                FaultKind.NON_FINITE, text, place.kind, place.source, iteration=step.iteration
            )
        elif bad and self._stepped_in == step.iteration:
            text = "a gradient that an optimizer used is not finite"
            self._pulses.report_fault(
                FaultKind.NON_FINITE, text, bad[0].kind, iteration=step.iteration
            )

    def _begin_step(self) -> None:
        begun_ns = _clock_ns()
        if self._steps % _TREE_CHECK_STEPS == 0:
            self._used.clear()
            self._read_model()
        self._steps += 1
        clear_turns(self._due)
        self._turns.add_measured(self._watched)
        self._turns.add_measured(self._wanted)
        self._due = self._turns.choose_due(self._pulses)
        self._is_stepped = False
        wanted = self._pulses.stride, self._pulses.part, self._is_arrival_measured()
        if wanted != self._installed:
            self._install(*wanted)
        for hook in self._watched:
            hook.calls = 0
        for hook in self._wanted:
            hook.bad_text = ""
            hook.is_measured = False
        self._pulses.count_skipped(self._left_out)
        self._pulses.add_time(_clock_ns() - begun_ns)

    def _read_model(self) -> None:
        ids = [id(module) for module in self._model.modules()]
        if ids == self._module_ids:
            return
        self._module_ids = ids
        self._modules = [
            _ModulePulseHook(self._context, operator)
            for operator in build_module_tree(self._model).operators
            if is_innermost(operator)
        ]
        self._parameters = [
            _GradientPulseHook(self._context, name, parameter)
            for name, parameter in iterate_parameters(self._model)
            if parameter.requires_grad
        ]
        self._named_modules = [hook for hook in self._modules if hook.is_named]
        self._named_parameters = [hook for hook in self._parameters if hook.is_named]
        self._parameter_ids = {id(hook.parameter) for hook in self._parameters}
        self._turns = TensorTurns()
        self._pulses.note_tensor_count(max(len(self._modules), len(self._parameters)))
        self._remove_hooks()
        self._installed = (0, 0, False)
        if not self._fixed:
            self._fixed = [
                register_optimizer_step_pre_hook(self._before_step),
                self._model.register_forward_pre_hook(
                    _BatchHook(self._context, self._causes), with_kwargs=True
                ),
            ]

    def _is_arrival_measured(self) -> bool:
        """Return whether gradients are measured when they arrive, and not when an optimizer uses
        them.

        When gradients arrive, clipping has not yet turned all of them into NaN. But once a
        parameter has had hooks, torch calls them in every step, even if they were removed; so
        parameters get none while only a part of the model can be measured. A loop without an
        optimizer of torch may release gradients before a step ends, but a single step without an
        optimizer may be an evaluation.
        """
        is_whole = self._pulses.stride == 1 and self._steps > _SETTLE_STEPS
        return is_whole or self._unused_steps >= _UNUSED_STEPS

    def _install(self, stride: int, part: int, arrival: bool) -> None:
        self._remove_hooks()
        modules = [hook for hook in self._due if isinstance(hook, _ModulePulseHook)]
        parameters = [hook for hook in self._due if isinstance(hook, _GradientPulseHook)]
        self._watched = list(
            dict.fromkeys((*self._modules[part::stride], *self._named_modules, *modules))
        )
        self._wanted = list(
            dict.fromkeys((*self._parameters[part::stride], *self._named_parameters, *parameters))
        )
        self._handles = [hook.operator.module.register_forward_hook(hook) for hook in self._watched]
        for hook in self._wanted if arrival else self._named_parameters:
            if hook.parameter.is_leaf:
                handle = hook.parameter.register_post_accumulate_grad_hook(hook)
                self._handles.append(handle)
        measured = len(self._watched) + len(self._wanted)
        self._left_out = len(self._modules) + len(self._parameters) - measured
        self._installed = (stride, part, arrival)

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._watched, self._wanted = [], [], []

    @exclude_from_compilation
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # torch.jit does not trace the step of an optimizer, and asking whether it does would take
        # as long as everything else here.
        if not torch.compiler.is_compiling() and not self._observer.is_hidden:
            run_shielded(self._measure_used_gradients, self._observer.report_failure, optimizer)

    def _measure_used_gradients(self, optimizer: Optimizer) -> None:
        begun_ns = _clock_ns()
        used = self._find_used_parameters(optimizer)
        if used.of_model or not self._parameters:
            self._stepped_in, self._is_stepped = self._iteration, True
            self._causes.add_rates(optimizer)
        wanted = [hook for hook in self._wanted if id(hook.parameter) in used.of_model]
        self._measure_gradients(wanted)
        for hook in wanted:
            if hook.bad_text:
                hook.report()
        self._pulses.add_time(_clock_ns() - begun_ns, 0)

    def _measure_gradients(self, hooks: Sequence[_GradientPulseHook]) -> None:
        """Measure the present gradients that were not measured when they arrived."""
        for hook in hooks:
            if not hook.is_measured and hook.parameter.grad is not None:
                hook.measure(hook.parameter.grad)

    def _find_used_parameters(self, optimizer: Optimizer) -> UsedParameters:
        """Return the parameters that an optimizer steps; cached, because looking at each of its
        parameters takes longer than everything else in a step.
        """
        counts = tuple(len(group["params"]) for group in optimizer.param_groups)
        used = self._used.get(id(optimizer))
        if used is None or used.counts != counts:
            found = {id(each) for group in optimizer.param_groups for each in group["params"]}
            used = UsedParameters(counts, frozenset(found & self._parameter_ids))
            self._used[id(optimizer)] = used
        return used


def is_innermost(operator: ModuleOperator) -> bool:
    """Return whether a module has no modules inside, or has them only in a compiled region."""
    if operator.in_place:
        return False
    return operator.boundary or next(operator.module.children(), None) is None


class _PulseHook(CopyableHook):
    """Base class of the hooks that measure tensors."""

    def __init__(self, context: PulsedModel, op_type: str, op_name: str) -> None:
        """`op_name` is the operator name of one tensor of the hook, which watch rules are matched
        with.
        """
        self._context = context
        self._pulses, self._device, self._observer = context[:3]
        self._kinds: dict[Any, tuple[int, TensorKind]] = {}
        self.byte_count = 0
        """Bytes of the tensor in host memory that was measured last."""
        self.is_due = False
        """Whether the fingerprint of the hook's next tensor is computed."""
        self.is_kept = False
        """Whether the hook's next tensor is kept in full."""
        self.is_named = self._pulses.is_watched(op_type, op_name)
        """Whether a watch rule names the hook's tensor."""

    def _add_kind(
        self, key: object, op_type: str, op_name: str, slot: int, argument: str, tensor: Tensor
    ) -> tuple[int, TensorKind]:
        """Return the kind of a tensor that is new, and its number."""
        kind = self._make_kind(op_type, op_name, slot, argument, tensor, TensorSide.OUTPUT)
        found = self._pulses.number_kind(kind), kind
        remember(self._kinds, key, found, _MAX_CACHED_KINDS)
        return found

    def _make_kind(
        self,
        op_type: str,
        op_name: str,
        slot: int,
        argument: str,
        tensor: Tensor,
        side: TensorSide,
    ) -> TensorKind:
        local = strip_distribution(tensor)
        return TensorKind(
            self._context.graph,
            op_type,
            op_name,
            side,
            slot,
            find_dtype_name(local),
            tuple(local.shape),
            local.numel() * local.element_size(),
            argument,
            model=self._context.name,
            layout=find_distribution(tensor),
        )

    def _add_detail(
        self, number: int, kind: TensorKind, moments: FoundMoments, tensor: Tensor
    ) -> None:
        """Compute the fingerprint of a tensor in host memory, and keep the tensor in full, each if
        it is this hook's turn.
        """
        self.byte_count = kind.byte_count
        if self.is_kept:
            self._keep(number, kind, tensor)
        elif self.is_named:
            self._pulses.count_left_out()
        if not self.is_due or not self._pulses.can_afford(TurnSpending(kind.byte_count, 1)):
            return
        self.is_due = False
        begun_ns = _clock_ns()
        fingerprint = fingerprint_tensor(tensor, kind)
        if fingerprint:
            spent_ns = _clock_ns() - begun_ns
            self._pulses.add_detail(number, moments, fingerprint, kind.byte_count, spent_ns)

    def _keep(self, number: int, kind: TensorKind, tensor: Tensor) -> None:
        self.is_kept = False
        source = find_host_source(tensor, kind)
        if source is None:
            self._pulses.count_left_out()
        else:
            self._pulses.keep_tensor(kind, number, source)

    def _keep_fault(
        self, number: int, kind: TensorKind, tensor: Tensor, inputs: Sequence[CallLeaf] = ()
    ) -> None:
        """Keep the first tensor of a step that is not finite, together with the inputs of its
        operator.
        """
        if not self._pulses.begin_fault():
            return
        found: list[tuple[TensorKind, TensorSource]] = []
        tensors = [(kind, tensor)]
        for slot, argument, value in inputs:
            if isinstance(value, Tensor):
                place = kind.op_type, kind.op_name, slot, argument, value, TensorSide.INPUT
                tensors.append((self._make_kind(*place), value))
        for about, value in tensors:
            source = find_host_source(value, about)
            if source is None:
                self._pulses.count_left_out()
            else:
                found.append((about, source))
        self._pulses.keep_fault(number, found)


class _ModulePulseHook(_PulseHook):
    """Hook of an innermost module."""

    def __init__(self, context: PulsedModel, operator: ModuleOperator) -> None:
        scope = operator.scope
        super().__init__(context, scope.op_type, scope.forward_name(0))
        self.operator = operator
        self._source = ""
        """Line of the script that called the module first; used for pulses that are read back
        later.
        """
        self.calls = 0
        """Number of calls of the module in the running step."""
        self._seen: set[int] = set()
        """Numbers of the kinds that were seen; unlike the cache, it forgets none if a module is
        called very often.
        """
        self._infinite: set[int] = set()
        """Numbers of the kinds that had infinite elements when they were first seen,
        such as masks.
        """

    @exclude_from_compilation
    def __call__(self, module: Module, args: Any, result: Any) -> None:
        if not is_tracing() and not self._observer.is_hidden:
            run_shielded(self._measure_result, self._observer.report_failure, args, result)

    def _measure_result(self, args: Any, result: object) -> None:
        begun_ns = _clock_ns()
        number, self.calls = self.calls, self.calls + 1
        if type(result) is Tensor:
            self._measure_leaf(number, 0, "out", result, args)
        else:
            for slot, argument, value in list_result_leaves(result):
                if isinstance(value, Tensor):
                    self._measure_leaf(number, slot, argument, value, args)
        self._pulses.add_time(_clock_ns() - begun_ns)

    def _measure_leaf(self, call: int, slot: int, argument: str, tensor: Tensor, args: Any) -> None:
        moments = measure_tensor(tensor)
        if moments is None and not is_measurable(tensor):
            self._pulses.count_skipped()
            return
        key = call, slot, tensor.dtype, tensor.shape
        found = self._kinds.get(key)
        if found is None:
            scope = self.operator.scope
            name = scope.forward_name(call)
            found = self._add_kind(key, scope.op_type, name, slot, argument, tensor)
            is_first = found[0] not in self._seen
            self._seen.add(found[0])
            if is_first and moments is not None and any(moments[6:8]) and not moments[5]:
                self._infinite.add(found[0])
        number, kind = found
        if moments is None:
            self._source = self._source or find_source()
            self._device.add(tensor, PulsePlace(number, kind, self._source))
            return
        is_finite = self._pulses.add_pulse(number, moments, find_source)
        self._add_detail(number, kind, moments, tensor)
        if is_finite:
            return
        if number in self._infinite and not moments[5]:
            return
        leaves = list_call_leaves(args, {})
        clean = all(map(has_finite_elements, (leaf.value for leaf in leaves)))
        inputs = "its inputs are finite" if clean else "its inputs are not finite either"
        text = f"the output of a module has {describe_non_finite(moments)}; {inputs}"
        self._pulses.report_fault(FaultKind.NON_FINITE, text, kind, find_source())
        self._keep_fault(number, kind, tensor, leaves)


class _GradientPulseHook(_PulseHook):
    """Hook of a parameter that measures its gradient."""

    def __init__(self, context: PulsedModel, name: str, parameter: Parameter) -> None:
        self._op_name = make_gradient_name(name)
        super().__init__(context, PARAMETER_TYPE, self._op_name)
        self.parameter = parameter
        self.is_measured = False
        self.bad_text = ""
        """What is wrong with the gradient of this step; empty if nothing is."""
        self._bad_kind: TensorKind | None = None

    @exclude_from_compilation
    def __call__(self, parameter: Parameter) -> None:
        gradient = parameter.grad
        if gradient is not None and not is_tracing() and not self._observer.is_hidden:
            run_shielded(self._measure_arrival, self._observer.report_failure, gradient)

    def _measure_arrival(self, gradient: Tensor) -> None:
        begun_ns = _clock_ns()
        self.measure(gradient)
        self._pulses.add_time(_clock_ns() - begun_ns)

    def measure(self, gradient: Tensor) -> None:
        """Measure a gradient."""
        self.is_measured = True
        moments = measure_tensor(gradient)
        if moments is None and not is_measurable(gradient):
            self._pulses.count_skipped()
            return
        key = gradient.dtype, gradient.shape
        found = self._kinds.get(key)
        if found is None:
            found = self._add_kind(key, PARAMETER_TYPE, self._op_name, 0, "grad", gradient)
        number, kind = found
        if moments is None:
            self._device.add(gradient, PulsePlace(number, kind, gradient=kind))
            return
        is_finite = self._pulses.add_gradient(kind, number, moments)
        self._add_detail(number, kind, moments, gradient)
        if not is_finite and not self.bad_text:
            self.bad_text = describe_non_finite(moments)
            self._bad_kind = kind
            self._keep_fault(number, kind, gradient)

    def report(self) -> None:
        """Report that an optimizer is about to use the gradient although it is not finite."""
        text = f"a gradient that an optimizer uses has {self.bad_text}"
        self._pulses.report_fault(FaultKind.NON_FINITE, text, self._bad_kind)


class _BatchHook(CopyableHook):
    """Hook before each call of the attached model that observes the causes of the step."""

    def __init__(self, context: PulsedModel, causes: StepCauseObserver) -> None:
        self._pulses, self._observer = context.pulses, context.observer
        self._causes = causes

    @exclude_from_compilation
    def __call__(self, module: Module, args: Any, kwargs: Any = None) -> None:
        if not is_tracing() and not self._observer.is_hidden:
            run_shielded(self._observe_call, self._observer.report_failure, args, kwargs)

    def _observe_call(self, args: Any, kwargs: Any) -> None:
        begun_ns = _clock_ns()
        leaves = list_call_leaves(args, kwargs or {})
        self._causes.observe_call(leaves, on_device=self._observer.armed)
        self._pulses.add_time(_clock_ns() - begun_ns)


def find_host_source(tensor: Tensor, kind: TensorKind) -> TensorSource | None:
    """Return a tensor of this kind in host memory as a source; None if the tensor has another kind
    or is unreadable.
    """
    source = make_torch_source(tensor)
    if source is None or isinstance(source, str) or not source.tensor.is_cpu:
        return None
    return source if source.byte_count == kind.byte_count else None


def has_finite_elements(value: object) -> bool:
    """Return whether a value is not a tensor, or a tensor that is finite as far as known."""
    source = make_torch_source(value) if isinstance(value, Tensor) else None
    return source is None or isinstance(source, str) or source.is_finite()


def find_source() -> str:
    """Return `file:line` of the innermost call in the user's program; empty if there is none."""
    lines = capture_source_lines(besides=FOREIGN_FILES)
    return f"{lines[-1].file}:{lines[-1].line}" if lines else ""
