"""Warnings are said once, and not for ever."""

from __future__ import annotations

import pytest

from rankdump.pipeline.voice import Voice
from rankdump.ship import Link


@pytest.fixture
def voice() -> Voice:
    return Voice("unix:/a", 1 << 20)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message.removeprefix("rankdump: ") for record in caplog.records]


def test_a_message_or_a_matter_is_said_once(voice, caplog):
    for name in ("a", "a", "b"):
        voice.once(f"about {name}")
        voice.lost("buffer_full", name)
    assert said(caplog) == [
        "about a",
        "tensors are dropped for buffer_full, the first at a",
        "about b",
    ]


def test_a_script_that_is_always_wrong_does_not_fill_its_log(voice, caplog, monkeypatch):
    monkeypatch.setattr("rankdump.pipeline.voice._MAX_WARNINGS", 2)
    for number in range(9):
        voice.once(f"fault {number}")
    assert said(caplog) == ["fault 0", "fault 1", "2 different warnings were given: no more are"]


@pytest.mark.parametrize(
    ("links", "closing", "words"),
    [
        ([Link.ABSENT, Link.ABSENT], False, ["no agent at unix:/a"]),
        ([Link.UP, Link.AWAY, Link.AWAY, Link.UP], False, ["lost the agent", "the agent at"]),
        # A stream ends with its session: what is not told as lost does not come back either.
        ([Link.UP, Link.AWAY, Link.UP, Link.AWAY], True, []),
        ([Link.REFUSED], False, ["the agent at unix:/a refused this rank: why"]),
    ],
)
def test_news_of_the_agent(voice, caplog, links, closing, words):
    for link in links:
        voice.link_changed(link, "why", closing=closing)
    found = said(caplog)
    assert len(found) == len(words)
    assert all(text.startswith(start) for text, start in zip(found, words, strict=True))


def test_the_sum_of_what_was_lost(voice, caplog):
    voice.losses({}, 0)
    assert said(caplog) == []
    voice.losses({"buffer_full": 3, "sparse": 1}, 2)
    assert said(caplog)[-1] == "4 tensors were not dumped: 3 buffer_full, 1 sparse"


def test_what_became_of_shared_memory(voice, caplog):
    """Its absence is said once, and what is left in it only when there is something."""
    for reason in ("the agent grants none", "no such file"):
        voice.no_slab(reason)
    voice.left_in_slab(0)
    voice.left_in_slab(3)
    assert said(caplog) == [
        "tensors travel on the stream, in pieces: the agent grants none",
        "3 tensors are left to the agent at unix:/a to write",
    ]
