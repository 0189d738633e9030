"""Log messages of a session."""

from __future__ import annotations

import uuid

import pytest

from rankdump._core.drop_reasons import DROP_EXPLANATIONS
from rankdump._core.rank_identity import RankIdentity, make_session_request
from rankdump._core.session_protocol import SessionRequest
from rankdump._recorder.session_logger import SessionLogger
from rankdump._transport.send_buffer import LinkState


@pytest.fixture
def session_logger() -> SessionLogger:
    return SessionLogger(request_of(RankIdentity()), "unix:/a", 1 << 20)


def request_of(identity: RankIdentity) -> SessionRequest:
    return make_session_request(identity, plan_json=b"", config_source=b"")


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message.removeprefix("rankdump: ") for record in caplog.records]


def test_warning_is_logged_once_for_each_text_or_subject(session_logger, caplog):
    for name in ("a", "a", "b"):
        session_logger.warn_once(f"about {name}")
        session_logger.warn_lost_tensor("buffer_full", name)
    assert said(caplog) == [
        "about a",
        "tensors are dropped (buffer_full), the first of a: "
        + "; ".join(DROP_EXPLANATIONS["buffer_full"]),
        "about b",
    ]


def test_warnings_are_limited(caplog, monkeypatch):
    monkeypatch.setattr("rankdump._recorder.session_logger._MAX_WARNINGS", 2)
    logger = SessionLogger(request_of(RankIdentity()), "unix:/a", 1 << 20)
    for number in range(9):
        logger.warn_once(f"fault {number}")
    assert said(caplog) == [
        "fault 0",
        "fault 1",
        "2 different warnings were logged; further ones are suppressed",
    ]


@pytest.mark.parametrize(
    ("links", "closing", "words"),
    [
        ([LinkState.ABSENT, LinkState.ABSENT], False, ["no agent at unix:/a"]),
        ([LinkState.UNRESPONSIVE], False, ["the agent at unix:/a does not answer"]),
        (
            [LinkState.UP, LinkState.AWAY, LinkState.AWAY, LinkState.UP],
            False,
            ["lost the agent", "the agent at"],
        ),
        # A stream ends with its session: what is not told as lost does not come back either.
        ([LinkState.UP, LinkState.AWAY, LinkState.UP, LinkState.AWAY], True, []),
        ([LinkState.REJECTED], False, ["the agent at unix:/a rejected this rank: why"]),
        # A warning that nothing is there is followed by one that somebody came.
        (
            [LinkState.ABSENT, LinkState.ABSENT, LinkState.UP, LinkState.UP],
            False,
            ["no agent at unix:/a (why)", "the agent at unix:/a answers now"],
        ),
        (
            [LinkState.WAITING, LinkState.WAITING, LinkState.UP],
            False,
            ["the agent at unix:/a has not opened the session (why)", "the agent at unix:/a has"],
        ),
        (
            [LinkState.OPENING, LinkState.OPENING, LinkState.UP],
            False,
            ["the agent at unix:/a has not opened the session (why)", "the agent at unix:/a has"],
        ),
    ],
)
def test_link_changes_are_logged(session_logger, caplog, links, closing, words):
    for link in links:
        session_logger.log_link_change(link, "why", closing=closing)
    found = said(caplog)
    assert len(found) == len(words)
    assert all(text.startswith(start) for text, start in zip(found, words, strict=True))


def test_losses_are_summed_by_reason(session_logger, caplog):
    session_logger.warn_losses({}, 0)
    assert said(caplog) == []
    session_logger.warn_losses({"buffer_full": 3, "sparse": 1}, 2)
    assert said(caplog)[-1] == "4 tensors were not dumped: 3 buffer_full, 1 sparse"


def test_unused_shared_memory_is_logged(session_logger, caplog):
    """Missing shared memory is logged once, tensors in it only if there are any."""
    for reason in ("the agent no longer grants shared memory", "no such file"):
        session_logger.warn_no_shared_memory(reason)
    session_logger.warn_unwritten_tensors(0, LinkState.UP)
    session_logger.warn_unwritten_tensors(3, LinkState.UP)
    assert said(caplog) == [
        "tensors are sent over the stream, not through shared memory: "
        "the agent no longer grants shared memory",
        "the agent at unix:/a has yet to write 3 tensors",
    ]


def test_losses_without_agent_are_logged_with_the_reason(caplog):
    """One line has the number of tensors that were not dumped, and the package to install."""
    missing = "no daemon can be started, because click is not installed"
    session_logger = SessionLogger(request_of(RankIdentity()), "unix:/a", 1 << 20, missing=missing)
    session_logger.log_link_change(LinkState.ABSENT, "no such file", closing=False)
    session_logger.warn_losses({"not_taken_by_agent": 3}, 0)
    first, last = said(caplog)
    assert first.startswith(f"{missing}: training continues")
    assert last == f"3 tensors were not dumped: 3 not_taken_by_agent; {missing}"


def test_warning_of_all_ranks_is_logged_by_one_rank_of_a_host(caplog):
    """A common warning is logged by one rank; each rank logs its own losses, with its name."""
    # Claims are names of this machine, where the same test may run from another checkout.
    job = uuid.uuid4().hex
    ranks = [RankIdentity(rank, 2, rank, job) for rank in range(2)]
    voices = [SessionLogger(request_of(rank), "unix:/a", 1 << 20) for rank in ranks]
    for session_logger in voices:
        for link in (LinkState.ABSENT, LinkState.UP, LinkState.AWAY, LinkState.UP, LinkState.AWAY):
            session_logger.log_link_change(link, "why", closing=False)
        session_logger.warn_once("a fault of the script")
        session_logger.warn_losses({"buffer_full": 3}, 0)
    assert [text.split(" (")[0] for text in said(caplog)] == [
        "no agent at unix:/a",
        "the agent at unix:/a answers now",
        "lost the agent at unix:/a: why",
        "the agent at unix:/a is back",
        "lost the agent at unix:/a: why",
        "a fault of the script",
        "rank 0: 3 tensors were not dumped: 3 buffer_full",
        "rank 1: 3 tensors were not dumped: 3 buffer_full",
    ]
    caplog.clear()
    SessionLogger(request_of(RankIdentity(0, 2, 0, f"not {job}")), "unix:/a", 1).warn_once(
        "a fault of the script"
    )
    assert said(caplog) == ["a fault of the script"]
    for session_logger in voices:
        session_logger.close()
    SessionLogger(request_of(ranks[1]), "unix:/a", 1).warn_once("a fault of the script")
    assert len(said(caplog)) == 2


@pytest.mark.parametrize(
    ("link", "message"),
    [
        (
            LinkState.AWAY,
            "the agent at unix:/a has not come back: 3 tensors remain in its shared memory and are "
            "written when it runs again",
        ),
        (
            LinkState.REJECTED,
            "3 tensors remain in shared memory: the agent at unix:/a writes them if it knows the "
            "session, or logs that they are lost",
        ),
    ],
)
def test_tensors_that_remain_in_shared_memory_are_logged(session_logger, caplog, link, message):
    session_logger.warn_unwritten_tensors(3, link)
    assert said(caplog) == [message]
