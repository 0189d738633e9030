"""Hands tensors and events of one attached model to the recorder; a failure is counted here."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from rankdump.adapters.observing import HOOK_FAILED, ModelObserver
from rankdump.adapters.torch.tensors import source_of
from rankdump.contract.key import Side
from rankdump.hook import PARAMETER, Leaf
from rankdump.values import Observation


class Observer(ModelObserver):
    """What the parts of the adapter share: the recorder, and the number of the graph."""

    def tensors(self, op_type: str, op_name: str, side: Side, leaves: Iterable[Leaf]) -> None:
        """Hand over the tensors among the leaves of one side of an operator."""
        if not self.recorder.wants(self.graph, op_name, side):
            return
        for leaf in leaves:
            if isinstance(leaf.value, Tensor):
                self._tensor(op_type, op_name, side, leaf, leaf.value)

    def state(self, name: str, argument: str, tensor: Tensor, *, constant: bool = False) -> None:
        """Hand over a parameter or buffer as it stands."""
        self._lone(name, Leaf(0, argument, tensor), tensor, state=True, constant=constant)

    def gradient(self, name: str, tensor: Tensor) -> None:
        """Hand over the gradient of a parameter: an operator by itself, which wrote it."""
        self._lone(name, Leaf(0, "grad", tensor), tensor)

    def _lone(
        self,
        name: str,
        leaf: Leaf,
        tensor: Tensor,
        *,
        state: bool = False,
        constant: bool = False,
    ) -> None:
        if self.wants(name, Side.OUTPUT):
            self._tensor(PARAMETER, name, Side.OUTPUT, leaf, tensor, state=state, constant=constant)
            self.settled(name)

    def _tensor(
        self,
        op_type: str,
        op_name: str,
        side: Side,
        leaf: Leaf,
        tensor: Tensor,
        *,
        state: bool = False,
        constant: bool = False,
    ) -> None:
        place = (self.graph, op_type, op_name, side, leaf.slot)
        try:
            source = source_of(tensor)
            if isinstance(source, str):
                self.recorder.lose(*place, source)
                return
            self.recorder.observe(Observation(*place, leaf.argument, source, state, constant))
        except Exception as error:
            self.recorder.lose(*place, HOOK_FAILED)
            self.failed(error)
