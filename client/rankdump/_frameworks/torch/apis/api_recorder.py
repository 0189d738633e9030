"""Recorder of API calls: the stack, times, tensors and numbers of one call, the gradients of its
results, and the calls that activation checkpointing repeats within the backward.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType

import torch
from torch import Tensor

from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import StartedEvent
from rankdump._frameworks.api_calls import (
    LAYER_MARK_PLACE,
    ApiLeaf,
    ApiOptions,
    find_scalar_type,
    format_api_argument,
    format_layer_name,
    list_input_leaves,
    list_output_leaves,
    make_layer_mark,
    make_layer_value,
)
from rankdump._frameworks.operator_names import CallLeaf, OperatorScope
from rankdump._frameworks.torch.apis.call_sites import CallSites
from rankdump._frameworks.torch.internals import find_backward_step, find_saving_hook, is_tracing
from rankdump._frameworks.torch.model_hook import TensorHookRegistry, is_hookable
from rankdump._frameworks.torch.module_hooks import exclude_from_compilation, run_shielded
from rankdump._frameworks.torch.recomputation import (
    ForwardCallLog,
    TorchOperatorCall,
    find_first_tensor,
)
from rankdump._frameworks.torch.tensors import TorchObserver
from rankdump._layout.api_tree import ApiCall, parse_place

_SCALAR_DTYPES = {"int": torch.int64, "float": torch.float64, "bool": torch.bool}
_HIDDEN_PREFIX = "_"
"""Prefix of internal arguments that torch's functions pass to each other, such as the stack depth
of a warning.
"""


def _is_float_data(tensor: Tensor) -> bool:
    # Attributes are read because the method `is_floating_point` lets another thread take the
    # interpreter's lock.
    return tensor.dtype.is_floating_point and tensor.dim() > 0 and tensor.numel() > 0


def _make_scalar_tensor(value: object, scalar: str) -> Tensor | None:
    """Return a Python number as a tensor without dimensions; None for anything else."""
    if not scalar:
        return None
    try:
        return torch.tensor(value, dtype=_SCALAR_DTYPES[scalar], device="cpu")
    except (OverflowError, RuntimeError):  # an int may have more bits than any element type
        return None


_MAX_REMEMBERED_CALLS = 1 << 16
"""Maximum number of remembered calls, many of which are never repeated, such as those of an
evaluation.
"""


@dataclass(frozen=True, slots=True)
class RepeatedApiCall:
    """Call that repeats a call of the forward within the backward."""

    original: ApiCall | None
    """The call that is repeated; None if it is not known."""
    has_gradients: bool
    """Whether gradients arrive at the results of the repetition instead of those of the original
    call.
    """


class ApiRepeatFinder:
    """Finds calls of one iteration that are repeated; safe to use from several threads."""

    def __init__(self) -> None:
        self._call_log = ForwardCallLog()
        self._originals: dict[TorchOperatorCall, ApiCall] = {}

    def restart(self) -> None:
        """Forget all calls, because an iteration begins."""
        self._call_log.restart()
        self._originals.clear()

    def find_repeat(self, call: ApiCall, leaves: Iterable[ApiLeaf]) -> RepeatedApiCall | None:
        """Return the repetition that a call is; None if the call repeats nothing."""
        step, grad = find_backward_step(), torch.is_grad_enabled()
        watched = find_saving_hook() is not None
        if step is None:
            # A region that is repeated later runs without gradients or saves tensors with a hook.
            if watched or not grad:
                self._add_call(call, leaves)
            return None
        # An autograd function written in Python also computes its own gradient without gradients
        # being recorded; that is no repetition.
        if not watched and not (step.function and grad):
            return None
        found = self._call_log.find_repeated_call(
            _make_call_scope(call), find_first_tensor(leaves), step
        )
        original = None if found is None else self._originals.get(found)
        return RepeatedApiCall(original, has_gradients=not watched)

    def _add_call(self, call: ApiCall, leaves: Iterable[ApiLeaf]) -> None:
        if len(self._originals) >= _MAX_REMEMBERED_CALLS:
            self.restart()
        first = find_first_tensor(leaves)
        self._originals[self._call_log.add_forward_call(_make_call_scope(call), first)] = call


def _make_call_scope(call: ApiCall) -> OperatorScope:
    return OperatorScope(call.op_type, call.op_type)


# torch's stubs leave hooks and handles untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false


REPEATED_BACKWARD_WARNING = (
    "a backward pass ran again over the same graph (retain_graph): its gradients have the same "
    "names as those of the first pass; where they differ, the files of the first pass are kept and "
    "the others are counted as dropped"
)


class ApiBackward:
    """Backward of one API call, which may run several times."""

    def __init__(self, observer: TorchObserver, call: ApiCall) -> None:
        self.observer = observer
        self._op_type = call.op_type
        self._name = f"{call.stem}_backward"
        self._seen: set[int] = set()

    def record_gradient(self, leaf: CallLeaf) -> None:
        """Record a gradient that has arrived."""
        observer = self.observer
        if not observer.armed:
            return
        again = leaf.slot in self._seen
        if again:
            observer.recorder.warn_once(REPEATED_BACKWARD_WARNING)
        if again or not self._seen:
            self._seen.clear()
            observer.record_event(self._name)
        self._seen.add(leaf.slot)
        observer.record_tensors(self._op_type, self._name, TensorSide.INPUT, (leaf,))
        observer.end_call(self._name)


class _ApiGradientHook:
    """Gradient hook of one output; it keeps the description of a tensor, never the tensor."""

    __slots__ = ("_argument", "_backward", "_slot")

    def __init__(self, backward: ApiBackward, slot: int, argument: str) -> None:
        self._backward = backward
        self._slot = slot
        self._argument = _format_gradient_argument(argument)

    @exclude_from_compilation
    def __call__(self, gradient: Tensor) -> None:
        if not is_tracing():
            leaf, backward = CallLeaf(self._slot, self._argument, gradient), self._backward
            run_shielded(backward.record_gradient, backward.observer.report_failure, leaf)


@lru_cache(maxsize=1 << 10)
def _format_gradient_argument(argument: str) -> str:
    """Return the argument of an output's gradient, which is an input of the backward.

    The argument of a gradient has no mark of recomputation.
    """
    place = parse_place(argument)
    return (
        argument if place is None else format_api_argument(TensorSide.INPUT, place.path, place.word)
    )


_LAYER_MARK = CallLeaf(0, LAYER_MARK_PLACE.argument, torch.from_numpy(make_layer_value()))


@dataclass(slots=True, eq=False)
class OpenTorchApiCall:
    """An observed API call that has begun."""

    call: ApiCall
    name: str
    """Name of the call itself, which may be a repetition of another call."""
    op_type: str
    begun: StartedEvent | None = None
    """The started event of the call; None while the inputs are read."""
    repeat: RepeatedApiCall | None = None


class TorchApiRecorder:
    """Records the API calls of one attached model."""

    def __init__(self, observer: TorchObserver, options: ApiOptions, sites: CallSites) -> None:
        self._observer = observer
        self._options = options
        self._sites = sites
        self._hooks = TensorHookRegistry()
        self._repeats = ApiRepeatFinder()
        self._marked: set[str] = set()
        self._lock = threading.Lock()

    def set_options(self, options: ApiOptions) -> None:
        """Record with these options from now on."""
        self._options = options

    def restart(self) -> None:
        """Forget which calls may be repeated, because an iteration begins."""
        self._repeats.restart()

    def remove_hooks(self) -> None:
        """Remove the hooks from tensors that may outlive the iteration."""
        self._hooks.remove_leaf_hooks()

    def begin_call(
        self,
        open_call: OpenTorchApiCall,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        frame: FrameType | None,
    ) -> None:
        """Record the inputs of a call before the call may change them."""
        call, observer = open_call.call, self._observer
        if not self._options.scope(call):
            return
        name, graph = open_call.name, observer.graph
        try:
            observer.recorder.begin_call(graph, name)
            observer.recorder.record_call_stack(graph, name, self._sites.read_stack(frame))
            leaves = list_input_leaves(args, kwargs)
            open_call.repeat = self._repeats.find_repeat(call, leaves)
            self._record_side(open_call, TensorSide.INPUT, leaves)
        finally:
            open_call.begun = observer.recorder.start_event(graph=graph, name=name)

    def end_call(
        self, open_call: OpenTorchApiCall, result: object, *, raised: bool = False
    ) -> None:
        """Record the results of a call, if the call is selected."""
        call, repeat, recorder = open_call.call, open_call.repeat, self._observer.recorder
        if open_call.begun is None:
            return
        recorder.finish_event(open_call.begun)
        try:
            results = self._record_side(open_call, TensorSide.OUTPUT, list_output_leaves(result))
            if self._options.retain_backward and (repeat is None or repeat.has_gradients):
                original = None if repeat is None else repeat.original
                self._watch_gradients(original or call, results)
        finally:
            # torch ends a repetition by an error as soon as it has the tensors that it needs.
            recorder.end_call(
                self._observer.graph, open_call.name, raised=raised and repeat is None
            )

    def record_layer_mark(self, layer: str, frame: FrameType | None) -> None:
        """Record the mark of a module, by its path with dots."""
        once = self._options.layers_once
        if once and layer in self._marked:
            return
        call, observer = make_layer_mark(layer), self._observer
        name, graph = call.name, observer.graph
        if not self._options.scope(call) or (once and not self._is_first_mark(layer)):
            return
        observer.recorder.begin_call(graph, name)
        observer.recorder.record_call_stack(
            graph, format_layer_name(layer), self._sites.read_stack(frame)
        )
        observer.record_event(name)
        observer.record_tensors(call.op_type, name, TensorSide.INPUT, (_LAYER_MARK,))
        observer.end_call(name)

    def _is_first_mark(self, layer: str) -> bool:
        """Return whether a LAYER mark is to be recorded: with `layers_once` only the first time."""
        with self._lock:
            known = layer in self._marked
            self._marked.add(layer)
        return not known

    def _record_side(
        self, open_call: OpenTorchApiCall, side: TensorSide, leaves: Sequence[ApiLeaf]
    ) -> list[CallLeaf]:
        """Record one side of a call; return the recorded leaves, with numbers as tensors."""
        filtered, recomputed = self._options.filter_data, open_call.repeat is not None
        kept: list[CallLeaf] = []
        for leaf in leaves:
            value, scalar = leaf.value, ""
            if not isinstance(value, Tensor):
                hidden = side is TensorSide.INPUT and leaf.word.startswith(_HIDDEN_PREFIX)
                if filtered or hidden:
                    continue
                scalar = find_scalar_type(value)
                value = _make_scalar_tensor(value, scalar)
            elif filtered and not _is_float_data(value):
                continue
            if value is not None:
                place = format_api_argument(side, leaf.path, leaf.word, scalar, recomputed)
                # This equals `CallLeaf(...)` in a third of the time: there is one for each tensor.
                kept.append(tuple.__new__(CallLeaf, (leaf.slot, place, value)))
        self._observer.record_tensors(open_call.op_type, open_call.name, side, kept)
        return kept

    def _watch_gradients(self, call: ApiCall, results: Iterable[CallLeaf]) -> None:
        """Hook the results of a forward call to record their gradients."""
        backward = ApiBackward(self._observer, call)
        for leaf in results:
            tensor = leaf.value
            if isinstance(tensor, Tensor) and is_hookable(tensor):
                self._hooks.add_hook(tensor, _ApiGradientHook(backward, leaf.slot, leaf.argument))
