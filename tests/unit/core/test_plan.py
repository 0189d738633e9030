"""Form of the plan on the wire: the same plan is read back, and anything else is rejected."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankdump._core.plan import (
    ContentSettings,
    DeliverySettings,
    DumpPlan,
    IterationSelection,
    OperatorSelection,
    OutputSettings,
    TensorExclusion,
    TensorSelection,
    WatchedOperators,
    plan_from_json,
    plan_to_json,
)
from rankdump.errors import ProtocolError

texts = st.text(st.characters(exclude_characters="\0"), max_size=20)
names = st.lists(texts, max_size=3).map(tuple)
numbers = st.integers(0, 2**64 - 1)
excluded = st.lists(st.builds(TensorExclusion, texts, names), max_size=2).map(tuple)
operators = st.builds(
    OperatorSelection,
    st.booleans(),
    names,
    names,
    st.lists(st.sampled_from(["a", ".*op[0-9]+", r"\d"])).map(tuple),
    marked=st.booleans(),
    ranges=st.lists(st.tuples(texts, texts), max_size=2).map(tuple),
    without_types=excluded,
    without_names=excluded,
    spelt=st.booleans(),
)
plans = st.builds(
    DumpPlan,
    output=st.builds(
        OutputSettings,
        root=texts.map("/".__add__),
        net_name=st.from_regex(r"[A-Za-z0-9_-]+", fullmatch=True),
        layout=texts,
        codec=texts,
        file_mode=st.integers(0, 0o777),
        folder_mode=st.integers(0, 0o777),
    ),
    selection=st.builds(
        TensorSelection,
        iterations=st.builds(
            IterationSelection, texts, st.none() | st.lists(st.tuples(numbers, numbers)).map(tuple)
        ),
        devices=st.none() | st.lists(numbers, max_size=3).map(tuple),
        operators=operators,
        models=st.lists(st.tuples(texts, operators), max_size=2).map(tuple),
        watched=st.none() | st.builds(WatchedOperators, names, names),
        inputs=st.booleans(),
        outputs=st.booleans(),
        optimizer_states=st.booleans(),
    ),
    content=st.builds(
        ContentSettings,
        fingerprints=st.booleans(),
        run_card=st.booleans(),
        baseline=st.sampled_from(["", "/data/earlier"]),
    ),
    delivery=st.builds(
        DeliverySettings,
        on_full=st.sampled_from(["block", "drop", "statistic"]),
        block_timeout_s=st.floats(0, 1e6),
        max_step_overhead=st.floats(0, 1),
        buffer_bytes=numbers,
        durability=st.sampled_from(["written", "synced"]),
        strict=st.booleans(),
    ),
    dialect=texts,
)


@given(plan=plans)
def test_plan_round_trip(plan: DumpPlan):
    """Every plan comes back as it was."""
    assert plan_from_json(plan_to_json(plan)) == plan


def test_plan_of_an_older_client_is_read():
    """It lacks keys that came later."""
    body = json.loads(plan_to_json(PLAN))
    del body["delivery"]["embedded"], body["delivery"]["max_step_overhead"]
    del body["selection"]["optimizer_states"], body["content"]["fingerprints"]
    del body["content"]["baseline"]
    assert plan_from_json(json.dumps(body).encode()) == PLAN
    del body["content"]["run_card"]
    assert not plan_from_json(json.dumps(body).encode()).content.run_card


PLAN = DumpPlan(
    OutputSettings("/tmp/x"), TensorSelection(IterationSelection("1-2", ((1, 2),)), devices=(0,))
)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("version",), 2),
        (("version",), None),
        (("output",), None),
        (("output", "root"), "relative"),
        (("output", "root"), 7),
        (("output", "root"), "/a\0b"),
        (("output", "net_name"), "../../x"),
        (("output", "started"), "2026/../.."),
        (("output", "file_format"), "zip"),
        (("content", "tables"), "none"),
        (("content", "baseline"), "relative"),
        (("content", "baseline"), "/a\0b"),
        (("content", "baseline"), "/" + "a" * 5000),
        (("content", "baseline"), None),
        (("selection", "models"), [["a"]]),
        (("selection", "models"), [["a", {}]]),
        (("selection", "watched"), []),
        (("selection", "operators", "ranges"), [["a"]]),
        (("selection", "operators", "without_names"), ["a"]),
        (("output", "net_name"), "a/b"),
        (("output", "net_name"), "a\n"),
        (("output", "file_mode"), "0440"),
        (("output", "file_mode"), 0o7777),
        (("output", "folder_mode"), -1),
        (("output", "folder_mode"), True),
        (("output", "codec"), None),
        (("output", "extra"), 1),
        (("selection",), []),
        (("selection", "iterations"), "all"),
        (("selection", "iterations", "spans"), [[1]]),
        (("selection", "iterations", "spans"), [[1, 2, 3]]),
        (("selection", "iterations", "spans"), 5),
        (("selection", "iterations", "spans"), [["x", "y"]]),
        (("selection", "iterations", "spans"), [[0, float("inf")]]),
        (("selection", "devices"), ["x"]),
        (("selection", "devices"), [None]),
        (("selection", "operators", "names"), None),
        (("selection", "operators", "patterns"), ["("]),
        (("delivery",), {}),
        (("delivery", "on_full"), "explode"),
        (("delivery", "on_full"), []),
        (("delivery", "durability"), None),
        (("delivery", "block_timeout_s"), "soon"),
        (("delivery", "max_step_overhead"), 1.5),
        (("delivery", "buffer_bytes"), None),
    ],
)
def test_plan_with_impossible_fields_is_rejected(path: tuple[str, ...], value: object):
    """A field that no plan could have is a ProtocolError."""
    body: dict[str, Any] = json.loads(plan_to_json(PLAN))
    inner = body
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    with pytest.raises(ProtocolError, match="plan cannot be read"):
        plan_from_json(json.dumps(body).encode())


@pytest.mark.parametrize("path", [("output",), ("selection", "operators"), ("dialect",)])
def test_plan_with_missing_fields_is_rejected(path: tuple[str, ...]):
    """A plan with a part left out is a ProtocolError."""
    body: dict[str, Any] = json.loads(plan_to_json(PLAN))
    inner = body
    for name in path[:-1]:
        inner = inner[name]
    del inner[path[-1]]
    with pytest.raises(ProtocolError):
        plan_from_json(json.dumps(body).encode())


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)


@given(value=json_values)
def test_plan_of_any_other_json_is_rejected(value: object):
    """Any other JSON value is a ProtocolError."""
    with pytest.raises(ProtocolError):
        plan_from_json(json.dumps(value).encode())


@given(data=st.binary(max_size=100))
def test_plan_of_any_bytes_is_rejected(data: bytes):
    """Any bytes are a ProtocolError."""
    with pytest.raises(ProtocolError):
        plan_from_json(data)


@pytest.mark.parametrize(
    "operators",
    [
        OperatorSelection(everything=False, patterns=("a" * 1001,)),
        OperatorSelection(everything=False, patterns=("a",) * 1001),
    ],
)
def test_plan_patterns_are_bounded(operators: OperatorSelection):
    """They run in the agent: how long one takes depends on how long it is."""
    plan = dataclasses.replace(PLAN, selection=TensorSelection(operators=operators))
    with pytest.raises(ProtocolError, match="1001"):
        plan_from_json(plan_to_json(plan))


@pytest.mark.parametrize(("field", "text"), [("root", "/" + "r" * 4096), ("net_name", "n" * 256)])
def test_plan_names_too_long_for_a_disk_are_rejected(field: str, text: str):
    plan = dataclasses.replace(PLAN, output=dataclasses.replace(PLAN.output, **{field: text}))
    with pytest.raises(ProtocolError, match=f"the output .*{field}"):
        plan_from_json(plan_to_json(plan))


def test_plan_that_is_nested_or_cut_off_is_rejected():
    """Neither a very deep document nor a cut-off plan gets through."""
    whole = plan_to_json(PLAN)
    for data in (b"[" * 200_000, *(whole[:length] for length in range(len(whole)))):
        with pytest.raises(ProtocolError):
            plan_from_json(data)


def test_iteration_selection_contains_its_spans():
    """Spans are inclusive at both ends; no spans match nothing; None matches all."""
    spans = IterationSelection("0|5-8", ((0, 0), (5, 8)))
    assert [n for n in range(12) if n in spans] == [0, 5, 6, 7, 8]
    assert 3 not in IterationSelection("5-3", ())
    assert 3 in IterationSelection()
