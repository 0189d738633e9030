"""The rank's side of the black box with a clock of the test, and what it would send."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rankdump._core.black_box import PULSE_ROW, FaultNotice, StepState, StepTensor
from rankdump._core.plan import BlackBoxSettings, OperatorSelection
from rankdump._core.record import TensorKind
from rankdump._recorder.black_box_recorder import BlackBoxRecorder
from rankdump._transport.step_outbox import StepOutbox
from rankdump._wire.black_box_messages import (
    StepTensorAssembler,
    check_new_kinds,
    fault_notice_from_wire,
    step_state_from_wire,
)
from rankdump._wire.session_messages import kind_from_wire


@dataclass
class BlackBoxSide:
    """A recorder of a rank, and the agent's view of its messages."""

    settings: BlackBoxSettings = field(default_factory=lambda: BlackBoxSettings(64))
    now_ns: int = 0
    warnings: list[str] = field(default_factory=list[str])
    kinds: list[TensorKind] = field(default_factory=list[TensorKind])
    states: list[StepState] = field(default_factory=list[StepState])
    faults: list[FaultNotice] = field(default_factory=list[FaultNotice])
    dumps: list[tuple[OperatorSelection, int, int]] = field(
        default_factory=list[tuple[OperatorSelection, int, int]]
    )
    tensors: list[StepTensor] = field(default_factory=list[StepTensor])
    bodies: list[str] = field(default_factory=list[str])
    """Which messages there were."""
    refusal: str = ""
    """Why nothing can be dumped."""

    def __post_init__(self) -> None:
        self.outbox = StepOutbox(
            self.settings.steps, self.settings.tensor_bytes, clock=lambda: self.now_ns / 1e9
        )
        self.outbox.set_agent(keeps_steps=True, keeps_tensors=True)
        self.assembler = StepTensorAssembler(self.settings.tensor_bytes)
        self.recorder = BlackBoxRecorder(
            self.settings,
            self.outbox,
            rank=3,
            warn=self.warnings.append,
            dump=self.dump,
            clock_us=lambda: self.now_ns // 1000,
            clock_ns=lambda: self.now_ns,
        )

    def dump(self, operators: OperatorSelection, begin: int, iterations: int) -> int | str:
        """Note what is to be dumped."""
        self.dumps.append((operators, begin, iterations))
        return self.refusal or begin

    def take(self, stream: int = 0) -> None:
        """Receive what waits."""
        while self.outbox.has_waiting:
            self._take_some(stream)

    def _take_some(self, stream: int) -> None:
        for request in self.outbox.take_requests(stream):
            self.bodies.append(request.WhichOneof("body") or "")
            if request.HasField("step_tensors"):
                found = map(self.assembler.feed, request.step_tensors.pieces)
                self.tensors += [tensor for tensor in found if tensor]
                continue
            if request.HasField("fault"):
                self.faults.append(fault_notice_from_wire(request.fault))
                continue
            for message in request.step_states.states:
                check_new_kinds(message, len(self.kinds))
                self.kinds[message.first_kind :] = [kind_from_wire(k) for k in message.new_kinds]
                self.states.append(step_state_from_wire(message, len(self.kinds)))

    def list_rows(self, state: StepState) -> dict[str, npt.NDArray[np.void]]:
        """Return the rows of a step by the name of the operator; the last one of each."""
        rows = np.frombuffer(state.rows, PULSE_ROW)
        return {self.kinds[row["kind"]].op_name: row for row in rows}
