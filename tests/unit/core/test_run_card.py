"""Run card: it is read back as written, and damage is one line."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankdump._core.run_card import (
    MAX_CARD_BYTES,
    ModelSummary,
    ParameterDigest,
    RunCard,
    format_card,
    format_parameter,
    parse_card,
    parse_parameter,
)
from rankdump.errors import CorruptedError

names = st.text(max_size=9)
texts = st.dictionaries(names, names, max_size=3)
parameters = st.builds(
    ParameterDigest,
    st.sampled_from(("float32", "bfloat16")),
    st.integers(0, 2**64 - 1),
    st.sampled_from(("", "0:2/4,0:8/8")),
)
cards = st.builds(
    RunCard,
    command=st.lists(names, max_size=3).map(tuple),
    versions=texts,
    environment=texts,
    revision=names,
    settings=texts,
    models=st.lists(
        st.builds(ModelSummary, names, st.integers(0, 9), st.integers(0, 2**60), names), max_size=2
    ).map(tuple),
    numbers=texts,
    digests=texts,
    parameters=st.dictionaries(names, parameters.map(format_parameter), max_size=3),
)


@given(card=cards)
def test_card_round_trip(card: RunCard):
    assert parse_card(format_card(card)) == card
    assert parse_card(json.loads(format_card(card))) == card


@given(found=parameters)
def test_digest_of_a_parameter_round_trip(found: ParameterDigest):
    assert parse_parameter(format_parameter(found)) == found


def test_card_of_a_later_release_is_read():
    """Unknown fields are ignored, and all fields may be absent."""
    assert parse_card(b'{"version": 1, "weather": "fine"}') == RunCard()


def test_card_that_is_too_large_loses_its_parameters_first():
    digest = format_parameter(ParameterDigest("float32", 1))
    many = {f"layer.{number}": digest for number in range(10_000)}
    data = format_card(RunCard(revision="ab", parameters=many))
    assert parse_card(data) == RunCard(revision="ab")
    assert format_card(RunCard(revision="a" * MAX_CARD_BYTES)) == b""


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"[" * 100_000,
        b"[]",
        b"{}",
        b'{"version": 2}',
        b'{"version": true}',
        b'{"version": 1, "command": "train.py"}',
        b'{"version": 1, "command": [1]}',
        b'{"version": 1, "versions": {"torch": 2}}',
        b'{"version": 1, "models": [{"name": "Net"}]}',
        b'{"version": 1, "models": [{"name": "", "parameters": -1, "elements": 0, "digest": ""}]}',
        b'{"version": 1, "parameters": {"a": "float32"}}',
        b'{"version": 1, "parameters": {"a": "float32 000000000000zzzz"}}',
        b'{"version": 1, "parameters": {"a": "float32 0 1 2"}}',
        None,
        1.5,
    ],
)
def test_damaged_card_is_one_line(body: object):
    with pytest.raises(CorruptedError, match="run card cannot be read: ") as raised:
        parse_card(body)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 300
