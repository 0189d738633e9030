"""Table of statistics that an agent writes while its ranks go on: a row for every committed tensor,
none twice, whenever agent or writer are killed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest
from support.statistic_rows import count_table_rows as rows
from support.statistic_rows import count_walked_rows as of_walk

from rankdump._analysis.fsck import check_tree
from rankdump._analysis.table.table_files import TABLE_FOLDER, list_tensor_files
from rankdump._analysis.table_index import TableLag, compare_with_tree, index_tree
from rankdump._core.plan import ContentSettings
from rankdumpd.agent.table import table_writer
from rankdumpd.agent.table.table_process import TableAnswer, TableProcess, TableRequest
from rankdumpd.rebuild import rebuild_ledger

WAIT_S = 300
JOBS = Path(__file__).parent / "jobs"
COLUMNS = ["rank", "iteration", "name", "side", "slot", "path", "max"]
STATISTICS = ContentSettings(saved="full", statistics=("max",))
LAYOUTS = ("mindspore-sync", "cann-op", "api-torch")
"""In the last two, tables grow over all iterations."""


def wait_for(holds: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


def is_complete(root: Path) -> bool:
    return bool(list_tensor_files(root)) and compare_with_tree(root) == TableLag(0, 0)


@pytest.fixture
def send(make_rank, frames):
    """Sends iterations of two tensors each; returns the rank and its stream."""

    def send(
        address: str,
        iterations: range,
        *,
        rank: int = 0,
        goodbye: bool = True,
        layout: str = "mindspore-sync",
        **fields,
    ):
        output = {"layout": layout, "started": "20260101000000"}
        made = make_rank(address, rank=rank, content=STATISTICS, output=output, **fields)
        made.open()
        stream, number = made.push(), 3 * iterations.start
        for iteration in iterations:
            for slot in (0, 1):
                number += 1
                array = np.arange(8, dtype=np.float32) * iteration + slot
                about = {"slot": slot, "op_name": f"NN_Linear_{iteration}_forward"}
                about["argument"] = f"output.{slot}"
                stream.send(frames.record(number, array, iteration=iteration, **about))
            number += 1
            stream.send(frames.end(number, iteration, 2))
        stream.wait_acknowledged(number)
        if goodbye:
            stream.send(frames.goodbye(number + 1, len(iterations)))
            assert stream.finish() is grpc.StatusCode.OK
        return made, stream

    return send


def test_ended_job_has_all_rows(make_agent, send):
    """The rows are those of `rankdump index`, in one file for all ranks of the agent."""
    agent = make_agent(table=True)
    for rank in (0, 1):
        made, _ = send(agent.address, range(3), rank=rank, world_size=2, session_id=f"s{rank}")
    root = made.root
    wait_for(lambda: is_complete(root), "the table")
    assert rows(root) == of_walk(root)
    assert set(rows(root).values()) == {1}
    assert sum(rows(root).values()) == 12
    assert index_tree(root).files == 0
    wait_for(lambda: count_rows(agent) == 12, "the metric")
    assert agent.agent.view().findings == ()


def count_rows(agent) -> float:
    return sum(
        each.value
        for each in agent.counters.samples()
        if each.name == "rankdump_agent_table_rows_total"
    )


def test_full_window_is_written_while_the_job_goes_on(make_agent, send, monkeypatch):
    monkeypatch.setattr(table_writer, "WINDOW_RECORDS", 4)
    agent = make_agent(table=True)
    made, stream = send(agent.address, range(2), goodbye=False)
    wait_for(lambda: is_complete(made.root), "the first window")
    (first,) = list_tensor_files(made.root)
    send(agent.address, range(2, 4), goodbye=True)
    wait_for(lambda: is_complete(made.root), "the second window")
    assert first in list_tensor_files(made.root)
    assert rows(made.root) == of_walk(made.root)
    stream.finish()


def test_young_rows_wait(make_agent, send):
    agent = make_agent(table=True)
    made, stream = send(agent.address, range(2), goodbye=False)
    assert not agent.agent._table.write_due()
    assert list_tensor_files(made.root) == []
    agent.agent._table._is_finishing = True
    wait_for(lambda: is_complete(made.root), "the table")
    stream.finish()


def test_last_agent_of_a_job_writes_what_waits(make_agent, send):
    """`drain` of an agent that ends with its job; another leaves rows to the next process."""
    agent = make_agent(table=True)
    made, stream = send(agent.address, range(2), goodbye=False)
    agent.agent._table.finish(WAIT_S)
    assert rows(made.root) == of_walk(made.root)
    stream.finish()


def test_process_without_a_core_is_replaced_at_the_end(make_agent, send, monkeypatch):
    """Beside other jobs, one of idle priority would delay the end of this one."""
    started: list[bool] = []

    class StoppedProcess(TableProcess):
        def __init__(self, *, is_idle: bool) -> None:
            super().__init__(is_idle=is_idle)
            started.append(is_idle)
            if is_idle:
                os.kill(self._process.pid, signal.SIGSTOP)

    monkeypatch.setattr(table_writer, "TableProcess", StoppedProcess)
    monkeypatch.setattr(table_writer, "IDLE_GRACE_S", 0.01)
    agent = make_agent(table=True)
    made, _ = send(agent.address, range(2))
    wait_for(lambda: started, "a process")
    agent.agent._table.finish(WAIT_S)
    assert started == [True, False]
    assert rows(made.root) == of_walk(made.root)


def test_rows_that_wait_are_written_by_the_next_process(make_agent, send):
    agent = make_agent(table=True)
    made, _ = send(agent.address, range(2), goodbye=False)
    agent.stop()
    assert list_tensor_files(made.root) == []
    agent.start()
    agent.agent._table._is_finishing = True
    wait_for(lambda: is_complete(made.root), "the table")
    assert rows(made.root) == of_walk(made.root)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_retired_iterations_have_no_rows(make_agent, send, layout: str):
    """Also where the file of the table has rows of iterations that stay."""
    agent = make_agent(table=True)
    made, _ = send(agent.address, range(4), layout=layout)
    root = made.root
    wait_for(lambda: is_complete(root), "the table")
    assert rows(root) == of_walk(root)
    assert sum(rows(root).values()) == 8
    agent.stop()
    files = [path.stat().st_size for path in root.rglob("*.npy")]
    agent._settings = dataclasses.replace(agent._settings, retain_bytes=sum(files) // 2)
    agent.start()
    wait_for(lambda: len([*root.rglob("*.npy")]) <= len(files) // 2, "retention")
    wait_for(lambda: len([*root.rglob("iteration_*.json")]) <= 2, "the removal of manifests")
    wait_for(lambda: is_complete(root), "the table without them")
    assert rows(root) == of_walk(root)
    assert 0 < sum(rows(root).values()) < 8
    report = check_tree(root, workers=1)
    assert (report.damages, report.table) == ((), ())


def test_unwritable_table_is_said_and_retried(make_agent, send):
    """A link in the place of the folder is not followed."""
    agent = make_agent(table=True)
    made, stream = send(agent.address, range(1), goodbye=False)
    elsewhere = made.root.parent / "elsewhere"
    elsewhere.mkdir()
    (made.root / TABLE_FOLDER).symlink_to(elsewhere)
    agent.agent._table._is_finishing = True
    wait_for(lambda: agent.agent.view().findings, "the finding")
    (finding,) = agent.agent.view().findings
    assert finding.startswith(f"rows of the table of statistics wait: {made.root}: ")
    assert [*elsewhere.iterdir()] == []
    (made.root / TABLE_FOLDER).unlink()
    wait_for(lambda: is_complete(made.root), "the table")
    wait_for(lambda: not agent.agent.view().findings, "no finding")
    stream.finish()


def test_rows_that_wait_for_space_are_said(make_agent, send):
    agent = make_agent(table=True, keep_free_bytes=1 << 60)
    made, stream = send(agent.address, range(1), goodbye=False)
    wait_for(lambda: any("less space" in each for each in agent.agent.view().findings), "why")
    assert list_tensor_files(made.root) == []
    stream.finish()


def test_missing_pyarrow_is_said_once(make_agent, send, monkeypatch, caplog):
    monkeypatch.setattr(table_writer, "_REQUIRED_MODULE", "rankdump_missing")
    with caplog.at_level("INFO"):
        agent = make_agent(table=True)
        made, _ = send(agent.address, range(2))
        agent.stop()
        agent.start()
    said = [each for each in caplog.messages if "no table of statistics" in each]
    assert (
        said
        == ["no table of statistics is written: pyarrow is not installed (rankdump[table])"] * 2
    )
    assert agent.agent._ledger.unindexed.list_sessions() == []
    assert list_tensor_files(made.root) == []


def test_rebuilt_ledger_adds_what_the_table_lacks(make_agent, send, short_dir):
    agent = make_agent(table=True)
    made, _ = send(agent.address, range(2))
    wait_for(lambda: is_complete(made.root), "the table")
    before = list_tensor_files(made.root)
    agent.stop()
    for path in (short_dir / "state").iterdir():
        path.unlink()
    rebuild_ledger(made.root, short_dir / "state")
    agent.start()
    wait_for(lambda: not agent.agent._ledger.unindexed.list_sessions(), "the check")
    assert list_tensor_files(made.root) == before


@pytest.mark.parametrize(
    ("layout", "windows", "least_kills"),
    [("mindspore-sync", 6, 4), ("cann-op", 3, 1), ("api-torch", 3, 1)],
)
def test_row_is_there_once_whenever_the_writer_is_killed(
    make_agent, send, layout: str, windows: int, least_kills: int
):
    """Law: at any call; the ledger has the rows until the file has its final name."""
    agent = make_agent(table=False)
    made, _ = send(agent.address, range(7), layout=layout)
    root, chance, kills = made.root, random.Random(1), 0
    for count in range(1, windows + 1):
        request = make_request(root, count)
        for _ in range(2):
            before = rows(root)
            command = [sys.executable, str(JOBS / "killed_table.py"), str(chance.randint(1, 90))]
            asked = json.dumps(dataclasses.asdict(request))
            done = subprocess.run(command, input=asked, text=True, capture_output=True)
            found = rows(root)
            assert set(found.values()) <= {1}
            assert before.items() <= found.items()
            if done.returncode == 0:
                break
            kills += 1
            assert done.returncode == -signal.SIGKILL, done.stderr
    assert kills >= least_kills
    process = TableProcess(is_idle=False)
    answer = process.write(make_request(root, 7))
    process.close()
    assert answer.error == ""
    assert rows(root) == of_walk(root)


def make_request(root: Path, count: int) -> TableRequest:
    """Return a request for the manifests of the first iterations."""
    found = sorted(root.rglob("iteration_*.json"), key=lambda p: int(p.name.split(".")[0][10:]))
    manifests = [(path.relative_to(root).as_posix(), 0, n) for n, path in enumerate(found[:count])]
    return TableRequest(str(root), 0o400, 0o700, False, manifests)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_killed_agent_loses_no_row(make_daemon, send, tmp_path, layout: str):
    """Agent and writer are killed together at some calls of the writer, one after the other, and
    the rows are there once the next agent has ended a window.
    """
    call = tmp_path / "call"
    environ = {"PYTHONPATH": str(JOBS / "deadly_writer"), "DEADLY_CALL": str(call)}
    call.write_text("1")
    daemon = make_daemon(RANKDUMPD_AGENT__TABLE="true", **environ)
    made, _ = send(daemon.address, range(3), layout=layout)
    root = made.root
    for following in ("14", "33", "0"):
        wait_for(lambda: daemon.process.poll() is not None, "the end of the agent")
        assert daemon.exit_status() == -signal.SIGKILL
        assert set(rows(root).values()) <= {1}
        call.write_text(following)
        daemon.launch()
    wait_for(lambda: is_complete(root), "the table")
    assert rows(root) == of_walk(root)
    assert set(rows(root).values()) == {1}
    daemon.terminate()
    assert daemon.exit_status() == 0


def test_killed_process_is_an_error_that_is_retried():
    process = TableProcess(is_idle=True)
    process.kill()
    answer = process.write(TableRequest("/nowhere", 0o400, 0o700, False, []))
    process.close()
    assert answer == TableAnswer(error="its process has ended: code -9")
