"""The writer of session files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rankdump._analysis.reader.manifests import read_tree_sessions
from rankdump._core.plan import DumpPlan, OutputSettings, plan_from_json, plan_to_json
from rankdump._core.session_protocol import SessionEnd
from rankdump._core.status import SessionState
from rankdump._core.tree_session import SESSIONS_FOLDER
from rankdumpd.agent.session.rank_session import RankSession, prepare_tree
from rankdumpd.agent.session.session_files import (
    SessionFiles,
    find_client_address,
    find_daemons,
)

SessionMaker = Callable[[Path], RankSession]


@pytest.fixture
def make_session(make_request) -> SessionMaker:
    """Makes the session of a rank that dumps into a folder."""

    def make(root: Path) -> RankSession:
        text = plan_to_json(DumpPlan(output=OutputSettings(root=str(root))))
        daemons = find_daemons("unix:/a.sock", "c:1", "me")
        return RankSession(make_request(plan_json=text), plan_from_json(text), daemons)

    return make


def write_file(files: SessionFiles, session: RankSession) -> None:
    files.update(session)
    files.start()
    assert files.stop(10)


def test_session_file_follows_the_state_of_the_session(
    tmp_path: Path, make_session: SessionMaker
) -> None:
    """It exists before the thread runs and names the daemons; what waits at the stop is written."""
    session, files = make_session(tmp_path), SessionFiles()
    prepare_tree(session, session.request, 1)
    (found,) = read_tree_sessions(tmp_path)
    assert (found.agent, found.coordinator, found.agent_host) == ("unix:/a.sock", "c:1", "me")
    assert (found.status, found.changed_us) == (session.status(), 1)
    assert found.status.state is SessionState.OPEN
    session.close_by_rank(SessionEnd(4))
    write_file(files, session)
    (found,) = read_tree_sessions(tmp_path)
    assert (found.status.state, found.status.iterations_seen) == (SessionState.CLOSED, 4)


def test_session_file_is_written_once_for_each_state(
    tmp_path: Path, make_session: SessionMaker
) -> None:
    """An update without a change leaves the file, and the time of the change, as they are."""
    session = make_session(tmp_path)
    prepare_tree(session, session.request, 1)
    for at in (2, 3):
        prepare_tree(session, session.request, at)
        write_file(SessionFiles(clock_us=lambda: 4), session)
        assert read_tree_sessions(tmp_path)[0].changed_us == 1
    session.mark_lost()
    for at in (5, 6):
        write_file(SessionFiles(clock_us=lambda at=at: at), session)
        assert read_tree_sessions(tmp_path)[0].changed_us == 5


def test_damaged_session_file_is_replaced(tmp_path: Path, make_session: SessionMaker) -> None:
    session = make_session(tmp_path)
    prepare_tree(session, session.request, 1)
    (path,) = (tmp_path / SESSIONS_FOLDER).iterdir()
    path.chmod(0o600)
    path.write_text("{")
    write_file(SessionFiles(), session)
    assert read_tree_sessions(tmp_path)[0].status == session.status()


def test_removed_tree_is_not_made_for_a_session_file(
    tmp_path: Path, make_session: SessionMaker
) -> None:
    """Also when the agent has it open."""
    root = tmp_path / "tree"
    session = make_session(root)
    prepare_tree(session, session.request, 1)
    root.rename(tmp_path / "away")
    session.mark_lost()
    write_file(SessionFiles(), session)
    assert not root.exists()
    assert read_tree_sessions(tmp_path / "away")[0].status.state is SessionState.OPEN


def test_unwritable_tree_does_not_stop_the_agent(
    tmp_path: Path, caplog, make_session: SessionMaker
) -> None:
    """The failure is logged once for the tree."""
    root = tmp_path / "tree"
    root.write_text("a file in place of the folder")
    session, files = make_session(root), SessionFiles()
    for _ in range(2):
        write_file(files, session)
    assert len([each for each in caplog.messages if "session file of rank" in each]) == 1


def test_session_without_a_file_is_a_finding(tmp_path: Path, make_session: SessionMaker) -> None:
    """Its tensors can be written nevertheless."""
    (tmp_path / ".rankdump").mkdir()
    (tmp_path / SESSIONS_FOLDER).write_text("a file in place of the folder")
    session = make_session(tmp_path)
    prepare_tree(session, session.request, 1)
    (finding,) = session.findings()
    assert finding.startswith("rank 0: its session has no file in the tree: ")
    assert (tmp_path / "rank_0/.dump_metadata/data_dump.json").exists()


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
