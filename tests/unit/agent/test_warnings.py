"""What a coordinator has to say to ranks: through session and mailbox to the stream."""

from __future__ import annotations

import pytest

from rankdump.contract.exchange import Acknowledgement, SessionRequest
from rankdump.contract.plan_json import plan_from_json
from rankdumpd.agent.mailbox import Mailbox
from rankdumpd.agent.sessions import Session


@pytest.fixture
def session(make_request) -> Session:
    request: SessionRequest = make_request(framework="torch 2", device_target="GPU")
    return Session(request, plan_from_json(request.plan_json))


def told(mailbox: Mailbox) -> list[Acknowledgement]:
    mailbox.complete(0)
    return list(mailbox.answers())


def test_each_warning_is_passed_on_once(session):
    """Said again and again by the coordinator, it reaches the stream a single time."""
    mailbox = Mailbox()
    session.warn("before the stream")
    session.connect(mailbox)
    for _ in range(3):
        session.warn("half of it is used")
    (news,) = told(mailbox)
    assert news.warnings == ("before the stream", "half of it is used")


def test_a_warning_does_not_hide_behind_an_acknowledgement():
    """What comes after the last acknowledgement is news of its own."""
    mailbox = Mailbox()
    mailbox.acknowledge(4)
    answers = mailbox.answers()
    assert next(answers) == Acknowledgement(4)
    mailbox.warn("a")
    assert next(answers) == Acknowledgement(4, warnings=("a",))
    mailbox.warn("b")
    mailbox.complete(4)
    assert list(answers) == [Acknowledgement(4, warnings=("b",))]


def test_a_new_stream_hears_all_again(session):
    """Nobody knows whether it got through before the last stream broke."""
    session.warn("a")
    for _ in range(2):
        mailbox = Mailbox()
        session.connect(mailbox)
        (news,) = told(mailbox)
        assert news.warnings == ("a",)


def test_a_session_says_what_hints_need(session):
    """Framework, target and the selected iterations stand in its status."""
    status = session.status()
    assert (status.framework, status.device_target) == ("torch 2", "GPU")
    assert status.selected == session.plan.selection.iterations.text != ""
