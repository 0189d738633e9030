"""What comes together is handed on together; every byte of the budget comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rankdump._core.plan import DumpPlan, OutputSettings, plan_to_json
from rankdump.errors import ProtocolError, ResendError, UnavailableError
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.ingress import session_intake as room
from rankdumpd.agent.ingress.session_intake import FailureCounter, SessionIntake
from rankdumpd.agent.limits.admission import ResourcePolicy, ResourceUsage
from rankdumpd.agent.limits.usage import QueueBudget
from rankdumpd.agent.records import MetadataFrame, ReceivedRecord, RecordOutcome
from rankdumpd.agent.session.rank_session import RankSession

LARGE = room.SMALL_RECORD_BYTES + 1
CEILING = 100_000


class Taker:
    """Stands where workers and the committer would: keeps what it is given."""

    def __init__(self) -> None:
        self.batches: list[Sequence[Any]] = []
        self.cost = 0

    def submit(self, items: Sequence[Any], cost: int = 0) -> None:
        self.batches.append(items)
        self.cost += cost

    def numbers(self) -> list[list[int]]:
        return [[item.frame_id.sequence for item in batch] for batch in self.batches]


class House:
    """An intake with the rooms around it."""

    def __init__(self, make_request, *, limit_bytes: int = 1 << 30) -> None:
        plan = DumpPlan(output=OutputSettings(root="/dump"))
        self.session = RankSession(make_request(plan_json=plan_to_json(plan)), plan)
        self.budget = QueueBudget(limit_bytes)
        self.workers, self.committer = Taker(), Taker()
        self.asked = 0
        self.tries = FailureCounter()
        rooms: Any = {"workers": self.workers, "committer": self.committer}
        self._rooms = rooms
        self.renew()

    def renew(self) -> None:
        """Go on with another stream."""
        self.intake = SessionIntake(
            self.session,
            budget=self.budget,
            look_up_usage=self._room,
            failures=self.tries,
            **self._rooms,
        )

    def _room(self) -> ResourceUsage:
        self.asked += 1
        return ResourceUsage(ResourcePolicy(CEILING))

    def settle(self) -> None:
        """Give back what the committer would once everything is done."""
        parcels = [item for batch in self.workers.batches for item in batch]
        sizes = [room.compute_cost_bytes(parcel.head.byte_count) for parcel in parcels]
        others = sum(map(len, self.committer.batches))
        self.budget.release(sum(sizes) + self.committer.cost, items=len(sizes) + others)


@pytest.fixture
def house(make_request) -> House:
    return House(make_request)


def record(sequence: int, size: int = 4, *, first: int | None = None) -> agent_pb2.Frame:
    kind = agent_pb2.TensorKind(
        op_name="a", side=agent_pb2.SIDE_OUTPUT, dtype="int8", shape=[size], byte_count=size
    )
    data = bytes(size if first is None else first)
    body = agent_pb2.Record(kind=kind.SerializeToString(), data=data)
    return agent_pb2.Frame(sequence=sequence, record=body)


def chunk(sequence: int, offset: int, size: int) -> agent_pb2.Frame:
    body = agent_pb2.Chunk(offset=offset, data=bytes(size))
    return agent_pb2.Frame(sequence=sequence, chunk=body)


def end(sequence: int) -> agent_pb2.Frame:
    return agent_pb2.Frame(sequence=sequence, iteration_end=agent_pb2.IterationEnd())


def take(house: House, *frames: agent_pb2.Frame) -> None:
    for frame in frames:
        house.intake.handle_frame(frame)


def test_small_records_wait_for_those_that_come_with_them(house):
    """Nothing is handed on before its time, and the disk is asked for once."""
    take(house, *[record(n) for n in range(1, 5)], end(5))
    assert (house.workers.batches, house.budget.items, house.asked) == ([], 0, 1)
    house.intake.flush()
    house.intake.flush()
    assert house.workers.numbers() == [[1, 2, 3, 4]]
    assert house.committer.numbers() == [[5]]
    assert all(isinstance(each, ReceivedRecord) for each in house.workers.batches[0])
    assert isinstance(house.committer.batches[0][0], MetadataFrame)
    assert house.budget.items == 5
    house.settle()
    assert (house.budget.items, house.budget.used_bytes) == (0, 0)


def test_bounds_of_a_batch(house, monkeypatch):
    """So many and so large together: then it is handed on, whatever else comes."""
    monkeypatch.setattr(room, "MAX_GATHERED_FRAMES", 3)
    take(house, *[record(n) for n in range(1, 8)])
    assert house.workers.numbers() == [[1, 2, 3], [4, 5, 6]]
    monkeypatch.setattr(room, "MAX_GATHERED_BYTES", 1)
    take(house, record(8))
    assert house.workers.numbers()[2:] == [[7, 8]]


@pytest.mark.parametrize("first", [LARGE, 3, 0])
def test_a_large_record_goes_alone_after_those_before_it(house, first):
    """However it is cut; its room is taken before its memory is."""
    take(house, record(1), record(2, LARGE, first=first))
    assert house.workers.numbers()[0] == [1]
    assert house.budget.items == 2
    if first < LARGE:
        take(house, chunk(2, first, LARGE - first))
    take(house, record(3))
    assert house.workers.numbers() == [[1], [2]]
    house.intake.flush()
    house.settle()
    assert (house.budget.items, house.budget.used_bytes) == (0, 0)


def test_a_large_record_that_is_cut_off_gives_its_room_back(house):
    """It leaves as a counted drop that occupies next to nothing."""
    take(house, record(1, LARGE, first=3))
    assert house.budget.used_bytes == room.compute_cost_bytes(3)
    take(house, chunk(1, 3, 100))
    assert house.budget.used_bytes == room.compute_cost_bytes(103)
    house.intake.cut_off("torn")
    ((outcome,),) = house.committer.batches
    assert isinstance(outcome, RecordOutcome)
    assert (outcome.reason, house.workers.batches) == ("torn", [])
    assert house.budget.used_bytes == room.compute_cost_bytes(0)
    house.settle()
    assert (house.budget.items, house.budget.used_bytes) == (0, 0)


def test_refused_records_need_no_worker(house):
    """They are counted like any other frame, beside those that are kept."""
    take(house, record(1), record(2, CEILING + 1), record(3))
    house.intake.flush()
    assert house.workers.numbers() == [[1], [3]]
    ((outcome,),) = house.committer.batches
    assert outcome.reason == "record_too_large"
    house.settle()
    assert (house.budget.items, house.budget.used_bytes) == (0, 0)


def test_what_another_stream_has_taken_meanwhile(house):
    """Each frame has one owner; what it occupied here is given back at once."""
    take(house, *[record(n) for n in range(1, 6)], end(6))
    assert house.session.claim_frames({2, 4, 6, 99}) == {2, 4, 6, 99}
    house.intake.flush()
    assert house.workers.numbers() == [[1, 3, 5]]
    assert house.committer.batches == []
    house.settle()
    assert (house.budget.items, house.budget.used_bytes) == (0, 0)
    take(house, record(7))
    house.session.claim_frames({7})
    house.intake.flush()
    assert (house.workers.numbers(), house.budget.items) == ([[1, 3, 5]], 0)


def test_frames_before_a_fault_are_kept(house):
    """The stream ends with the frame that breaks a rule, not with those before it."""
    with pytest.raises(ResendError):
        take(house, record(1), record(2), record(9))
    house.intake.flush()
    assert house.workers.numbers() == [[1, 2]]


def test_a_frame_that_fails_three_times_is_given_up(house):
    """Streams come and go meanwhile: it is the session that counts."""
    bad = agent_pb2.Frame(sequence=2, record=agent_pb2.Record(kind=b"\xff"))
    for _ in range(room.MAX_UNREADABLE_TRIES - 1):
        with pytest.raises(ResendError, match="frame 2 cannot be read"):
            take(house, record(1), bad)
        house.intake.flush()
        house.renew()
    take(house, record(1), bad, record(3))
    house.intake.flush()
    ((judged,),) = house.committer.batches
    assert (judged.frame_id.sequence, dict(judged.refused)) == (2, {"unreadable": range(1)})
    assert house.workers.numbers() == [[1], [3]]
    assert any("could not be read" in each for each in house.session.findings())


def test_a_number_that_never_comes_is_refused_in_the_end(house):
    """A rank that sent all it has ten times has no more."""
    for _ in range(room.MAX_GAPS - 1):
        with pytest.raises(ResendError):
            take(house, record(1), record(3))
        house.renew()
    with pytest.raises(ProtocolError, match="10 times in a row"):
        take(house, record(1), record(3))


def test_what_is_only_declared_keeps_nobody_waiting(make_request):
    """A record over the whole limit of which a byte came leaves the room to others."""
    house = House(make_request, limit_bytes=LARGE * 2)
    take(house, record(1, 5 * LARGE, first=1))
    house.budget.acquire(LARGE)
    house.budget.release(LARGE)
    take(house, *[chunk(1, at, LARGE) for at in range(1, 3 * LARGE, LARGE)])
    assert house.budget.used_bytes == room.compute_cost_bytes(3 * LARGE + 1)
    house.intake.release_budget()
    assert (house.budget.items, house.budget.used_bytes) == (0, 0)


def test_an_agent_that_stops_takes_no_more(house):
    """What was gathered is nobody's then: it is sent again to the next agent."""
    take(house, record(1))
    house.budget.close()
    with pytest.raises(UnavailableError):
        house.intake.flush()
    assert not house.session.is_known(1)
    house.intake.release_budget()
    assert (house.budget.items, house.budget.used_bytes) == (0, 0)
