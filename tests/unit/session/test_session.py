"""Sessions as a script uses them: without a plan, with a bad one, and in a job."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
from support.agent_double import RunningFakeAgent, bodies, event_names, plan
from support.slab_agents import wait_until

import rankdump
from rankdump._core.plan import DumpPlan, IterationSelection, OutputSettings, TensorSelection
from rankdump._core.rank_identity import RankIdentity
from rankdump._session.agent_finder import AgentAddress
from rankdump.errors import ExhaustedError


def config(folder: Path, **changes) -> Path:
    """A minimal data_dump.json, with changes in its common section."""
    common = {
        "dump_mode": 0,
        "path": "/tmp/rankdump-test",
        "net_name": "Net",
        "iteration": "all",
        "saved_data": "tensor",
        "input_output": 0,
        "kernels": [],
        "support_device": [0, 1],
    }
    body = {
        "common_dump_settings": common | changes,
        "e2e_dump_settings": {"enable": True, "trans_flag": True},
    }
    path = folder / "data_dump.json"
    path.write_text(json.dumps(body))
    return path


def records(running: RunningFakeAgent) -> list:
    return bodies(running, "record")


def ends(running: RunningFakeAgent) -> list:
    return bodies(running, "iteration_end")


def test_import_of_rankdump_loads_no_heavy_module():
    """Law: neither gRPC nor a framework is loaded by the import or by a session that is off."""
    code = (
        "import sys, rankdump; s = rankdump.Session.from_environment(); s.step(); s.close(); "
        "print([m for m in ('grpc', 'torch', 'google.protobuf', 'rankdumpd') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_public_names_of_rankdump():
    assert set(rankdump.__all__) == {
        "Session",
        "attach",
        "compare",
        "dump_start",
        "dump_stop",
        "layout",
        "limit",
        "microbatch",
        "note",
        "open",
        "set_dump",
        "step",
    }
    assert all(callable(getattr(rankdump, name)) for name in rankdump.__all__)


def test_readers_are_loaded_on_first_use():
    code = (
        "import sys, rankdump; before = 'rankdump.reader' in sys.modules; rankdump.open; "
        "print(before, 'rankdump.reader' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "True"]
    for name in ("close", "reading"):
        with pytest.raises(AttributeError, match=f"'rankdump' has no attribute '{name}'"):
            getattr(rankdump, name)


def test_session_is_inactive_without_a_plan():
    session = rankdump.Session.from_environment({})
    session.step(3)
    session.dump("Add", "x", "input", 0, np.ones(2))
    assert not session.active
    session.close()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ["data_dump.json"]),
        ("{", ["data_dump.json"]),
        ('{"a": 1}', ["data_dump.json", "common_dump_settings"]),
        ({"input_output": 7}, ["input_output", "7", "0 (inputs and outputs)"]),
        ({"iteration": "a"}, ["iteration", "'a'"]),
    ],
)
def test_bad_configuration_is_logged_once_and_stops_no_job(tmp_path, caplog, text, words):
    if isinstance(text, dict):
        path = config(tmp_path, **text)
    else:
        path = tmp_path / "data_dump.json"
        if text is not None:
            path.write_text(text)
    session = rankdump.Session.from_environment({"RANKDUMP_CONFIG": str(path)})
    assert not session.active
    assert len(caplog.records) == 1
    assert all(word in caplog.text for word in words), caplog.text


def test_session_is_inactive_if_the_rank_is_not_a_number(tmp_path, caplog):
    environ = {"RANKDUMP_CONFIG": str(config(tmp_path)), "RANK": "one"}
    assert not rankdump.Session.from_environment(environ).active
    assert "RANK" in caplog.text


def test_session_takes_plan_and_agent_from_the_environment(tmp_path, running):
    environ = {
        "MINDSPORE_DUMP_CONFIG": str(config(tmp_path)),
        "RANKDUMP_AGENT": running.address,
        "RANK": "1",
        "WORLD_SIZE": "2",
    }
    with rankdump.Session.from_environment(environ) as session:
        session.dump("Add", "Default/Add-op0", "output", 0, np.arange(3, dtype="i4"))
    opened = running.agent.opened[0]
    assert (opened.rank, opened.world_size) == (1, 2)
    assert opened.config_source == (tmp_path / "data_dump.json").read_bytes()
    assert [r.op_name for r in records(running)] == ["Default/Add-op0"]
    assert np.frombuffer(records(running)[0].data, "<i4").tolist() == [0, 1, 2]


def started(running: RunningFakeAgent, tmp_path, selection=None, **delivery) -> rankdump.Session:
    the_plan = plan(tmp_path, **delivery)
    if selection is not None:
        the_plan = DumpPlan(output=OutputSettings(str(tmp_path)), selection=selection)
    return rankdump.Session(the_plan, agent=running.address, identity=RankIdentity())


def test_step_with_a_number_begins_that_iteration(running, tmp_path):
    """step(i) at the top of the loop, numbering from a checkpoint."""
    with started(running, tmp_path) as session:
        for i in (100, 101):
            session.step(i)
            session.dump("Add", "a", "input", 0, np.ones(1))
    assert [r.iteration for r in records(running)] == [100, 101]
    assert [(e.iteration, e.expected) for e in ends(running)] == [(100, 1), (101, 1)]


class StateHook:
    """Hook that reads parameters at the end of each iteration that is dumped."""

    def __init__(self) -> None:
        self.read_in: list[int] = []

    def iteration_begins(self, iteration: int, armed: bool) -> None:
        pass

    def iteration_ends(self, iteration: int, armed: bool) -> None:
        if armed:
            self.read_in.append(iteration)

    def detach(self) -> None:
        pass


@pytest.mark.parametrize(("runs_before", "expected"), [(False, [100, 101]), (True, [0, 100, 101])])
def test_state_is_not_read_where_nothing_ran_before_the_first_step(
    running, tmp_path, runs_before, expected
):
    """A loop that goes on from a checkpoint attaches its models before its first `step`."""
    hook = StateHook()
    with started(running, tmp_path) as session:
        session.observe(lambda recorder, graph: hook, "Net")
        if runs_before:
            session.dump("Add", "a", "input", 0, np.ones(1))
        session.step(100)
        session.step(101)
    assert hook.read_in == expected


def test_step_without_a_number_ends_an_iteration(running, tmp_path):
    """step() at the bottom of the loop: the iteration after the last is not declared."""
    with started(running, tmp_path) as session:
        for _ in range(2):
            session.dump("Add", "a", "input", 0, np.ones(1))
            session.step()
    assert [(e.iteration, e.expected) for e in ends(running)] == [(0, 1), (1, 1)]


def test_session_sends_only_selected_iterations(running, tmp_path):
    selection = TensorSelection(iterations=IterationSelection("1", ((1, 1),)))
    with started(running, tmp_path, selection) as session:
        for i in range(3):
            session.step(i)
            session.dump("Add", "a", "input", 0, np.ones(1))
    assert [r.iteration for r in records(running)] == [1]
    goodbye = running.agent.frames[-1].session_end
    assert (goodbye.iterations_seen, list(goodbye.notes)) == (3, [])


def test_empty_dump_is_explained_in_log_and_session_end(running, tmp_path, caplog):
    selection = TensorSelection(devices=(1,))
    with started(running, tmp_path, selection) as session:
        session.step(0)
        session.dump("Add", "a", "input", 0, np.ones(1))
    reason = "support_device [1] excludes this rank's device 0"
    assert list(running.agent.frames[-1].session_end.notes) == [reason]
    assert reason in caplog.text


def test_iteration_that_raised_is_not_sent_as_complete(running, tmp_path):

    def job() -> None:
        with started(running, tmp_path) as session:
            for i in (0, 1):
                session.step(i)
                session.dump("Add", "a", "input", 0, np.ones(1))
            raise KeyError

    with pytest.raises(KeyError):
        job()
    assert [e.iteration for e in ends(running)] == [0]
    assert len(records(running)) == 2


def test_missing_agent_is_one_warning_and_a_count(tmp_path, address, caplog):
    caplog.set_level(logging.WARNING, "rankdump")
    session = rankdump.Session(plan(tmp_path), agent=address)
    for i in range(3):
        session.step(i)
        session.dump("Add", "a", "input", 0, np.ones(1))
    session.close()
    assert len([r for r in caplog.records if "no agent at" in r.message]) == 1
    assert "3 tensors were not dumped: 3 not_taken_by_agent" in caplog.text


def test_loss_and_return_of_the_agent_are_logged_once_each(tmp_path, address, caplog):
    caplog.set_level(logging.WARNING, "rankdump")
    first = RunningFakeAgent(address)
    session = started(first, tmp_path)
    session.dump("Add", "a", "input", 0, np.ones(1))
    while not first.agent.committed:
        time.sleep(0.01)
    first.stop()
    for slot in range(50):
        session.dump("Add", "a", "input", slot, np.ones(1))
        time.sleep(0.01)
    second = RunningFakeAgent(address)
    session.close()
    second.stop()
    assert caplog.text.count("lost the agent at") == 1
    assert caplog.text.count("is back") == 1
    assert "not dumped" not in caplog.text


def test_tensors_after_a_rejection_are_counted(running, tmp_path, caplog):
    """An agent that restarts with other settings rejects a rank of which it has a part."""
    caplog.set_level(logging.WARNING, "rankdump")
    session = started(running, tmp_path)
    session.dump("Add", "a", "input", 0, np.ones(1))
    wait_until(lambda: running.agent.committed >= 1)
    running.agent.refusal, running.agent.cut_now = "the tree is outside of /data", True
    session.step(1)
    wait_until(lambda: "rejected this rank" in caplog.text)
    for iteration in (2, 3):
        session.step(iteration)
        for slot in range(5):
            session.dump("Add", "a", "input", slot, np.ones(1))
    session.close()
    said = "is outside of /data; its tensors are counted as lost, from iteration 1 on"
    assert said in caplog.text
    assert caplog.messages[-1] == "rankdump: 10 tensors were not dumped: 10 rejected_by_agent"


def test_strict_plan_raises_after_a_rejection(running, tmp_path, caplog):
    session = started(running, tmp_path, strict=True)
    session.dump("Add", "a", "input", 0, np.ones(1))
    wait_until(lambda: running.agent.committed >= 1)
    running.agent.refusal, running.agent.cut_now = "the tree is outside of /data", True
    session.step(1)
    wait_until(lambda: "rejected this rank" in caplog.text)
    session.dump("Add", "a", "input", 0, np.ones(1))
    with pytest.raises(ExhaustedError, match="1 tensors were lost"):
        session.step(2)
    session.close()


def test_metadata_that_no_agent_took_is_counted(tmp_path, address, caplog, monkeypatch):
    monkeypatch.setattr("rankdump._transport.frame_queue.MAX_WAITING_METADATA", 2)
    session = rankdump.Session(plan(tmp_path), agent=address)
    for i in range(3):
        session.step(i)
        session.dump("Add", "a", "input", 0, np.ones(1))
    session.close()
    # Events and end of three iterations, one graph, and the goodbye: 8 in all, 2 of them kept.
    assert "6 batches of events, graphs and ends of iterations were not sent" in caplog.text


def test_full_buffer_without_an_agent_never_waits(tmp_path, address, caplog):
    session = rankdump.Session(plan(tmp_path, buffer_bytes=8, block_timeout_s=600), agent=address)
    for slot in range(50):
        session.dump("Add", "a", "input", slot, np.ones(1))
    session.close()
    assert "49 buffer_full" in caplog.text


def test_stuck_agent_delays_training_once_for_the_allowed_time(running, tmp_path):
    running.agent.acknowledge_up_to = 0
    session = started(running, tmp_path, buffer_bytes=8, block_timeout_s=0.2)
    for slot in range(20):
        session.dump("Add", "a", "input", slot, np.ones(1))
    session.close()
    end = ends(running)[-1]
    assert (end.expected, dict(end.dropped)) == (20, {"buffer_full": 19})


@pytest.mark.parametrize("closed_by", ["with", "finally"])
def test_strict_plan_does_not_replace_the_error_of_the_script(running, tmp_path, closed_by):
    """Law: the script ends with its own error, not with a loss that `close` finds."""

    def script() -> None:
        session = started(running, tmp_path, strict=True)
        try:
            session.dump("Print", "p", "input", 0, "text")
            if closed_by == "with":
                with session:
                    raise KeyError("the script's own")
            raise KeyError("the script's own")
        finally:
            session.close()

    with pytest.raises(KeyError, match="the script's own"):
        script()


def test_strict_plan_raises_at_the_end_of_the_iteration(tmp_path, address):
    session = rankdump.Session(plan(tmp_path, buffer_bytes=8, strict=True), agent=address)
    session.dump("Add", "a", "input", 0, np.ones(1))
    session.dump("Add", "a", "input", 1, np.ones(1))
    with pytest.raises(ExhaustedError, match="1 tensors"):
        session.step()
    with pytest.raises(ExhaustedError):
        session.close()


UNREADABLE = [
    np.array(["text"]),
    np.array([b"bytes"]),
    "text",
    np.array([object()]),
    np.array(["2020"], "M8[D]"),
    np.array([(1, 2)], "i4,i4"),
    [[1], [1, 2]],
]


def test_strings_and_objects_are_counted_and_logged_once(running, tmp_path, caplog):
    """Law: arrays that no file can hold are one logged line, and the rest is dumped."""
    with started(running, tmp_path) as session:
        for slot, array in enumerate(UNREADABLE):
            session.dump("Print", f"p{slot}", "input", slot, array)
        session.dump("Add", "a", "input", 0, np.ones(1))
    (end,) = ends(running)
    assert (end.expected, dict(end.dropped)) == (8, {"unsupported_dtype": 7})
    assert [r.op_name for r in records(running)] == ["a"]
    assert (
        caplog.text.count("tensors are dropped (unsupported_dtype), the first of p0: no file") == 1
    )
    assert len(caplog.records) == 2, "the first one, and the sum at the end"


class UnviewableArray:
    """An array that raises when numpy views it, as a tensor that requires a gradient."""

    def __array__(self, *args: object, **kwargs: object) -> np.ndarray:
        raise RuntimeError("call detach() first")


def test_array_that_numpy_cannot_view_is_counted(running, tmp_path, caplog):
    """Law: any error in viewing an array is a counted loss, logged with its reason."""
    with started(running, tmp_path) as session:
        for slot in range(3):
            session.dump("Add", "a", "input", slot, UnviewableArray())
        session.constant("data-1", UnviewableArray())
        session.dump("Add", "a", "output", 0, np.ones(1))
    (end,) = ends(running)
    assert (end.expected, dict(end.dropped)) == (5, {"unreadable_array": 4})
    assert caplog.text.count("call detach() first") == 1
    assert "internal error" not in caplog.text


def test_tensors_that_cannot_be_dumped_are_counted_and_training_continues(
    running, tmp_path, caplog
):
    with started(running, tmp_path) as session:
        session.dump("Print", "p", "input", 0, np.array(["text"]))
        session.dump("Add", "a", "sideways", 0, np.ones(1))
        session.dump("Add", "a", "input", -1, np.ones(1))
        session.dump("Add", "a", "input", 1 << 32, np.ones(1))
        session.dump("Add", "a", "input", 0, np.ones(1), graph=-1)
        session.step(-1)
        session.dump("Add", "a", "input", 0, np.ones((0, 3)))
        session.dump("Add", "a", "input", 0, np.ones(1))
        session.attach("no model")
    (end,) = ends(running)
    assert (end.expected, dict(end.dropped)) == (2, {"unsupported_dtype": 1})
    assert "sideways" in caplog.text
    assert "builtins.str" in caplog.text


def test_threads_dump_separate_operators(running, tmp_path):
    """Law: every operator is one event with its own arrays, however threads take turns."""

    def work(number: int) -> None:
        for call in range(20):
            for slot in range(3):
                value = np.full(4, number * 1000 + call * 10 + slot)
                session.dump("Add", f"t{number}/Add-op{call}", "output", slot, value)

    with started(running, tmp_path) as session:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for record in records(running):
        number, call = record.op_name[1:].split("/Add-op")
        expected = int(number) * 1000 + int(call) * 10 + record.slot
        assert set(np.frombuffer(record.data, "<i8").tolist()) == {expected}
    assert len({r.timestamp_us for r in records(running)}) == len(records(running)) == 240
    names = event_names(running)
    assert len(names) == len(set(names)) == 80


@pytest.mark.parametrize("name", ["../../x", "a\0b", "x" * 5000, "\ud800", "", "/", "日本"])
def test_operator_names_of_any_text_are_sent(running, tmp_path, name):
    with started(running, tmp_path) as session:
        session.dump(name, name, "input", 0, np.ones(1))
    (record,) = records(running)
    assert record.op_name == name.replace("\ud800", "?").replace("\0", "\ufffd")[:4096]


def test_events_have_the_order_of_operators(running, tmp_path):
    with started(running, tmp_path) as session:
        for name in ("first", "first", "second"):
            session.dump("Add", name, "input", 0, np.ones(1))
    assert event_names(running) == ["first", "second"]


@pytest.mark.parametrize(("on_full", "kept"), [("block", 2), ("drop", 1)])
def test_full_buffer_follows_the_plan_while_the_agent_starts(running, tmp_path, on_full, kept):
    """A blocking plan waits for an agent that the job started as for one that is busy."""
    serving = threading.Event()
    agent = AgentAddress(running.address, is_starting=lambda: not serving.is_set())
    the_plan = plan(tmp_path, buffer_bytes=1, on_full=on_full, shared_memory=False)
    session = rankdump.Session(the_plan, agent=agent)

    def dump(name: str) -> None:
        session.dump("Add", name, "input", 0, np.ones(1024))

    dump("first")
    second = threading.Thread(target=dump, args=["second"])
    second.start()
    if on_full == "drop":
        second.join()
    assert running.agent.opened == []
    serving.set()
    second.join()
    session.close()
    assert [record.op_name for record in records(running)] == ["first", "second"][:kept]
    assert sum(end.dropped["buffer_full"] for end in ends(running)) == 2 - kept


def start_with_agent(running: RunningFakeAgent, folder: Path) -> rankdump.Session:
    """Open a session whose agent begins to serve soon after it."""
    answers = iter([True, True, True])
    agent = AgentAddress(running.address, is_starting=lambda: next(answers, False))
    return rankdump.Session(plan(folder), agent=agent)


@pytest.mark.parametrize("start", [started, start_with_agent])
def test_forked_process_neither_sends_nor_waits(running, tmp_path, start):
    session = start(running, tmp_path)
    session.dump("Add", "parent", "input", 0, np.ones(1))
    child = os.fork()
    if child == 0:
        session.dump("Add", "child", "input", 0, np.ones(1))
        session.step()
        session.close()
        os._exit(len([*Path("/proc/self/task").iterdir()]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1, "more than one thread"
    session.dump("Add", "parent", "input", 1, np.ones(1))
    session.close()
    assert [r.op_name for r in records(running)] == ["parent", "parent"]


def test_internal_error_does_not_reach_the_job(running, tmp_path, caplog, monkeypatch):
    session = started(running, tmp_path)
    monkeypatch.setattr("rankdump._recorder.record_builder.StagingBuffer.keep", lambda *_: 1 / 0)
    session.dump("Add", "a", "input", 0, np.ones(1))
    session.close()
    (end,) = ends(running)
    assert dict(end.dropped) == {"copy_failed": 1}


def test_session_opened_before_the_process_group_is_a_warning(
    running, tmp_path, caplog, monkeypatch
):
    """Spawned ranks whose sessions began too early would all be rank 0."""
    session = rankdump.Session(plan(tmp_path), agent=running.address)
    session.step(0)
    assert caplog.messages == []
    group = types.SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_rank=lambda: 2,
        get_world_size=lambda: 4,
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", group)
    session.step(1)
    session.step(2)
    assert [text for text in caplog.messages if "rank 2 of 4 in torch.distributed" in text] == [
        caplog.messages[0]
    ]
    session.close()
