"""Observation of the operators inside compiled regions of one attached model: what the regions hand
over becomes calls and gradients like those of modules outside. Imported only where a script asks
for it, because that loads torch's compiler.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol, cast

from torch import Tensor

from rankdump._core.record import TensorSide
from rankdump._frameworks.model_observer import BACKWARD_SIDE
from rankdump._frameworks.operator_names import CallLeaf
from rankdump._frameworks.torch.compiled_operators import (
    ModuleCallTracer,
    TracedSide,
    compiled_call_receivers,
    list_watched,
    pair_leaves,
    ticket_numbers,
)
from rankdump._frameworks.torch.model_hook import ModuleGradientObserver, OpenModuleCall
from rankdump._frameworks.torch.module_hooks import run_shielded
from rankdump._frameworks.torch.module_tree import ModuleOperator, ModuleTree
from rankdump._frameworks.torch.recomputation import ForwardCallLog, TorchOperatorCall
from rankdump._frameworks.torch.tensors import TorchObserver


class CompiledCallOpener(Protocol):
    """Opens and closes calls that compiled code runs."""

    def open_call(
        self,
        operator: ModuleOperator,
        leaves: Sequence[CallLeaf],
        *,
        has_grad: bool,
        compiled: bool = False,
    ) -> OpenModuleCall:
        """Open a call with these arguments, and record them."""
        ...

    def close_compiled_call(
        self, operator: ModuleOperator, leaves: Sequence[CallLeaf]
    ) -> OpenModuleCall | None:
        """Close a call and record its results; None if it was not open."""
        ...


class CompiledRegionObserver:
    """Receives what the compiled regions of one model observe."""

    def __init__(
        self,
        observer: TorchObserver,
        calls: CompiledCallOpener,
        gradients: ModuleGradientObserver,
        call_log: ForwardCallLog,
    ) -> None:
        self._observer = observer
        self._calls = calls
        self._gradients = gradients
        self._call_log = call_log
        self._operators: dict[str, ModuleOperator] = {}
        self._tickets: dict[int, tuple[TorchOperatorCall, TensorSide]] = {}
        self._lock = threading.Lock()
        self._unseen_scopes: set[str] = set()
        compiled_call_receivers.add(observer.graph, self)

    @property
    def armed(self) -> bool:
        """Whether anything is recorded now."""
        return self._observer.armed

    def set_operators(self, tree: ModuleTree) -> None:
        """Receive calls of these modules from now on."""
        self._operators = {o.scope.path: o for o in tree.operators if not o.boundary}

    def make_tracer(self, operator: ModuleOperator) -> ModuleCallTracer | None:
        """Return what observes a module inside compiled regions; None for a boundary."""
        if operator.boundary:
            return None
        return ModuleCallTracer(self._observer.graph, operator.scope.path)

    def restart(self) -> None:
        """Forget the calls of the last iteration: gradients that still arrive are not recorded."""
        with self._lock:
            self._tickets.clear()

    def detach(self) -> None:
        """Receive nothing any more; compiled code runs on."""
        compiled_call_receivers.remove(self._observer.graph, self)
        self.restart()

    def receive_side(self, traced: TracedSide, tensors: Sequence[Tensor]) -> int:
        """Record one side of a call; return the ticket of its gradients, 0 for none."""
        found: list[int] = []
        run_shielded(self._record_side, self._observer.report_failure, traced, tensors, found)
        return found[0] if found else 0

    def receive_gradient(self, ticket: int, leaf: CallLeaf) -> bool:
        """Record a gradient; return whether the ticket is one of this model."""
        with self._lock:
            known = self._tickets.get(ticket)
        if known is None:
            return False
        run_shielded(self._record_gradient, self._observer.report_failure, *known, leaf)
        return True

    def report_scope(self, path: str, scope: str) -> None:
        """Report that a module is not observed, because torch allows no operator there."""
        if scope in self._unseen_scopes:
            return
        self._unseen_scopes.add(scope)
        self._observer.recorder.warn_once(
            f"operators of a compiled region below {scope} are not seen, because torch allows no "
            f"custom operator there; the first one is {path}"
        )

    def check_regions(self, tree: ModuleTree) -> None:
        """Warn of regions that were compiled before the model was attached."""
        for region in tree.operators:
            path = f"{region.scope.path}/"
            inside = [o for o in tree.operators if o.scope.path.startswith(path)]
            if (
                region.boundary
                and inside
                and not self._unseen_scopes
                and self._call_log.has_calls(region.scope)
                and not any(self._call_log.has_calls(o.scope) for o in inside)
            ):
                self._observer.recorder.warn_once(
                    f"the compiled region {region.scope.path} ran without observing its operators: "
                    "attach the model before the first call of the region, or call "
                    "torch.compiler.reset() after attaching"
                )

    def _record_side(self, traced: TracedSide, tensors: Sequence[Tensor], found: list[int]) -> None:
        operator = self._operators.get(traced.path)
        if operator is None:
            return
        leaves = pair_leaves(traced, tensors)
        frame = None
        if traced.side is TensorSide.INPUT:
            frame = self._calls.open_call(operator, leaves, has_grad=traced.has_grad, compiled=True)
        else:
            frame = self._calls.close_compiled_call(operator, leaves)
        if frame is not None and frame.call is not None:
            found.append(self._expect_gradients(frame.call, traced, leaves))

    def _expect_gradients(
        self, call: TorchOperatorCall, traced: TracedSide, leaves: Sequence[CallLeaf]
    ) -> int:
        """Return a new ticket for the gradients of one side; 0 if none are wanted.

        A region that is recomputed gets new tickets, and its backward hands over only these.
        """
        watched = list_watched(traced)
        side, name = traced.side, call.names.gradient
        is_input = side is TensorSide.INPUT
        if not watched or (
            is_input and not self._observer.is_selected(name, BACKWARD_SIDE[TensorSide.INPUT])
        ):
            return 0
        for leaf in leaves:
            if leaf.slot in watched:
                call.arrivals.watch_slot(side, leaf.slot)
                address = cast("Tensor", leaf.value).data_ptr()
                call.arrivals.expect_gradient(side, leaf.slot, address)
        ticket = next(ticket_numbers)
        with self._lock:
            self._tickets[ticket] = (call, side)
        return ticket

    def _record_gradient(self, call: TorchOperatorCall, side: TensorSide, leaf: CallLeaf) -> None:
        self._gradients.record_gradient(call, side, leaf, compiled=True)
