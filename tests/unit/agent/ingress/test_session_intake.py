"""Tests of SessionIntake: batches, failing frames, and release of the whole budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rankdump._core.job_control import NO_ITERATIONS, PlanChange
from rankdump._core.plan import DumpPlan, OutputSettings, plan_to_json
from rankdump.errors import ProtocolError, ResendError, UnavailableError
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.ingress import session_intake
from rankdumpd.agent.ingress.session_intake import FailureCounter, SessionIntake
from rankdumpd.agent.limits.admission import ResourcePolicy, ResourceUsage
from rankdumpd.agent.limits.usage import QueueBudget
from rankdumpd.agent.records import MetadataFrame, ReceivedRecord, RecordOutcome
from rankdumpd.agent.session.rank_session import RankSession

LARGE = session_intake.SMALL_RECORD_BYTES + 1
CEILING = 100_000


class SubmittedBatches:
    """Takes the place of workers and committer, and collects submitted batches."""

    def __init__(self) -> None:
        self.batches: list[Sequence[Any]] = []
        self.cost = 0

    def submit(self, items: Sequence[Any], beside: Any = 0) -> None:
        """`beside` is the storage of the session for workers, the cost for the committer."""
        self.batches.append(items)
        self.cost += beside if isinstance(beside, int) else 0

    def numbers(self) -> list[list[int]]:
        return [[item.frame_id.sequence for item in batch] for batch in self.batches]


class IntakeRig:
    """An intake with a session, a budget, and collectors of its output."""

    def __init__(self, make_request, *, limit_bytes: int = 1 << 30) -> None:
        plan = DumpPlan(output=OutputSettings(root="/dump"))
        self.session = RankSession(make_request(plan_json=plan_to_json(plan)), plan)
        self.budget = QueueBudget(limit_bytes)
        self.workers, self.committer = SubmittedBatches(), SubmittedBatches()
        self.asked = 0
        self.tries = FailureCounter()
        parts: Any = {"workers": self.workers, "committer": self.committer}
        self._parts = parts
        self.renew()

    def renew(self) -> None:
        """Go on with another stream."""
        self.intake = SessionIntake(
            self.session,
            budget=self.budget,
            look_up_usage=self._look_up_usage,
            failures=self.tries,
            **self._parts,
        )

    def _look_up_usage(self) -> ResourceUsage:
        self.asked += 1
        return ResourceUsage(ResourcePolicy(CEILING))

    def settle(self) -> None:
        """Release the budget, as the committer would after committing everything."""
        records = [item for batch in self.workers.batches for item in batch]
        sizes = [session_intake.compute_cost_bytes(record.head.byte_count) for record in records]
        others = sum(map(len, self.committer.batches))
        self.budget.release(sum(sizes) + self.committer.cost, items=len(sizes) + others)


@pytest.fixture
def rig(make_request) -> IntakeRig:
    return IntakeRig(make_request)


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


def take(rig: IntakeRig, *frames: agent_pb2.Frame) -> None:
    for frame in frames:
        rig.intake.handle_frame(frame)


def test_intake_gathers_small_records_until_flush(rig):
    """Nothing is submitted before the flush, and the usage is looked up once."""
    take(rig, *[record(n) for n in range(1, 5)], end(5))
    assert (rig.workers.batches, rig.budget.items, rig.asked) == ([], 0, 1)
    rig.intake.flush()
    rig.intake.flush()
    assert rig.workers.numbers() == [[1, 2, 3, 4]]
    assert rig.committer.numbers() == [[5]]
    assert all(isinstance(each, ReceivedRecord) for each in rig.workers.batches[0])
    assert isinstance(rig.committer.batches[0][0], MetadataFrame)
    assert rig.budget.items == 5
    rig.settle()
    assert (rig.budget.items, rig.budget.used_bytes) == (0, 0)


def test_intake_limits_batch_in_frames_and_bytes(rig, monkeypatch):
    """A batch is submitted at its largest count or size."""
    monkeypatch.setattr(session_intake, "MAX_GATHERED_FRAMES", 3)
    take(rig, *[record(n) for n in range(1, 8)])
    assert rig.workers.numbers() == [[1, 2, 3], [4, 5, 6]]
    monkeypatch.setattr(session_intake, "MAX_GATHERED_BYTES", 1)
    take(rig, record(8))
    assert rig.workers.numbers()[2:] == [[7, 8]]


@pytest.mark.parametrize("first", [LARGE, 3, 0])
def test_intake_submits_large_record_alone(rig, first):
    """Complete or in chunks; the budget is charged before memory is allocated."""
    take(rig, record(1), record(2, LARGE, first=first))
    assert rig.workers.numbers()[0] == [1]
    assert rig.budget.items == 2
    if first < LARGE:
        take(rig, chunk(2, first, LARGE - first))
    take(rig, record(3))
    assert rig.workers.numbers() == [[1], [2]]
    rig.intake.flush()
    rig.settle()
    assert (rig.budget.items, rig.budget.used_bytes) == (0, 0)


def test_intake_releases_budget_of_incomplete_record(rig):
    """It leaves as a counted drop that occupies next to nothing."""
    take(rig, record(1, LARGE, first=3))
    assert rig.budget.used_bytes == session_intake.compute_cost_bytes(3)
    take(rig, chunk(1, 3, 100))
    assert rig.budget.used_bytes == session_intake.compute_cost_bytes(103)
    rig.intake.cut_off("torn")
    ((outcome,),) = rig.committer.batches
    assert isinstance(outcome, RecordOutcome)
    assert (outcome.reason, rig.workers.batches) == ("torn", [])
    assert rig.budget.used_bytes == session_intake.compute_cost_bytes(0)
    rig.settle()
    assert (rig.budget.items, rig.budget.used_bytes) == (0, 0)


def test_intake_commits_rejected_records_without_worker(rig):
    """They are counted like any other frame, beside those that are kept."""
    take(rig, record(1), record(2, CEILING + 1), record(3))
    rig.intake.flush()
    assert rig.workers.numbers() == [[1], [3]]
    ((outcome,),) = rig.committer.batches
    assert outcome.reason == "record_too_large"
    rig.settle()
    assert (rig.budget.items, rig.budget.used_bytes) == (0, 0)


def test_intake_ignores_frames_claimed_by_another_stream(rig):
    """Each frame has one owner; the budget of the other stream is released at once."""
    take(rig, *[record(n) for n in range(1, 6)], end(6))
    assert rig.session.claim_frames({2, 4, 6, 99}) == {2, 4, 6, 99}
    rig.intake.flush()
    assert rig.workers.numbers() == [[1, 3, 5]]
    assert rig.committer.batches == []
    rig.settle()
    assert (rig.budget.items, rig.budget.used_bytes) == (0, 0)
    take(rig, record(7))
    rig.session.claim_frames({7})
    rig.intake.flush()
    assert (rig.workers.numbers(), rig.budget.items) == ([[1, 3, 5]], 0)


def test_intake_keeps_frames_before_a_fault(rig):
    """The stream ends with the frame that breaks a rule, not with those before it."""
    with pytest.raises(ResendError):
        take(rig, record(1), record(2), record(9))
    rig.intake.flush()
    assert rig.workers.numbers() == [[1, 2]]


def test_intake_drops_frame_that_fails_three_times(rig):
    """Streams come and go meanwhile: it is the session that counts."""
    bad = agent_pb2.Frame(sequence=2, record=agent_pb2.Record(kind=b"\xff"))
    for _ in range(session_intake.MAX_UNREADABLE_TRIES - 1):
        with pytest.raises(ResendError, match="frame 2 cannot be read"):
            take(rig, record(1), bad)
        rig.intake.flush()
        rig.renew()
    take(rig, record(1), bad, record(3))
    rig.intake.flush()
    ((judged,),) = rig.committer.batches
    assert (judged.frame_id.sequence, dict(judged.refused)) == (2, {"unreadable": range(1)})
    assert rig.workers.numbers() == [[1], [3]]
    assert any("could not be read" in each for each in rig.session.findings())


def test_intake_rejects_repeated_gap(rig):
    """A rank that sent all it has ten times has no more."""
    for _ in range(session_intake.MAX_GAPS - 1):
        with pytest.raises(ResendError):
            take(rig, record(1), record(3))
        rig.renew()
    with pytest.raises(ProtocolError, match="10 times in a row"):
        take(rig, record(1), record(3))


def test_intake_charges_no_declared_bytes(make_request):
    """A record above the limit of which one byte arrived does not block others."""
    rig = IntakeRig(make_request, limit_bytes=LARGE * 2)
    take(rig, record(1, 5 * LARGE, first=1))
    rig.budget.acquire(LARGE)
    rig.budget.release(LARGE)
    take(rig, *[chunk(1, at, LARGE) for at in range(1, 3 * LARGE, LARGE)])
    assert rig.budget.used_bytes == session_intake.compute_cost_bytes(3 * LARGE + 1)
    rig.intake.release_budget()
    assert (rig.budget.items, rig.budget.used_bytes) == (0, 0)


def test_intake_fails_when_agent_stops(rig):
    """Gathered frames are not submitted: they are resent to the next agent."""
    take(rig, record(1))
    rig.budget.close()
    with pytest.raises(UnavailableError):
        rig.intake.flush()
    assert not rig.session.is_known(1)
    rig.intake.release_budget()
    assert (rig.budget.items, rig.budget.used_bytes) == (0, 0)


def changed(sequence: int, plan: DumpPlan) -> agent_pb2.Frame:
    body = agent_pb2.ChangedPlan(iteration=1, plan_json=plan_to_json(plan))
    return agent_pb2.Frame(sequence=sequence, changed_plan=body)


def change(plan: DumpPlan, **fields: Any) -> DumpPlan:
    return PlanChange(**fields).apply_to(plan)


def reasons(rig: IntakeRig) -> dict[int, str]:
    """Return why records were dropped, by their numbers."""
    items = [item for batch in rig.committer.batches for item in batch]
    return {i.frame_id.sequence: i.reason for i in items if isinstance(i, RecordOutcome)}


def test_intake_judges_each_frame_by_its_own_plan(rig):
    """Also on a later stream, which begins before the change."""
    stop, go_on = change(rig.session.plan, iterations=NO_ITERATIONS), rig.session.plan
    sent = [record(1), changed(2, stop), record(3), changed(4, go_on), record(5)]
    take(rig, *sent)
    rig.intake.flush()
    assert (rig.workers.numbers(), reasons(rig)) == ([[1], [5]], {3: "iteration_excluded"})
    rig.settle()
    # Nothing was committed: all of it comes again.
    rig.session.release_frames({1, 2, 3, 4, 5}, "the disk failed")
    rig.renew()
    take(rig, *sent)
    rig.intake.flush()
    assert rig.workers.numbers() == [[1], [5], [1], [5]]
    assert rig.session.plan == go_on


def test_intake_hands_records_to_the_storage_of_their_plan(rig, monkeypatch):
    storages: list[Any] = []
    monkeypatch.setattr(rig.workers, "submit", lambda records, storage: storages.append(storage))
    plan = rig.session.plan
    take(rig, record(1), changed(2, change(plan, saved="full")), record(3))
    rig.intake.flush()
    assert [each.statistic_names is None for each in storages] == [True, False]
    assert [each.tables is None for each in storages] == [True, False]
    assert rig.session.storage is storages[1]


@pytest.mark.parametrize(
    "other",
    [
        DumpPlan(OutputSettings(root="/elsewhere")),
        DumpPlan(OutputSettings(root="/dump", codec="none")),
        change(DumpPlan(OutputSettings("/dump")), saved="full"),
    ],
)
def test_intake_takes_no_plan_that_moves_the_tree(rig, other):
    """Such a frame is one that cannot be read: its number is used up."""
    expected = rig.session.plan if other.content.saved == "tensor" else other
    for _ in range(session_intake.MAX_UNREADABLE_TRIES):
        try:
            take(rig, record(1), changed(2, other), record(3))
        except ResendError:
            rig.renew()
    rig.intake.flush()
    assert rig.session.plan == expected
    assert reasons(rig) == {}
