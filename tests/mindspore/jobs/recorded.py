"""A recorder double, and the runner of cases, in MindSpore's own process.

MindSpore prints to the console and may abort when the process ends. So all cases of a file run in
one process, and their observations are written as JSON to a file that is closed before.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from rankdump._core.element_types import convert_to_stored, get_element_type
from rankdump._core.events import UnseenReason
from rankdump._core.graph import GraphNode, GraphParameter
from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import (
    UNDIVIDED_PASS,
    CardRecorder,
    ForwardPass,
    StartedEvent,
    TensorObservation,
)
from rankdump._core.timeouts import GroupTimeout

ms: Any = import_module("mindspore")
nn, ops, mint = ms.nn, ms.ops, ms.mint
ms.set_context(mode=ms.PYNATIVE_MODE)


@dataclass
class Recorder:
    """Keeps copies of tensors, names of events, stacks and warnings."""

    armed: bool = True
    is_describing: bool = False
    wants_arguments: bool = False
    declared_pass: ForwardPass = UNDIVIDED_PASS
    card: CardRecorder | None = None
    taken: list[dict[str, Any]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    stacks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    nodes: list[dict[str, Any]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    settlements: list[tuple[str, bool]] = field(default_factory=list)
    marks: list[frozenset[str]] = field(default_factory=list)
    configured: dict[str, dict[str, str]] = field(default_factory=dict)

    def begin_call(self, graph: int, op_name: str) -> None:
        assert self.armed

    def is_wanted(self, graph: int, op_name: str, side: TensorSide) -> bool:
        return self.armed

    def names_operators(self, graph: int) -> bool:
        return False

    def observe(self, observation: TensorObservation) -> None:
        source = observation.tensor
        data = bytearray(source.byte_count)
        source.copy_into(memoryview(data))
        stored = convert_to_stored(source.dtype, memoryview(data))
        values = np.frombuffer(stored, get_element_type(source.dtype).descr)
        self.taken.append(
            {
                "op_type": observation.op_type,
                "name": observation.op_name,
                "side": observation.side.value,
                "slot": observation.slot,
                "argument": observation.argument,
                "dtype": source.dtype,
                "shape": list(source.shape),
                "values": [value.item() for value in values],
                "state": observation.state,
                "microbatch": observation.forward_pass.microbatch,
            }
        )

    def count_loss(
        self, graph: int, op_type: str, op_name: str, side: TensorSide, slot: int, reason: str
    ) -> None:
        self.lost.append(f"{op_name} {reason}")

    def end_call(self, graph: int, op_name: str, *, raised: bool = False) -> None:
        self.settlements.append((op_name, raised))

    def set_marks(self, graph: int, names: frozenset[str]) -> None:
        self.marks.append(names)

    def describe_parameter(self, graph: int, parameter: GraphParameter) -> None:
        raise AssertionError("parameters come as tensors")

    def record_arguments(
        self, graph: int, op_type: str, op_name: str, values: Mapping[str, str]
    ) -> None:
        assert self.wants_arguments
        self.configured[op_name] = dict(values)

    def record_group_timeout(self, timeout: GroupTimeout) -> None:
        raise AssertionError("no group is used")

    def describe(self, graph: int, node: GraphNode) -> None:
        self.nodes.append({"name": node.name, "line": node.source[-1].code})

    def record_call_stack(self, graph: int, op_name: str, stack: tuple[str, ...]) -> None:
        self.stacks[op_name] = stack

    def start_event(self, *, graph: int, name: str, collective: Any = None) -> StartedEvent:
        self.open.append(name)
        return StartedEvent(0, 0, graph, name, collective, 0)

    def record_event(self, *, graph: int, name: str) -> None:
        self.events.append(name)

    def finish_event(
        self, begun: StartedEvent, *, name: str = "", collective: Any = None, outcome: int = 0
    ) -> None:
        self.open.remove(begun.name)
        self.events.append(begun.name)

    def report_unseen_collectives(self, group: str, reason: UnseenReason, count: int) -> None:
        raise AssertionError("no group is used")

    def warn_once(self, message: str) -> None:
        if message not in self.warnings:
            self.warnings.append(message)

    # -- what cases tell

    @property
    def tensors(self) -> list[str]:
        """Names of tensors as an API dump has them."""
        return [f"{taken['name']}_{taken['argument']}" for taken in self.taken]

    def told(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        assert not self.open, f"never finished: {self.open}"
        return {
            "tensors": self.tensors,
            "taken": self.taken,
            "events": self.events,
            "stacks": self.stacks,
            "nodes": self.nodes,
            "lost": self.lost,
            "warnings": self.warnings,
            "settlements": self.settlements,
            "marks": [sorted(names) for names in self.marks],
            "configured": self.configured,
        }


def run(names: dict[str, Any]) -> None:
    """Run the functions `case_...` of a file, and write what they tell, or their tracebacks."""
    told: dict[str, Any] = {}
    for name, case in names.items():
        if not name.startswith("case_"):
            continue
        ms.set_seed(1)
        try:
            told[name.removeprefix("case_")] = case()
        except Exception:
            told[name.removeprefix("case_")] = {"failed": traceback.format_exc()}
    Path(sys.argv[1]).write_text(json.dumps(told))
    print("done", flush=True)


def tensor(*shape: int, start: float = 0.0) -> Any:
    """Return a tensor with known values, small and all different."""
    count = int(np.prod(shape))
    values = (np.arange(count, dtype=np.float32) / count + np.float32(start)).reshape(shape)
    return ms.Tensor(values)
