"""Targets for serialized plans, and for configurations of every dialect."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fuzz.input_pieces import chosen, file_of

from rankdump._analysis.compare.call_names import read_name_mapping
from rankdump._config.config_file import load_config_plan, make_dump_config_plan
from rankdump._core.plan import DumpPlan, plan_from_json, plan_to_json
from rankdump._core.session_protocol import SessionRequest
from rankdump.errors import ConfigError
from rankdump.tf import DumpConfig
from rankdumpd.agent.session import registry

_FIELDS = tuple(DumpConfig.__dataclass_fields__)


def plans(data: bytes) -> None:
    """A plan in its travelling form; what is accepted travels again."""
    plan = plan_from_json(data)
    assert plan_from_json(plan_to_json(plan)) == plan
    registry.read_checked_plan(_introduced(data))


def dialects(data: bytes) -> None:
    """A configuration file: a plan that travels, with warnings that are lines; or one line."""
    which, rest = chosen(data, len(_DIALECTS))
    try:
        plan = _DIALECTS[which](rest)
    except ConfigError as error:
        refusal, plan = str(error), None
    else:
        refusal = ""
    assert "\n" not in refusal
    if plan is not None:
        assert plan_from_json(plan_to_json(plan)) == plan
        assert all(warning.isprintable() for warning in plan.warnings)


def _file(data: bytes) -> DumpPlan:
    plan, source = load_config_plan(file_of(data, "dump.json"), {})
    assert source == data
    return plan


def _dump_config(data: bytes) -> DumpPlan | None:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return None
    changes: dict[str, Any] = body if isinstance(body, dict) else {}
    values = {name: getattr(DumpConfig(), name) for name in _FIELDS} | {"enable_dump": True}
    return make_dump_config_plan(values | changes)


def _mapping(data: bytes) -> None:
    read_name_mapping(file_of(data, "mapping.txt"))


_DIALECTS: tuple[Callable[[bytes], DumpPlan | None], ...] = (_file, _dump_config, _mapping)


def _introduced(plan_json: bytes) -> SessionRequest:
    return SessionRequest(
        session_id="s",
        job_id="j",
        rank=0,
        world_size=1,
        device=0,
        host="",
        pid=0,
        framework="",
        device_target="",
        plan_json=plan_json,
        config_source=b"",
    )
