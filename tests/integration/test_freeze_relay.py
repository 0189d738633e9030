"""Freezes over several agents and their coordinator: one cause and one tree."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.black_box_rings import make_fault_message, make_step_message, read_tree_record
from support.coordinator_host import CoordinatorHost
from support.worker_host import WorkerHost

from rankdump._analysis.black_box.fault_report import make_fault_report
from rankdump._analysis.black_box.freeze_files import read_freeze_records
from rankdump._cli.command_group import run_command_line
from rankdump._core.freeze_record import FreezeRecord
from rankdump._core.plan import BlackBoxSettings
from rankdumpd.agent.blackbox import freeze_decision

SETTINGS = BlackBoxSettings(steps=16, post_steps=1)
WORLD = 4
DEADLINE_S = 120


def wait_until(holds: Callable[[], object]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end_s, "it does not happen"
        time.sleep(0.02)


class AgentHost:
    """One agent with some of the ranks of the job, on a host of its own."""

    def __init__(
        self, make_rank, address: str, ranks: range, root: Path, *, world: int = WORLD
    ) -> None:
        self._make_rank, self._root, self._world = make_rank, root, world
        self.ranks = [self._begin(address, rank) for rank in ranks]

    def _begin(self, address: str, rank: int):
        fields = {"session_id": f"session-{rank}", "rank": rank, "world_size": self._world}
        opened = self._make_rank(address, root=self._root, black_box=SETTINGS, **fields)
        redirect = opened.open().redirect
        if redirect:
            return self._begin(f"{address.rpartition('/')[0]}/{redirect}", rank)
        return opened, opened.push()

    def step(self, iteration: int, *, loss: dict[int, float] | None = None, **fields) -> None:
        """Have every rank end a step; `loss` has that of some ranks."""
        for opened, stream in self.ranks:
            message = make_step_message(iteration, **fields)
            if loss and opened.rank in loss:
                message.cause.numbers["loss"] = loss[opened.rank]
            stream.step(message)

    def fault(self, iteration: int, kind: str = "non_finite") -> None:
        self.ranks[0][1].fault(make_fault_message(iteration, kind))

    def wait_steps(self, count: int) -> None:
        wait_until(lambda: self._box().steps == count)

    def wait_frozen(self, count: int = 1) -> list[int]:
        """Wait until the ranks are told of a freeze; return the iterations of the notices."""
        for _, stream in self.ranks:
            stream.wait_frozen(count)
        return [notice.iteration for notice in self.ranks[0][1].notices]

    def wait_tree(self) -> Path:
        wait_until(lambda: any(each.root for each in self._box().freezes))
        return Path(self._box().freezes[-1].root)

    def finish(self) -> None:
        for _, stream in self.ranks:
            stream.finish()

    def _box(self):
        return self.ranks[0][0].status().black_box


@pytest.fixture
def coordinator(socket_folder: Path) -> Iterator[CoordinatorHost]:
    host = CoordinatorHost(socket_folder)
    yield host
    host.close()


@pytest.fixture
def make_pair(make_agent, make_rank, coordinator, short_dir) -> Iterator[Callable[..., list]]:
    """Make two agents with two ranks each, which write into one folder or each into its own."""

    def make(*, shared: bool = True) -> list[AgentHost]:
        hosts: list[AgentHost] = []
        for number, name in enumerate("ab"):
            agent = make_agent(folder=short_dir / name, coordinator=coordinator.address)
            root = short_dir / "dump" if shared else short_dir / name / "dump"
            ranks = range(2 * number, 2 * number + 2)
            hosts.append(AgentHost(make_rank, agent.address, ranks, root))
        return hosts

    with ExitStack() as stack:

        def made(**fields) -> list[AgentHost]:
            hosts = make(**fields)
            for host in hosts:
                stack.callback(host.finish)
            return hosts

        yield made


def wait_known(coordinator: CoordinatorHost, ranks: int = WORLD) -> None:
    """Wait until the coordinator knows the sessions of so many ranks."""
    wait_until(lambda: len(coordinator.status().sessions) == ranks)


def read_records(tree: Path, count: int) -> list[FreezeRecord]:
    wait_until(lambda: len(list(tree.glob(".rankdump/black_box.*.json"))) == count)
    return list(read_freeze_records(tree))


def test_fault_on_one_host_freezes_the_ranks_of_all(make_pair, coordinator, short_dir, capsys):
    one, two = make_pair()
    for iteration in range(3):
        one.step(iteration, nans=2 * (iteration == 2))
        two.step(iteration)
    for host in (one, two):
        host.wait_steps(6)
    wait_known(coordinator)
    one.fault(2)
    assert two.wait_frozen() == [2]
    for host in (one, two):
        host.step(3)
    tree = short_dir / "dump/blackbox/2"
    assert {one.wait_tree(), two.wait_tree()} == {tree}
    records = read_records(tree, 2)
    assert records[0].causes == records[1].causes
    assert [cause.rank for cause in records[0].causes] == [0]
    report = make_fault_report(str(tree), records)
    assert report.first_bad_value is not None
    assert report.first_bad_value.rank == 0
    assert [end.rank for end in report.ends] == [0, 1, 2, 3]
    assert (report.later_causes, report.absent) == ((), ())
    for command in ("faults", "fsck"):
        assert run_command_line([command, str(tree)]) == 0, capsys.readouterr()
    # The answers repeat the freeze: it does not begin again.
    one.step(4)
    two.step(4)
    time_of_answers(coordinator)
    assert two.wait_frozen() == one.wait_frozen() == [2]


def time_of_answers(coordinator: CoordinatorHost) -> None:
    """Wait until every agent has had two more answers of the coordinator."""

    def reports() -> float:
        samples = coordinator.coordinator._counters.samples()
        return sum(each.value for each in samples if each.name.endswith("_reports_total"))

    before = reports()
    wait_until(lambda: reports() >= before + 6)


def test_faults_at_the_same_moment_become_one_freeze(make_pair, coordinator, short_dir):
    one, two = make_pair(shared=False)
    for iteration in range(6):
        one.step(iteration)
        two.step(iteration)
    for host in (one, two):
        host.wait_steps(12)
    wait_known(coordinator)
    one.fault(3)
    two.fault(5, "exception")
    roots = [host.wait_tree() for host in (one, two)]
    assert {root.name for root in roots} <= {"3", "5"}
    assert len({root.name for root in roots}) == 1
    first, second = (read_tree_record(root) for root in roots)
    assert first.causes[0] == second.causes[0]
    joined = {cause.identity for record in (first, second) for cause in record.causes}
    assert len(joined) == 2
    assert {first.iteration, second.iteration} == {first.causes[0].iteration}
    assert not list(short_dir.glob("*/state/blackbox/*.freeze"))
    # Each tree has the ranks of one host, and says that the other agent has frozen the rest.
    report = make_fault_report(str(roots[0]), [first])
    [absent] = report.absent
    assert (absent.first, absent.last) == (2, 3)
    assert "another agent has frozen the job" in absent.reason


def test_freeze_on_request_reaches_all_hosts(make_pair, coordinator, capsys):
    one, two = make_pair()
    for host in (one, two):
        host.step(7)
        host.wait_steps(2)
    wait_known(coordinator)
    answer = one.ranks[0][0].freeze("somebody looks", job_id="job")
    assert [Path(tree).name for tree in answer.trees] == ["7"]
    assert list(answer.notes) == ["frozen by 2 of the 2 agents of the job"]
    records = read_records(two.wait_tree(), 2)
    assert {record.causes[0].text for record in records} == {"somebody looks"}


def test_agent_that_is_not_reached_is_named(make_pair, coordinator):
    one, two = make_pair()
    one.step(1)
    one.wait_steps(2)
    wait_known(coordinator)
    # It has no step of its ranks, so it freezes nothing.
    answer = one.ranks[0][0].freeze("somebody looks", job_id="job")
    assert answer.notes[0] == "frozen by 1 of the 2 agents of the job"
    assert answer.notes[1].startswith("ranks 2-3 are missing: its ranks have sent no step yet (")
    report = make_fault_report("", read_records(Path(answer.trees[0]), 1))
    [absent] = report.absent
    assert (absent.first, absent.last) == (2, 3)
    assert "have sent no step yet (host " in absent.reason
    assert not two.ranks[0][1].notices


def test_agent_that_was_restarted_freezes_nothing_twice(
    make_agent, make_rank, coordinator, short_dir
):
    """The coordinator still hands the freeze on, and the ranks make steps again."""
    agent = make_agent(folder=short_dir / "a", coordinator=coordinator.address)
    host = AgentHost(make_rank, agent.address, range(2), short_dir / "dump")
    host.step(3)
    host.wait_steps(2)
    wait_known(coordinator, 2)
    host.fault(3)
    tree = host.wait_tree()
    for _, stream in host.ranks:
        stream.cut()
    agent.restart()
    again = AgentHost(make_rank, agent.address, range(2), short_dir / "dump")
    again.step(4)
    again.wait_steps(2)
    box = agent.agent._black_box
    wait_until(lambda: box.recent.find_reach(("job", 0, 3)).agents)
    assert box.wait_idle(DEADLINE_S) == 0
    assert not again.ranks[0][1].notices
    assert [path.name for path in tree.parent.iterdir()] == ["3"]
    again.finish()


def test_coordinator_that_was_killed_hands_the_freeze_on(make_pair, coordinator, short_dir):
    one, two = make_pair()
    for host in (one, two):
        host.step(4)
        host.wait_steps(2)
    wait_known(coordinator)
    coordinator.close()
    one.fault(4)
    one.wait_frozen()
    coordinator.open()
    assert two.wait_frozen() == [4]
    assert one.wait_tree() == two.wait_tree() == short_dir / "dump/blackbox/4"


@pytest.mark.slow
def test_killed_agent_reports_its_freeze_after_the_restart(
    make_agent, make_rank, coordinator, short_dir
):
    """The agent is killed before its tree, and before the coordinator knows of the freeze."""
    (short_dir / "k").mkdir()
    killed = WorkerHost(
        *(short_dir / "k", 1), KEEP_FREE_RATIO="0", TABLE="false", COORDINATOR=coordinator.address
    )
    other = make_agent(folder=short_dir / "b", coordinator=coordinator.address)
    try:
        one = AgentHost(make_rank, killed.address, range(2), short_dir / "dump")
        two = AgentHost(make_rank, other.address, range(2, 4), short_dir / "dump")
        for host in (one, two):
            host.step(4)
            host.wait_steps(2)
        wait_known(coordinator)
        coordinator.close()
        one.fault(4)
        one.wait_frozen()
        killed.process.kill()
        killed.process.wait()
        for _, stream in one.ranks:
            stream.wait_over()
        coordinator.open()
        killed.start(1)
        assert two.wait_frozen() == [4]
        records = read_records(two.wait_tree(), 2)
        assert sorted(each.rank for record in records for each in record.ranks) == [0, 1, 2, 3]
        assert records[0].causes == records[1].causes
        two.finish()
    finally:
        killed.close()


@pytest.mark.slow
def test_freeze_reaches_every_worker_of_an_agent(make_rank, coordinator, short_dir, make_agent):
    (short_dir / "w").mkdir()
    workers = WorkerHost(
        *(short_dir / "w", 2), KEEP_FREE_RATIO="0", TABLE="false", COORDINATOR=coordinator.address
    )
    other = make_agent(folder=short_dir / "b", coordinator=coordinator.address)
    try:
        one = AgentHost(make_rank, workers.address, range(2), short_dir / "dump")
        two = AgentHost(make_rank, other.address, range(2, 4), short_dir / "dump")
        for host in (one, two):
            host.step(4)
        two.wait_steps(2)
        wait_until(lambda: workers.view().black_box.steps == 2)
        wait_known(coordinator)
        two.fault(4)
        one.wait_frozen()
        records = read_records(short_dir / "dump/blackbox/4", 3)
        assert sorted(each.rank for record in records for each in record.ranks) == [0, 1, 2, 3]
        assert len({record.causes for record in records}) == 1
        assert make_fault_report("", records).absent == ()
        for host in (one, two):
            host.finish()
    finally:
        workers.close()


def test_outlier_among_the_ranks_freezes_the_job(make_agent, make_rank, coordinator, short_dir):
    """Six ranks on two hosts: the loss of one is far above the others, in the same iteration."""
    hosts = [
        AgentHost(make_rank, agent.address, range(3 * at, 3 * at + 3), short_dir / "dump", world=6)
        for at, agent in enumerate(
            make_agent(folder=short_dir / name, coordinator=coordinator.address) for name in "ab"
        )
    ]
    wait_known(coordinator, 6)
    for host in hosts:
        host.step(8, loss={4: 70.0})
    for host in hosts:
        assert host.wait_frozen() == [8]
        host.step(9)
    [first, second] = read_records(hosts[0].wait_tree(), 2)
    [cause] = first.causes
    assert (cause.kind.value, cause.rank, second.causes) == ("outlier", 4, first.causes)
    assert cause.text.startswith("loss of rank 4 is 70, far above that of ")
    assert cause.text.endswith(" other ranks, whose median is 0.5")
    for host in hosts:
        host.finish()


def test_outlier_during_a_freeze_is_a_later_cause_on_all_hosts(
    make_agent, make_rank, coordinator, short_dir, monkeypatch
):
    # Until the test has the other ranks end the step that the freeze waits for.
    for name in ("MIN_WAIT_S", "MAX_WAIT_S"):
        monkeypatch.setattr(freeze_decision, name, DEADLINE_S)
    agents = [make_agent(folder=short_dir / n, coordinator=coordinator.address) for n in "ab"]
    hosts = [
        AgentHost(make_rank, agent.address, ranks, short_dir / "dump", world=7)
        for agent, ranks in zip(agents, (range(4), range(4, 7)), strict=True)
    ]
    for host in hosts:
        host.step(7)
        host.wait_steps(len(host.ranks))
    wait_known(coordinator, 7)
    hosts[0].fault(7)
    for host in hosts:
        host.wait_frozen()
        for opened, stream in host.ranks[:-1]:
            message = make_step_message(8)
            message.cause.numbers["loss"] = 70.0 if opened.rank == 1 else 0.5
            stream.step(message)
    for agent in agents:
        box = agent.agent._black_box
        wait_until(lambda box=box: len(box._open["job"].record.causes) == 2)
    for host in hosts:
        host.ranks[-1][1].step(make_step_message(8))
    first, second = read_records(hosts[0].wait_tree(), 2)
    kinds = [(cause.kind.value, cause.rank) for cause in first.causes]
    assert kinds == [("non_finite", 0), ("outlier", 1)]
    assert first.causes == second.causes
    for host in hosts:
        host.finish()
