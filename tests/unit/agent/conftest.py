"""Fixtures of heads and values for the tests of the agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.record_heads import head_of

from rankdump._core.plan import DumpPlan, OutputSettings, plan_to_json
from rankdump._core.record import TensorKey, TensorKind, TensorSide
from rankdump._core.session_protocol import RecordHead, SessionRequest


@pytest.fixture
def make_head() -> Callable[..., RecordHead]:
    """Makes heads of four float32 elements, by default."""

    def make(**fields) -> RecordHead:
        key: dict[str, Any] = {
            "rank": 0,
            "net_name": "Net",
            "graph": 0,
            "iteration": 0,
            "timestamp_us": 1,
            "op_type": "MatMul",
            "op_name": "Default/MatMul-op0",
            "side": TensorSide.OUTPUT,
            "slot": 0,
            "constant": False,
        }
        head: dict[str, Any] = {"dtype": "float32", "shape": (4,), "byte_count": 16}
        for name, value in fields.items():
            (key if name in key else head)[name] = value
        return head_of(TensorKey(**key), **head)

    return make


@pytest.fixture
def make_kind() -> Callable[..., TensorKind]:
    """Makes kinds of tensors, the same as `make_head` does."""

    def make(**fields) -> TensorKind:
        defaults: dict[str, Any] = {
            "graph": 0,
            "op_type": "MatMul",
            "op_name": "Default/MatMul-op0",
            "side": TensorSide.OUTPUT,
            "slot": 0,
            "dtype": "float32",
            "shape": (4,),
            "byte_count": 16,
        }
        return TensorKind(**{**defaults, **fields})

    return make


@pytest.fixture
def make_request() -> Callable[..., SessionRequest]:
    """Makes introductions of rank 0."""

    def make(**fields) -> SessionRequest:
        plan = DumpPlan(output=OutputSettings(root="/dump"))
        defaults: dict[str, Any] = {
            "job_id": "job",
            "session_id": "session",
            "rank": 0,
            "world_size": 1,
            "device": 0,
            "host": "here",
            "pid": 1,
            "framework": "none 0",
            "device_target": "CPU",
            "plan_json": plan_to_json(plan),
            "config_source": b"{}",
        }
        return SessionRequest(**{**defaults, **fields})

    return make
