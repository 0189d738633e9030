"""Ten thousand malformed messages: the agent survives, does not grow, and serves the next rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest

from rankdump._core.plan import DumpPlan, OutputSettings, plan_to_json
from rankdump.wire.v1 import agent_pb2, coordinator_pb2, events_pb2, status_pb2

SEED = 20_261_122
MESSAGES = 10_000
WARM = 2_000
"""After so many the caches of an agent are as large as they get."""
_AGENT = "/rankdump.wire.v1.AgentService/"
_REPORT = "/rankdump.wire.v1.CoordinatorService/Report"
_ON_A_STREAM = 10
_AT_ONCE = 8
"""Attackers: one alone would wait for answers most of the time."""
ARRAY = np.arange(600, dtype=np.float32)


def bodies(frames) -> list[bytes]:
    """Return batches of every kind of frame, as a correct client sends them."""
    events = events_pb2.EventColumns(
        names=["", "a"], count=1, position=bytes(8), kind=b"\x01", name=b"\x01\0\0\0"
    )
    node = agent_pb2.GraphNode(name="a", inputs=["", "w"], attributes={"k": "v"})
    operator = agent_pb2.OperatorArguments(op_name="a", values={"k": "v"})
    timeouts = events_pb2.Timeouts(variables={"V": "1"}, limits={"l": 1.0})
    stack = agent_pb2.CallStack(lines=["a", "b"])
    made = [
        frames.record(1, ARRAY),
        frames.record(1, ARRAY, first_bytes=10),
        *frames.chunks(1, ARRAY, 10, 1000),
        frames.figures(1, [(ARRAY, "1,2,3")]),
        frames.end(1, 0, 3, torn=1),
        frames.goodbye(1),
        agent_pb2.Frame(sequence=1, events=events),
        agent_pb2.Frame(sequence=1, graph_part=agent_pb2.GraphPart(nodes=[node], first=True)),
        agent_pb2.Frame(
            sequence=1, kernel_arguments=agent_pb2.KernelArguments(operators=[operator])
        ),
        agent_pb2.Frame(sequence=1, timeouts=timeouts),
        agent_pb2.Frame(
            sequence=1,
            call_stacks=agent_pb2.CallStacks(calls=["a"], stacks=[0], texts=[stack]),
        ),
    ]
    batches = [agent_pb2.PushRequest(batch=agent_pb2.FrameBatch(frames=[each])) for each in made]
    bells = [agent_pb2.PushRequest(doorbell=agent_pb2.Doorbell(written=64))]
    return [each.SerializeToString() for each in (*batches, *bells)]


def opening(root: str, rank: int) -> bytes:
    plan = plan_to_json(DumpPlan(OutputSettings(root=root)))
    request = agent_pb2.OpenSessionRequest(
        job_id="hostile", session_id=session_of(rank), rank=rank, world_size=_AT_ONCE,
        host="here", pid=1,
        framework="none", device_target="CPU", plan_json=plan, config_source=b"{}",
        secret=b"s" * 32,
    )  # fmt: skip
    return request.SerializeToString()


def session_of(rank: int) -> str:
    return f"{rank:032}"


def report(root: str, number: int) -> bytes:
    session = status_pb2.SessionStatus(
        job_id="h", session_id="s", world_size=1, state=status_pb2.SESSION_STATE_OPEN
    )
    balance = status_pb2.IterationStatus(job_id="h", session_id="s", expected=1, stored=1)
    request = coordinator_pb2.ReportRequest(
        agent_id=f"agent{number}", sequence=1, sessions=[session], iterations=[balance],
        roots={"h": root}, texts=coordinator_pb2.Texts(first=1, texts=["a"]),
    )  # fmt: skip
    return request.SerializeToString()


class MessageFuzzer:
    """Sends mutations of valid messages as raw bytes, which no library checks."""

    def __init__(self, channel: grpc.Channel, root: str, frames, number: int) -> None:
        self._random = random.Random(SEED + number)
        self._channel, self._session_id = channel, session_of(number)
        self._opening, self._report = opening(root, number), report(root, number)
        self._bodies = bodies(frames)
        self._drain = agent_pb2.ControlRequest(drain=agent_pb2.Drain(timeout_ms=1))
        self.sent = 0

    def attack(self, until: int) -> None:
        while self.sent < until:
            self._random.choice([self._open, self._push, self._push, self._tell, self._control])()

    def _mutated(self, message: bytes) -> bytes:
        data = bytearray(message)
        for _ in range(self._random.randint(1, 4)):
            at = self._random.randrange(len(data) + 1)
            kind = self._random.randrange(5)
            if kind == 0 and at < len(data):
                data[at] ^= 1 << self._random.randrange(8)
            elif kind == 1:
                del data[at : at + self._random.randrange(1, 9)]
            elif kind == 2:
                data[at:at] = self._random.randbytes(self._random.randrange(1, 9))
            elif kind == 3:
                # The largest number there is, in the place of one that is small.
                data[at : at + 1] = b"\xff" * 9 + b"\x01"
            else:
                data += self._random.choice(self._bodies)[:200]
        self.sent += 1
        return bytes(data)

    def _open(self) -> None:
        self._call("OpenSession", self._mutated(self._opening))

    def _control(self) -> None:
        self._call("Control", self._mutated(self._drain.SerializeToString()))

    def _push(self) -> None:
        """Send them to a session that was opened correctly."""
        answer = self._call("OpenSession", self._opening)
        grant = agent_pb2.OpenSessionResponse.FromString(answer)
        hello = agent_pb2.Hello(session_id=self._session_id, token=grant.token)
        first = agent_pb2.PushRequest(hello=hello).SerializeToString()
        some = [self._mutated(self._random.choice(self._bodies)) for _ in range(_ON_A_STREAM)]
        self._stream(f"{_AGENT}Push", [first, *some])

    def _tell(self) -> None:
        some = [self._mutated(self._report) for _ in range(_ON_A_STREAM)]
        self._stream(_REPORT, some)

    def _call(self, method: str, message: bytes) -> bytes:
        try:
            return self._channel.unary_unary(f"{_AGENT}{method}")(message, timeout=20)
        except grpc.RpcError as error:
            _check(error)
            return b""

    def _stream(self, method: str, messages: list[bytes]) -> None:
        try:
            for _ in self._channel.stream_stream(method)(iter(messages), timeout=20):
                pass
        except grpc.RpcError as error:
            _check(error)


def _check(error: grpc.RpcError) -> None:
    """Check that a rejected call has a definite status."""
    assert isinstance(error, grpc.Call)
    assert error.code() is not grpc.StatusCode.UNKNOWN, error.details()
    assert error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED, error.details()


class ProcessUsage:
    """Resources of a process."""

    def __init__(self, pid: int, state: Path) -> None:
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        numbers = dict(line.split(":\t", 1) for line in status if ":\t" in line)
        self.resident_kib = int(numbers["VmRSS"].split()[0])
        self.threads = int(numbers["Threads"])
        self.descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        self.state_bytes = sum(each.stat().st_size for each in state.rglob("*") if each.is_file())


@pytest.fixture
def attacked(
    make_daemon, short_dir: Path, frames
) -> Iterator[tuple[object, Callable[[int], None]]]:
    root = str(short_dir / "dump")
    daemon = make_daemon(
        RANKDUMPD_AGENT__ROOTS=root,
        RANKDUMPD_COORDINATOR__ROOTS=root,
        RANKDUMPD_AGENT__MAX_SESSIONS="64",
    )
    with grpc.insecure_channel(daemon.address) as channel, ThreadPoolExecutor(_AT_ONCE) as pool:
        attackers = [MessageFuzzer(channel, root, frames, number) for number in range(_AT_ONCE)]

        def attack(until: int) -> None:
            share = -(-until // _AT_ONCE)
            for done in [pool.submit(each.attack, share) for each in attackers]:
                done.result()

        yield daemon, attack


def test_agent_survives_ten_thousand_malformed_messages(
    attacked, short_dir: Path, make_rank, frames
):
    daemon, attack = attacked
    state = short_dir / "state"
    attack(WARM)
    before = ProcessUsage(daemon.process.pid, state)
    attack(MESSAGES)
    after = ProcessUsage(daemon.process.pid, state)
    assert daemon.process.poll() is None, daemon.log()
    assert after.resident_kib < 1.5 * before.resident_kib
    assert after.threads <= before.threads + 8
    assert after.descriptors <= before.descriptors + 16
    assert after.state_bytes < 2 * before.state_bytes + (8 << 20)
    # gRPC says in its own words what it cannot parse.
    ours = [line for line in daemon.log().splitlines() if "/rankdumpd/" in line]
    assert not ours, daemon.log()[-5000:]
    rank = make_rank(daemon.address, codec="none", session_id="honest", job_id="honest")
    rank.open()
    arrays = [np.full((7,), at, np.float32) for at in range(5)]
    stream = rank.push()
    for at, array in enumerate(arrays, 1):
        stream.send(frames.record(at, array, op_name=f"Default/op{at}"))
    stream.send(frames.end(6, 0, 5), frames.goodbye(7))
    assert stream.finish() is grpc.StatusCode.OK
    for at, array in enumerate(arrays, 1):
        (path,) = rank.root.rglob(f"*op{at}.*.npy")
        assert np.load(path).tobytes() == array.tobytes()
