"""Recorder of API calls: the stack, times, tensors and numbers of one call, the gradients that
arrive at its results, and the calls that activation checkpointing repeats within the backward.
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
from rankdump._frameworks.torch.observer import (
    TorchObserver,
    exclude_from_compilation,
    run_shielded,
)
from rankdump._frameworks.torch.recomputation import BackwardStep, ForwardCallLog, TorchOperatorCall
from rankdump._layout.api_tree import ApiCall, parse_place

_SCALAR_DTYPES = {"int": torch.int64, "float": torch.float64, "bool": torch.bool}
_HIDDEN_PREFIX = "_"
"""Begins the words for what torch's functions tell each other, as the depth of a warning."""


class ApiTensorRecorder:
    """What is dumped of the leaves of a call."""

    def __init__(self, observer: TorchObserver, *, filtered: bool) -> None:
        """`filtered` leaves only floating-point tensors with a dimension and elements."""
        self._observer = observer
        self._filtered = filtered

    def record_leaves(
        self,
        op_type: str,
        name: str,
        side: TensorSide,
        leaves: Iterable[ApiLeaf],
        *,
        recomputed: bool,
    ) -> list[CallLeaf]:
        """Hand over one side of a call; return what was, as tensors."""
        kept: list[CallLeaf] = []
        for leaf in leaves:
            value, scalar = leaf.value, ""
            if not isinstance(value, Tensor):
                hidden = side is TensorSide.INPUT and leaf.word.startswith(_HIDDEN_PREFIX)
                if self._filtered or hidden:
                    continue
                scalar = find_scalar_type(value)
                value = _make_scalar_tensor(value, scalar)
            elif self._filtered and not _is_float_data(value):
                continue
            if value is not None:
                place = format_api_argument(side, leaf.path, leaf.word, scalar, recomputed)
                kept.append(CallLeaf(leaf.slot, place, value))
        self._observer.record_tensors(op_type, name, side, kept)
        return kept


