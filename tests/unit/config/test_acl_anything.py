"""acl.json with any content: it gives a plan or a one-line error, never a crash."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rankdump._config.acl_config import parse_acl_config
from rankdump._config.acl_section import ACL_KEYS, ITEM_KEYS, STATISTICS_BY_WORD
from rankdump._config.config_section import ConfigNotes
from rankdump._config.output_path import PathFacts
from rankdump._config.tensorflow_config import parse_dump_config
from rankdump._core.plan import DumpPlan, plan_from_json, plan_to_json
from rankdump.errors import ConfigError
from rankdump.tf import DumpConfig

WORDS = ["on", "off", "all", "output", "stats", "op", "watcher", "lite_exception", "0|5-8", "/a"]
texts = st.sampled_from([*WORDS, *STATISTICS_BY_WORD, "A", "1.2.3.4:/x", "input0"]) | st.text(
    max_size=8
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
entries = st.dictionaries(st.sampled_from(["name", "pos", "begin", "end"]), texts, max_size=3)
lists = st.lists(texts, max_size=3)
items = st.dictionaries(
    st.sampled_from([*ITEM_KEYS, "unknown"]), texts | lists | st.lists(entries, max_size=3)
)
values = texts | scalars | lists | st.lists(items, max_size=3)
dumps = st.dictionaries(st.sampled_from([*ACL_KEYS, "a\nb"]), values, max_size=6)
base = {"dump_path": "/a", "dump_level": "op", "dump_op_switch": "on"}


def there(path: str) -> PathFacts:
    return PathFacts(f"/{path.strip('/')}", exists=True, directory=True, accessible=True)


def held(parsed: Callable[[], DumpPlan], ending: str = "") -> None:
    """Check for a plan that round trips, with one-line warnings, or a one-line error."""
    try:
        plan = parsed()
    except ConfigError as error:
        refusal = str(error)
    else:
        assert plan_from_json(plan_to_json(plan)) == plan
        assert all(warning.isprintable() for warning in plan.warnings)
        return
    assert refusal.endswith(ending)
    assert "\n" not in refusal


@given(dumps | scalars | lists, st.booleans())
def test_acl_config_gives_a_plan_or_one_line(dump: Any, valid: bool):
    """With any values of the keys."""
    body = {"dump": {**base, **dump} if valid and isinstance(dump, dict) else dump}
    held(
        lambda: parse_acl_config(body, file="a.json", environ={}, notes=ConfigNotes(), probe=there),
        ending=")",
    )


@given(st.dictionaries(st.sampled_from([*DumpConfig.__dataclass_fields__]), scalars | lists))
def test_dump_config_gives_a_plan_or_one_line(changes: dict[str, Any]):
    config = {name: getattr(DumpConfig(), name) for name in DumpConfig.__dataclass_fields__}
    held(lambda: parse_dump_config(config | {"enable_dump": True} | changes, probe=there))
