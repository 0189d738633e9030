"""Tests of warnings on their way from the coordinator through session and mailbox to a stream."""

from __future__ import annotations

from typing import Any

import pytest

from rankdump._core.plan import plan_from_json
from rankdump._core.session_protocol import Acknowledgement, SessionRequest
from rankdumpd.agent.service import SessionNotifier
from rankdumpd.agent.session.rank_session import RankSession, StreamMailbox
from rankdumpd.agent.session.session_files import SessionFiles


@pytest.fixture
def session(make_request) -> RankSession:
    request: SessionRequest = make_request(framework="torch 2", device_target="GPU")
    return RankSession(request, plan_from_json(request.plan_json))


def read_answers(mailbox: StreamMailbox) -> list[Acknowledgement]:
    mailbox.complete(0)
    return list(mailbox.answers())


def test_session_sends_each_warning_once(session):
    mailbox = StreamMailbox()
    session.warn("before the stream")
    session.connect(mailbox)
    for _ in range(3):
        session.warn("half of it is used")
    (news,) = read_answers(mailbox)
    assert news.warnings == ("before the stream", "half of it is used")


def test_mailbox_sends_warning_after_acknowledgement():
    """A warning after the last acknowledgement is sent in a message of its own."""
    mailbox = StreamMailbox()
    mailbox.acknowledge(4)
    answers = mailbox.answers()
    assert next(answers) == Acknowledgement(4)
    mailbox.warn("a")
    assert next(answers) == Acknowledgement(4, warnings=("a",))
    mailbox.warn("b")
    mailbox.complete(4)
    assert list(answers) == [Acknowledgement(4, warnings=("b",))]


def test_new_stream_receives_all_warnings_again(session):
    """They may not have arrived before the last stream broke."""
    session.warn("a")
    for _ in range(2):
        mailbox = StreamMailbox()
        session.connect(mailbox)
        (news,) = read_answers(mailbox)
        assert news.warnings == ("a",)


def test_session_status_has_fields_for_hints(session):
    """Framework, device target and selected iterations."""
    status = session.status()
    assert (status.framework, status.device_target) == ("torch 2", "GPU")
    assert status.selected == session.plan.selection.iterations.text != ""


def test_ranks_of_a_job_get_the_first_wording_of_a_limit(make_request):
    """Only numbers may differ; texts of other jobs and other limits are new."""

    class Desk:
        """A reporter without a coordinator."""

        def session(self, status: object, root: str) -> None:
            pass

        def warnings(self, job_id: str) -> list[str]:
            return []

    free = iter(["3.2 GiB", "3.1 GiB", "900.5 GiB", "2.0 GiB"])
    nobody: Any = None
    desk: Any = Desk()
    telling = SessionNotifier(
        nobody,
        nobody,
        desk,
        lambda session: [f"disk of /dump: {next(free)} free"],
        SessionFiles(),
    )
    heard: list[tuple[str, ...]] = []
    for rank, job in enumerate(["a", "a", "b", "a"]):
        request = make_request(session_id=f"s{rank}", job_id=job)
        session, mailbox = RankSession(request, plan_from_json(request.plan_json)), StreamMailbox()
        session.connect(mailbox)
        telling.report_session(session)
        heard += [news.warnings for news in read_answers(mailbox)]
    first = ("disk of /dump: 3.2 GiB free",)
    assert heard == [first, first, ("disk of /dump: 900.5 GiB free",), first]
