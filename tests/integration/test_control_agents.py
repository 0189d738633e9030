"""Control of a job with several agents: all ranks begin together, those that cannot are named, and
no rank has an order that the answer does not speak of, whoever is killed between the two rounds.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from support.black_box_rings import make_step_message
from support.command_line import run_in_process
from support.coordinator_host import CoordinatorHost
from support.worker_host import WorkerHost

import rankdump.control
from rankdump._core.job_control import ControlOrder, PlanSchedule
from rankdump._core.plan import BlackBoxSettings, DumpPlan, OutputSettings
from rankdump._recorder.order_responder import OrderResponder
from rankdump._wire.control_messages import answer_to_wire, order_from_wire
from rankdump.wire.v1 import agent_pb2, control_pb2

DEADLINE_S = 120
STEP_NS = 10_000_000_000
"""By the clock of the ranks: an order is chosen for the iteration after the next one."""
CHOSEN = 3


def wait_until(holds: Callable[[], object]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end_s, "it does not happen"
        time.sleep(0.02)


class SimulatedRank:
    """A rank in iteration 1 that answers orders as a real one does; a test makes its steps."""

    def __init__(self, make_rank, address: str, rank: int, root: Path, **fields) -> None:
        self.wire = make_rank(
            address, root=root, rank=rank, session_id=f"session-{rank}", world_size=8, **fields
        )
        self.schedule = PlanSchedule(DumpPlan(OutputSettings(str(root))))
        self._now_ns = 0
        self.responder = OrderResponder(
            self.schedule, lambda change: "", self.schedule.add, clock_ns=lambda: self._now_ns
        )
        self.takes: Callable[[ControlOrder], bool] = lambda order: True
        """Whether an order reaches it."""
        self.answers = True
        """Whether its answers reach the agent."""
        self.orders: list[ControlOrder] = []
        self._begin: int | None = None
        self.run_to(1)

    def connect(self, **more) -> SimulatedRank:
        redirect = self.wire.open(**{"takes_orders": True, **more}).redirect
        assert not redirect
        self.stream = self.wire.push(on_order=self._take)
        return self

    def run_to(self, iteration: int) -> None:
        """Begin iterations up to this one."""
        for each in range(max(0, self.schedule._running + 1), iteration + 1):
            self._now_ns += STEP_NS
            self.schedule.begin_iteration(each)
            self.responder.begin_iteration(each)
            if self._begin is None and self.schedule.plan.selection.iterations.text != "all":
                self._begin = each

    def find_begin(self) -> int | None:
        """Run on; return the first iteration that selected others than all."""
        self.run_to(20)
        return self._begin

    def _take(self, message: control_pb2.ControlOrder) -> None:
        order = order_from_wire(message)
        if not self.takes(order):
            return
        self.orders.append(order)
        answer = self.responder.answer(order)
        if self.answers:
            hello = agent_pb2.Hello(session_id=self.wire.session_id, token=self.wire.token)
            said = agent_pb2.AnswerOrderRequest(hello=hello, answer=answer_to_wire(answer))
            # As a real rank: an answer that is lost is asked for again.
            with suppress(grpc.RpcError):
                self.wire.stub.AnswerOrder(said, timeout=DEADLINE_S)

    @property
    def has_order(self) -> bool:
        """Whether an order with an iteration has reached it."""
        return any(each.iteration is not None for each in self.orders)


def is_question(order: ControlOrder) -> bool:
    return order.iteration is None


@pytest.fixture
def coordinator(socket_folder: Path) -> Iterator[CoordinatorHost]:
    host = CoordinatorHost(socket_folder)
    yield host
    host.close()


@pytest.fixture
def make_ranks(make_agent, make_rank, coordinator, short_dir):
    """Makes two ranks for each of some agents."""
    made: list[SimulatedRank] = []

    def make(agents: str, **fields) -> list[SimulatedRank]:
        for number, name in enumerate(agents):
            agent = make_agent(folder=short_dir / name, coordinator=coordinator.address)
            made.extend(
                SimulatedRank(make_rank, agent.address, rank, short_dir / "dump", **fields)
                for rank in range(2 * number, 2 * number + 2)
            )
        return made

    yield make
    for each in made:
        each.stream.finish()


class ControlCommand:
    """`rankdump control`, in a thread of its own."""

    def __init__(self, coordinator: CoordinatorHost, *words: str) -> None:
        self._pool = ThreadPoolExecutor(1)
        command = ("control", "job", *words, "--coordinator", coordinator.address)
        self._done: Future[subprocess.CompletedProcess[str]] = self._pool.submit(
            run_in_process, *command, columns=1000
        )

    def wait(self) -> subprocess.CompletedProcess[str]:
        with self._pool:
            return self._done.result(DEADLINE_S)


def wait_known(coordinator: CoordinatorHost, ranks: int) -> None:
    """Wait until the coordinator knows the sessions of so many ranks."""
    wait_until(lambda: len(coordinator.status().sessions) == ranks)


def test_ranks_of_all_agents_begin_in_one_iteration(make_ranks, coordinator):
    ranks = [each.connect() for each in make_ranks("abc")]
    ranks[4].run_to(7)
    wait_known(coordinator, 6)
    done = ControlCommand(coordinator, "iterations", "0|40-50").wait()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "job job: iterations 0|40-50 from iteration 9 on, ranks 0-5\n"
    assert [each.find_begin() for each in ranks] == [9] * 6


def test_ranks_that_cannot_begin_there_are_named(make_ranks, coordinator, frames):
    ranks = make_ranks("abc")
    for each in ranks:
        each.connect(takes_orders=each is not ranks[1])
    ranks[2].takes = lambda order: False

    def run_past(order: ControlOrder) -> bool:
        ranks[3].run_to(1 if is_question(order) else 5)
        return True

    ranks[3].takes = run_past
    ranks[4].stream.send(frames.goodbye(1)).wait_acknowledged(1)
    wait_until(lambda: [e.state for e in coordinator.status().sessions].count("closed") == 1)
    wait_known(coordinator, 6)
    coordinator.coordinator._control._round_timeout_s = 5.0
    done = ControlCommand(coordinator, "stop").wait()
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines() == [
        "job job: stop from iteration 3 on, ranks 0,3,5",
        "rank 1: not changed: its process uses an earlier release of rankdump",
        "rank 2: not changed: no answer within 5 s: its agent is away, or of an earlier release, "
        "or its process is stopped or gone",
        "rank 3: from iteration 6 on: it was past iteration 3 already",
        "rank 4: not changed: it has ended its session",
    ]
    assert [each.find_begin() for each in ranks] == [3, None, None, 6, None, 3]


def test_freeze_has_the_ranks_of_which_agents_hold_steps(make_ranks, coordinator):
    """Whatever their release, and whether they answer or not."""
    ranks = make_ranks("ab", black_box=BlackBoxSettings(steps=8, post_steps=1, pause_s=60))
    for each in ranks:
        each.connect(takes_orders=each is not ranks[1])
        each.takes = lambda order: False
    for each in ranks[:3]:
        each.stream.step(make_step_message(4))
    wait_known(coordinator, 4)
    for each, steps in ((ranks[0], 2), (ranks[2], 1)):
        wait_until(lambda each=each, steps=steps: each.wire.status().black_box.steps == steps)
    done = ControlCommand(coordinator, "freeze", "it looks odd").wait()
    assert (done.returncode, done.stdout.splitlines()) == (
        1,
        [
            "job job: frozen at iteration 4 (rankdump faults), ranks 0-2",
            "rank 3: not frozen: it had sent no step",
        ],
    )


def kill(coordinator: CoordinatorHost) -> None:
    # Its server would wait for the control, as a process that is killed does not.
    coordinator.coordinator._control.stop()
    coordinator.close()


def begin_order(ranks: list[SimulatedRank], coordinator: CoordinatorHost) -> ControlCommand:
    """Have an order reach the first agent alone, in its second round."""
    for each in ranks[2:]:
        each.takes = is_question
    wait_known(coordinator, 4)
    command = ControlCommand(coordinator, "iterations", "40-50")
    wait_until(lambda: all(each.has_order for each in ranks[:2]))
    return command


@pytest.mark.parametrize("is_late", [False, True])
def test_coordinator_that_comes_back_finishes_the_order(make_ranks, coordinator, is_late):
    """The others join the ranks that have it, unless they have gone on meanwhile."""
    ranks = [each.connect() for each in make_ranks("ab")]
    command = begin_order(ranks, coordinator)
    kill(coordinator)
    for each in ranks[:2]:
        each.run_to(CHOSEN + 1)
    for each in ranks[2:]:
        each.run_to(6 if is_late else 1)
        each.takes = lambda order: True
    coordinator.open()
    done = command.wait()
    later = 8 if is_late else CHOSEN
    lines = [f"job job: iterations 40-50 from iteration {later} on, ranks 0-3"]
    if is_late:
        lines.append(
            f"ranks 0-1: from iteration {CHOSEN} on: it had the order before the coordinator "
            "ended, and others were past that iteration"
        )
    assert (done.stdout.splitlines(), done.stderr) == (lines, "")
    assert done.returncode == is_late
    assert [each.find_begin() for each in ranks] == [CHOSEN, CHOSEN, later, later]


def test_coordinator_that_comes_back_asks_ranks_again(make_ranks, coordinator):
    """Those that have answered before have gone on meanwhile."""
    ranks = [each.connect() for each in make_ranks("ab")]
    for each in ranks[2:]:
        each.takes = lambda order: False
    wait_known(coordinator, 4)
    command = ControlCommand(coordinator, "iterations", "40-50")
    wait_until(lambda: all(each.orders for each in ranks[:2]))
    kill(coordinator)
    for each in ranks[:2]:
        each.run_to(6)
    for each in ranks[2:]:
        each.takes = lambda order: True
    coordinator.open()
    done = command.wait()
    assert done.stdout == "job job: iterations 40-50 from iteration 8 on, ranks 0-3\n", done.stderr
    assert [each.find_begin() for each in ranks] == [8] * 4


@pytest.mark.parametrize("rounds", [1, 2])
def test_coordinator_that_does_not_come_back_is_one_line(
    make_ranks, coordinator, monkeypatch, rounds
):
    monkeypatch.setattr(rankdump.control, "RETURN_TIMEOUT_S", 0.5)
    ranks = [each.connect() for each in make_ranks("ab")]
    if rounds == 1:
        for each in ranks[2:]:
            each.takes = lambda order: False
        wait_known(coordinator, 4)
        command = ControlCommand(coordinator, "iterations", "40-50")
        wait_until(lambda: all(each.orders for each in ranks[:2]))
    else:
        command = begin_order(ranks, coordinator)
    kill(coordinator)
    done = command.wait()
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)
    assert f"the coordinator at {coordinator.address} ended while it carried out" in done.stderr
    assert "ranks that had the order by then begin with it in one iteration" in done.stderr
    begun = CHOSEN if rounds == 2 else None
    assert [each.find_begin() for each in ranks] == [begun, begun, None, None]
    coordinator.open()


@pytest.mark.slow
def test_ranks_of_a_killed_agent_are_said_to_be_unconfirmed(
    make_agent, make_rank, coordinator, short_dir
):
    """One of them has the order, and its answer is lost with the agent; the other never gets it."""
    (short_dir / "k").mkdir()
    killed = WorkerHost(
        *(short_dir / "k", 1), KEEP_FREE_RATIO="0", TABLE="false", COORDINATOR=coordinator.address
    )
    other = make_agent(folder=short_dir / "b", coordinator=coordinator.address)
    ranks = [
        SimulatedRank(make_rank, address, rank, short_dir / "dump").connect()
        for rank, address in enumerate([killed.address] * 2 + [other.address])
    ]
    try:
        coordinator.coordinator._control._round_timeout_s = 5.0
        ranks[0].takes = is_question
        wait_known(coordinator, 3)

        def lose_answer(order: ControlOrder) -> bool:
            ranks[1].answers = is_question(order)
            return True

        ranks[1].takes = lose_answer
        command = ControlCommand(coordinator, "iterations", "40-50")
        wait_until(lambda: ranks[1].has_order)
        killed.process.kill()
        killed.process.wait()
        done = command.wait()
        assert (done.returncode, done.stdout.splitlines()) == (
            1,
            [
                "job job: iterations 40-50 from iteration 3 on, rank 2",
                "ranks 0-1: not confirmed: no answer within 5 s: its agent is away, or of an "
                "earlier release, or its process is stopped or gone; it begins in iteration 3, or "
                "not at all",
            ],
        )
        coordinator.coordinator._control._round_timeout_s = DEADLINE_S
        killed.start(1)
        for each in ranks[:2]:
            each.stream.wait_over()
            each.takes, each.answers = lambda order: True, True
            each.connect()
        done = ControlCommand(coordinator, "iterations", "60-70", "--json").wait()
        result = json.loads(done.stdout)
        assert [each["iteration"] for each in result["ranks"]] == [result["iteration"]] * 3
        for each in ranks:
            each.run_to(result["iteration"])
            assert each.schedule.plan.selection.iterations.text == "60-70"
    finally:
        for each in ranks:
            each.stream.finish()
        killed.close()
