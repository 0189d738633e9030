"""JSON of dataclasses: the same value comes back, and any other type is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, Literal

import pytest

from rankdump._core.json_values import make_plain, read_json


class SmallColor(str, Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class InnerValue:
    number: int
    share: float = 0.5


@dataclass(frozen=True, slots=True)
class OuterValue:
    name: str
    color: SmallColor
    mode: Literal["a", "b"]
    inner: InnerValue
    flag: bool = False
    several: tuple[InnerValue, ...] = ()
    pairs: tuple[tuple[int, str], ...] | None = None
    by_rank: Mapping[int, int] = field(default_factory=dict[int, int])


VALUE = OuterValue(
    *("n", SmallColor.BLUE, "b", InnerValue(1, 2)),
    several=(InnerValue(3),),
    pairs=((1, "x"), (2, "y")),
    by_rank=MappingProxyType({7: 8}),
)
BODY = json.loads(json.dumps(VALUE, default=make_plain))


def test_dataclass_round_trip_keeps_every_field():
    assert read_json(OuterValue, BODY) == VALUE


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"name": 7}, "OuterValue.name is 7, not a string"),
        ({"color": "green"}, "OuterValue.color is 'green', not one of red, blue"),
        ({"mode": ["a"]}, r"OuterValue.mode is \['a'\], not one of a, b"),
        ({"inner": {"number": True}}, "InnerValue.share is missing"),
        ({"inner": {"number": True, "share": 1}}, "InnerValue.number is True, not an integer"),
        ({"inner": {"number": 1, "share": "1"}}, "InnerValue.share is '1', not a number"),
        ({"inner": []}, r"InnerValue is \[\], not an object"),
        ({"flag": 1}, "OuterValue.flag is 1, not true or false"),
        ({"several": {}}, "OuterValue.several is {}, not a list"),
        ({"pairs": [[1, "x", 2]]}, r"OuterValue.pairs is \[1, 'x', 2\], not a list of 2"),
        ({"by_rank": {"x": 1}}, "OuterValue.by_rank is {'x': 1}, not an object with integers as"),
        ({"extra": 1}, "OuterValue has the unknown field 'extra'"),
    ],
)
def test_read_json_names_field_value_and_what_is_allowed(changes: dict[str, Any], text: str):
    with pytest.raises(ValueError, match=text):
        read_json(OuterValue, BODY | changes)


def test_read_json_takes_absent_unknown_and_low_fields_as_asked():
    assert read_json(InnerValue, {"number": -1}, defaults=True) == InnerValue(-1)
    assert read_json(InnerValue, {"number": 1, "share": 0, "x": 1}, unknown=True).share == 0
    with pytest.raises(ValueError, match=r"number is -1, not an integer of at least 0"):
        read_json(InnerValue, {"number": -1, "share": 0.5}, minimum=0)