def _is_float_data(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dim() > 0 and tensor.numel() > 0


def _make_scalar_tensor(value: object, scalar: str) -> Tensor | None:
    """Return a number of Python as a tensor without dimensions; None for anything else."""
    if not scalar:
        return None
    try:
        return torch.tensor(value, dtype=_SCALAR_DTYPES[scalar], device="cpu")
    except (OverflowError, RuntimeError):  # an int may have more bits than any file has
        return None


_MAX_REMEMBERED_CALLS = 1 << 16
"""Calls of an evaluation could be repeated, too, for all that is known; nobody repeats them."""


@dataclass(frozen=True, slots=True)
class RepeatedApiCall:
    """A call that repeats one of the forward."""

    original: ApiCall | None
    """Which one, if that is known."""
    has_gradients: bool
    """Those of what it returns arrive here, not at what the original returned."""


class ApiRepeatFinder:
    """The calls of one iteration that may be repeated; safe to use from several threads."""

    def __init__(self) -> None:
        self._call_log = ForwardCallLog()
        self._originals: dict[TorchOperatorCall, ApiCall] = {}

    def restart(self) -> None:
        """Forget all calls: an iteration begins."""
        self._call_log.restart()
        self._originals.clear()

    def find_repeat(self, call: ApiCall, leaves: Iterable[ApiLeaf]) -> RepeatedApiCall | None:
        """Return what a call that begins repeats; None for any that does not."""
        step, grad = find_backward_step(), torch.is_grad_enabled()
        watched = find_saving_hook() is not None
        if step is None:
            # In a region to be repeated nothing is kept for the backward, or somebody watches.
            if watched or not grad:
                self._add_call(call, leaves)
            return None
        # A function written in Python that computes its own gradient does so without gradients.
        if not watched and not (step[2] and grad):
            return None
        found = self._call_log.find_repeated_call(
            _make_call_scope(call), _find_first_tensor(leaves), BackwardStep(*step)
        )
        original = None if found is None else self._originals.get(found)
        return RepeatedApiCall(original, has_gradients=not watched)

    def _add_call(self, call: ApiCall, leaves: Iterable[ApiLeaf]) -> None:
        if len(self._originals) >= _MAX_REMEMBERED_CALLS:
            self.restart()
        self._originals[
            self._call_log.add_forward_call(_make_call_scope(call), _find_first_tensor(leaves))
        ] = call


def _make_call_scope(call: ApiCall) -> OperatorScope:
    return OperatorScope(call.op_type, call.op_type)


def _find_first_tensor(leaves: Iterable[ApiLeaf]) -> Tensor | None:
    return next((leaf.value for leaf in leaves if isinstance(leaf.value, Tensor)), None)


# torch's stubs leave hooks and handles untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false


REPEATED_BACKWARD_WARNING = (
    "a backward pass ran again over the same graph (retain_graph): its gradients have the same "
    "names as those of the first pass; where they differ, the files of the first pass are kept and "
    "the others are counted as dropped"
)


class ApiGradientObserver:
    """Places the hooks of one attached model."""

    def __init__(self, observer: TorchObserver) -> None:
        self._observer = observer
        self._hooks = TensorHookRegistry()

    def watch_gradients(self, call: ApiCall, results: Iterable[CallLeaf]) -> None:
        """Wait for the gradients of what a forward call returned: tensors with their places."""
        backward = ApiBackward(self._observer, call)
        for leaf in results:
            tensor = leaf.value
            if isinstance(tensor, Tensor) and is_hookable(tensor):
                self._hooks.add_hook(tensor, _ApiGradientHook(backward, leaf.slot, leaf.argument))

    def remove_leaf_hooks(self) -> None:
        """Remove the hooks from tensors that may outlive the iteration."""
        self._hooks.remove_leaf_hooks()


class ApiBackward:
    """The backward of one call, as often as it runs."""

    def __init__(self, observer: TorchObserver, call: ApiCall) -> None:
        self._observer = observer
        self._op_type = call.op_type
        self._name = f"{call.stem}_backward"
        self._seen: set[int] = set()

    def record_gradient(self, leaf: CallLeaf) -> None:
        """Hand over a gradient that has arrived."""
        observer = self._observer
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

    def report_failure(self, error: Exception) -> None:
        """Report that a hook could not do its work."""
        self._observer.report_failure(error)


class _ApiGradientHook:
    """The hook of one output; it holds what describes a tensor, never one."""

    __slots__ = ("_argument", "_backward", "_slot")

    def __init__(self, backward: ApiBackward, slot: int, argument: str) -> None:
        self._backward = backward
        self._slot = slot
        self._argument = _format_gradient_argument(argument)

    @exclude_from_compilation
    def __call__(self, gradient: Tensor) -> None:
        if not is_tracing():
            leaf = CallLeaf(self._slot, self._argument, gradient)
            run_shielded(self._backward.record_gradient, self._backward.report_failure, leaf)


@lru_cache(maxsize=1 << 10)
def _format_gradient_argument(argument: str) -> str:
    """Return where the gradient of an output arrives: it is the backward's input.

    That the output was recomputed does not show in it.
    """
    place = parse_place(argument)
    return (
        argument if place is None else format_api_argument(TensorSide.INPUT, place.path, place.word)
    )


_LAYER_MARK = CallLeaf(0, LAYER_MARK_PLACE.argument, torch.from_numpy(make_layer_value()))


@dataclass(slots=True, eq=False)
class OpenTorchApiCall:
    """A call that is observed, from its begin to its end."""

    call: ApiCall
    name: str
    """The call's own."""
    begun: StartedEvent | None = None
    """None for as long as its inputs are read."""
    repeat: RepeatedApiCall | None = None


class TorchApiRecorder:
    """The calls of one attached model, as its recorder hears of them."""

    def __init__(self, observer: TorchObserver, options: ApiOptions, sites: CallSites) -> None:
        self._observer = observer
        self._options = options
        self._sites = sites
        self._tensors = ApiTensorRecorder(observer, filtered=options.filter_data)
        self._gradients = ApiGradientObserver(observer)
        self._repeats = ApiRepeatFinder()
        self._marked: set[str] = set()
        self._lock = threading.Lock()

    def set_options(self, options: ApiOptions) -> None:
        """Hand over as these options say from now on."""
        self._options = options
        self._tensors = ApiTensorRecorder(self._observer, filtered=options.filter_data)

    def restart(self) -> None:
        """Forget which calls may be repeated: an iteration begins."""
        self._repeats.restart()

    def remove_hooks(self) -> None:
        """Leave tensors that may outlive the iteration."""
        self._gradients.remove_leaf_hooks()

    def begin_call(
        self,
        open_call: OpenTorchApiCall,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        frame: FrameType | None,
    ) -> None:
        """Hand over what a call is given, before it may change any of it."""
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
        """Hand over what a call returned; nothing of one that was not selected."""
        call, repeat, recorder = open_call.call, open_call.repeat, self._observer.recorder
        if open_call.begun is None:
            return
        recorder.finish_event(open_call.begun)
        try:
            results = self._record_side(open_call, TensorSide.OUTPUT, list_output_leaves(result))
            if self._options.retain_backward and (repeat is None or repeat.has_gradients):
                original = None if repeat is None else repeat.original
                self._gradients.watch_gradients(original or call, results)
        finally:
            # A repetition is ended by an error once it has given all that is needed.
            recorder.end_call(
                self._observer.graph, open_call.name, raised=raised and repeat is None
            )

    def record_layer_mark(self, layer: str, frame: FrameType | None) -> None:
        """Hand over the mark of a module, by its path with dots."""
        call, observer = make_layer_mark(layer), self._observer
        once = self._options.layers_once
        if once and layer in self._marked:
            return
        if not self._options.scope(call) or (once and not self._is_first_mark(layer)):
            return
        observer.recorder.begin_call(observer.graph, call.name)
        observer.recorder.record_call_stack(
            observer.graph, format_layer_name(layer), self._sites.read_stack(frame)
        )
        observer.record_event(call.name)
        observer.record_tensors(call.op_type, call.name, TensorSide.INPUT, (_LAYER_MARK,))
        observer.end_call(call.name)

    def _is_first_mark(self, layer: str) -> bool:
        """Return whether a mark, of those that are handed over once, was not handed over before."""
        with self._lock:
            known = layer in self._marked
            self._marked.add(layer)
        return not known

    def _record_side(
        self, open_call: OpenTorchApiCall, side: TensorSide, leaves: Sequence[ApiLeaf]
    ) -> list[CallLeaf]:
        op_type, recomputed = open_call.call.op_type, open_call.repeat is not None
        return self._tensors.record_leaves(
            op_type, open_call.name, side, leaves, recomputed=recomputed
        )
