"""The writer of session files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rankdump._analysis.reader.session_files import read_tree_sessions
from rankdump._core.plan import DumpPlan, OutputSettings, plan_from_json, plan_to_json
from rankdump._core.session_protocol import SessionEnd
from rankdump._core.status import SessionState
from rankdump._core.tree_session import SESSIONS_FOLDER
from rankdumpd.agent.session.rank_session import RankSession
from rankdumpd.agent.session.session_files import SessionFiles, find_client_address

SessionMaker = Callable[[Path], RankSession]


@pytest.fixture
def make_session(make_request) -> SessionMaker:
    """Makes the session of a rank that dumps into a folder."""

    def make(root: Path) -> RankSession:
        text = plan_to_json(DumpPlan(output=OutputSettings(root=str(root))))
        return RankSession(make_request(plan_json=text), plan_from_json(text))

    return make


def test_session_file_follows_the_state_of_the_session(
    tmp_path: Path, make_session: SessionMaker
) -> None:
    """What waits at the stop is written, and the file names the daemons."""
    session, files = make_session(tmp_path), SessionFiles("unix:/a.sock", "c:1", host="me")
    files.update(session)
    files.start()
    assert files.stop(10)
    (found,) = read_tree_sessions(tmp_path)
    assert (found.agent, found.coordinator, found.agent_host) == ("unix:/a.sock", "c:1", "me")
    assert found.status == session.status()
    assert found.status.state is SessionState.OPEN
    session.close_by_rank(SessionEnd(4))
    files.update(session)
    files.start()
    assert files.stop(10)
    (found,) = read_tree_sessions(tmp_path)
    assert (found.status.state, found.status.iterations_seen) == (SessionState.CLOSED, 4)


def test_session_file_is_written_once_for_each_state(
    tmp_path: Path, make_session: SessionMaker
) -> None:
    """An update without a change leaves the file, and the time of the change, as they are."""
    session, times = make_session(tmp_path), iter(range(10))
    files = SessionFiles("", "", host="me", clock_us=lambda: next(times))
    for _ in range(3):
        files.update(session)
        files.start()
        assert files.stop(10)
    (found,) = read_tree_sessions(tmp_path)
    assert found.changed_us == 0


def test_unwritable_tree_does_not_stop_the_agent(
    tmp_path: Path, caplog, make_session: SessionMaker
) -> None:
    """The failure is logged once for the tree."""
    root = tmp_path / "tree"
    root.write_text("a file in place of the folder")
    session, files = make_session(root), SessionFiles("", "", host="me")
    for _ in range(2):
        files.update(session)
        files.start()
        assert files.stop(10)
    assert len([each for each in caplog.messages if "session file of rank" in each]) == 1


def test_damaged_session_files_are_left_out(tmp_path: Path) -> None:
    """A reader of a tree never fails because of them."""
    folder = tmp_path / SESSIONS_FOLDER
    folder.mkdir(parents=True)
    (folder / "rank_0.aa.json").write_text("{")
    (folder / "rank_1.bb.json").write_bytes(b"\xff\xfe")
    (folder / "rank_2.cc.json").symlink_to(folder / "rank_0.aa.json")
    (folder / "rank_3.dd.json").mkdir()
    assert read_tree_sessions(tmp_path) == ()


def test_address_for_clients_is_one_they_can_use() -> None:
    """A server on every interface is reached by the name of its host."""
    assert find_client_address("0.0.0.0:7420", "node7") == "node7:7420"
    assert find_client_address("[::]:7420", "node7") == "node7:7420"
    assert find_client_address("10.0.0.4:7420", "node7") == "10.0.0.4:7420"
    assert find_client_address("unix:/run/a.sock", "node7") == "unix:/run/a.sock"
    assert find_client_address("127.0.0.1:0", "node7") == ""
