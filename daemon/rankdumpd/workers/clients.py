"""Clients of all workers: status, metrics, drains and pins are requested from every worker at the
same time and merged into the view of one agent.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import grpc

from rankdump._core import forecast
from rankdump._core.status import (
    DiskStatus,
    JobUsage,
    LedgerStatus,
    MemoryStatus,
    MetricSample,
    StatusView,
    sum_loads,
)
from rankdump._wire import status_messages
from rankdump._wire.channel import ChannelOptions, TlsCredentials, make_error, open_channel
from rankdump.errors import RankdumpError, UnavailableError
from rankdump.wire.v1 import agent_pb2, agent_pb2_grpc, metrics_pb2, metrics_pb2_grpc
from rankdumpd.server.metrics import (
    AGENT_PREFIX,
    SampleKey,
    aggregate_samples,
    build_sample_key,
    is_cumulative,
)
from rankdumpd.server.state_files import RequiredFiles


def merge_views(views: Sequence[StatusView], findings: Iterable[str]) -> StatusView:
    """Return one view of disjoint ranks, with what else there is to say behind it."""
    disks, usage = (
        _merge_disks(view.disks for view in views),
        _merge_usage(view.usage for view in views),
    )
    needs = forecast.sum_job_needs(need for view in views for need in view.needs)
    ahead = forecast.describe_shortages(needs, disks, usage)
    said = (*_iter_findings(views, apart=bool(ahead)), *ahead, *findings)
    return StatusView(
        sessions=tuple(session for view in views for session in view.sessions),
        iterations=tuple(status for view in views for status in view.iterations),
        load=sum_loads(view.load for view in views),
        roots=tuple(dict.fromkeys(root for view in views for root in view.roots)),
        findings=tuple(dict.fromkeys(said)),
        disks=disks,
        usage=usage,
        memory=MemoryStatus(
            used_bytes=sum(view.memory.used_bytes for view in views),
            limit_bytes=sum(view.memory.limit_bytes for view in views),
        ),
        needs=needs,
        ledger=_merge_ledgers([view.ledger for view in views if view.ledger.folder]),
    )


def _iter_findings(views: Iterable[StatusView], *, apart: bool) -> Iterator[str]:
    """Yield what workers say; `apart` from what their own parts of limits leave room for."""
    for view in views:
        own = forecast.describe_shortages(view.needs, view.disks, view.usage) if apart else ()
        yield from (sentence for sentence in view.findings if sentence not in own)


def _merge_ledgers(seen: Sequence[LedgerStatus]) -> LedgerStatus:
    """Return all ledgers as one, in the folder above those of the workers."""
    if not seen:
        return LedgerStatus()
    return LedgerStatus(
        folder=seen[0].folder.rpartition("/")[0],
        used_bytes=sum(each.used_bytes for each in seen),
        free_bytes=min(each.free_bytes for each in seen),
        total_bytes=min(each.total_bytes for each in seen),
    )


def _merge_disks(seen: Iterable[Iterable[DiskStatus]]) -> tuple[DiskStatus, ...]:
    """Return each disk once; what workers take on it, and may take, together."""
    found: dict[str, DiskStatus] = {}
    for disk in (disk for disks in seen for disk in disks):
        before = found.get(disk.root)
        if before is not None:
            used = before.used_bytes + disk.used_bytes
            limit = before.limit_bytes + disk.limit_bytes
            ranks = before.unfinished_ranks + disk.unfinished_ranks
            disk = replace(disk, used_bytes=used, limit_bytes=limit, unfinished_ranks=ranks)
        found[disk.root] = disk
    return tuple(found.values())


def _merge_usage(seen: Iterable[Iterable[JobUsage]]) -> tuple[JobUsage, ...]:
    """Return each job once; each worker has a share of what it may take."""
    found: dict[str, JobUsage] = {}
    for job in (job for jobs in seen for job in jobs):
        before = found.get(job.job_id, JobUsage(job.job_id))
        found[job.job_id] = JobUsage(
            job_id=job.job_id,
            bytes_stored=before.bytes_stored + job.bytes_stored,
            limit_bytes=before.limit_bytes + job.limit_bytes,
            pinned=before.pinned or job.pinned,
            retired_iterations=before.retired_iterations + job.retired_iterations,
        )
    return tuple(found.values())


REFUSED_CALLS_METRIC = "rankdump_refused_calls_total"
_START_TIME_METRIC = "rankdump_start_time_seconds"


@dataclass(slots=True)
class _WorkerCounts:
    """What one worker counted."""

    begun_s: float = 0.0
    now: dict[SampleKey, float] = field(default_factory=dict[SampleKey, float])
    """What its process counted, as of the last answer."""
    before: dict[SampleKey, float] = field(default_factory=dict[SampleKey, float])
    """What its processes before that one counted."""


class WorkerMetricSums:
    """Adds up what workers say; what is counted never falls although one begins anew, or is
    silent. For one thread at a time.
    """

    def __init__(self) -> None:
        self._seen: dict[int, _WorkerCounts] = {}

    def add_up(self, answers: Mapping[int, Sequence[MetricSample]]) -> list[MetricSample]:
        """Return what these workers say now, and what the others counted before."""
        for index, samples in answers.items():
            self._take(self._seen.setdefault(index, _WorkerCounts()), samples)
        gauges = [
            sample
            for samples in answers.values()
            for sample in samples
            if sample.name.startswith(AGENT_PREFIX) and not is_cumulative(sample.name)
        ]
        counted = [
            each
            for seen in self._seen.values()
            for sums in (seen.now, seen.before)
            for each in _build_samples(sums)
        ]
        return aggregate_samples([*gauges, *counted])

    def _take(self, seen: _WorkerCounts, samples: Sequence[MetricSample]) -> None:
        begun_s = next((each.value for each in samples if each.name == _START_TIME_METRIC), 0.0)
        if begun_s != seen.begun_s:
            for key, value in seen.now.items():
                seen.before[key] = seen.before.get(key, 0.0) + value
            seen.begun_s = begun_s
        seen.now = {
            build_sample_key(each): each.value
            for each in samples
            if each.name == REFUSED_CALLS_METRIC
            or (each.name.startswith(AGENT_PREFIX) and is_cumulative(each.name))
        }


def _build_samples(sums: Mapping[SampleKey, float]) -> Iterable[MetricSample]:
    return (MetricSample(name, value, dict(labels)) for (name, labels), value in sums.items())


WORKER_STATUS_TIMEOUT_S = 5.0
_DRAIN_MARGIN_S = 2.0
# A status of a thousand ranks is larger than gRPC's usual 4 MiB.
_CHANNEL_OPTIONS = (("grpc.max_receive_message_length", 256 << 20),)

Answer_co = TypeVar("Answer_co", covariant=True)
Answer = TypeVar("Answer")


class WorkerHandle(Protocol):
    """A worker as others see it."""

    @property
    def index(self) -> int:
        """Its number."""
        ...

    @property
    def address(self) -> str:
        """Where it serves; UnavailableError while it does not."""
        ...

    def wait_up(self, timeout_s: float) -> None:
        """Wait until it serves, or no longer."""
        ...

    def findings(self) -> list[str]:
        """Return what people should know of it."""
        ...


class _WorkerCall(Protocol[Answer_co]):
    def result(self) -> Answer_co: ...


class WorkerClients:
    """Asks workers; a connection is as short as a call, for a worker may die at any time."""

    def __init__(
        self,
        members: Sequence[WorkerHandle],
        credentials: TlsCredentials | None = None,
        *,
        own_host: Callable[[], str] = lambda: "",
        required: RequiredFiles | None = None,
    ) -> None:
        """Over TCP with credentials workers show the certificate that the front has: for `own_host`
        rather than for the address they are reached at. `required` are the front's own.
        """
        self._required = required or RequiredFiles()
        self._members, self._credentials, self._own_host = members, credentials, own_host

    def get_address(self, index: int) -> str:
        """Return where a worker serves; UnavailableError while it does not."""
        return self._members[index].address

    @property
    def serving_count(self) -> int:
        """How many serve at present."""
        return sum(map(_is_serving, self._members))

    def collect_view(self) -> StatusView:
        """Return what all of them know, and who did not say."""
        answers = self._ask(
            lambda channel: agent_pb2_grpc.AgentServiceStub(channel).Status.future(
                agent_pb2.AgentStatusRequest(), timeout=WORKER_STATUS_TIMEOUT_S
            )
        )
        silent = [
            f"worker {member.index} is left out, it does not answer: {answer}"
            for member, answer in zip(self._members, answers, strict=True)
            if isinstance(answer, RankdumpError)
        ]
        own = [sentence for member in self._members for sentence in member.findings()]
        known = [
            status_messages.view_from_wire(a.view)
            for a in answers
            if not isinstance(a, RankdumpError)
        ]
        return merge_views(known, [*self._required.missing, *own, *silent])

    def collect_metrics(self) -> dict[int, list[MetricSample]]:
        """Return the numbers of those that answer."""
        answers = self._ask(
            lambda channel: metrics_pb2_grpc.MetricsServiceStub(channel).Metrics.future(
                metrics_pb2.MetricsRequest(), timeout=WORKER_STATUS_TIMEOUT_S
            )
        )
        return {
            member.index: status_messages.samples_from_wire(answer)
            for member, answer in zip(self._members, answers, strict=True)
            if not isinstance(answer, RankdumpError)
        }

    def drain_workers(self, timeout_s: float) -> int:
        """Wait until all that was received is in the tree; return what is not, at least one for
        each worker that does not say.
        """
        deadline_s = time.monotonic() + timeout_s
        for member in self._members:
            member.wait_up(deadline_s - time.monotonic())
        left_s = max(0.0, deadline_s - time.monotonic())
        drain = agent_pb2.Drain(timeout_ms=round(left_s * 1000))
        answers = self._ask(
            lambda channel: agent_pb2_grpc.AgentServiceStub(channel).Control.future(
                agent_pb2.ControlRequest(drain=drain), timeout=left_s + _DRAIN_MARGIN_S
            )
        )
        return sum(1 if isinstance(a, RankdumpError) else a.queued_records for a in answers)

    def pin_job(self, pin: agent_pb2.Pin) -> None:
        """Pin a job with all workers, or let it go; raise what any of them says against it."""
        request = agent_pb2.ControlRequest(pin=pin)
        answers = self._ask(
            lambda channel: agent_pb2_grpc.AgentServiceStub(channel).Control.future(
                request, timeout=WORKER_STATUS_TIMEOUT_S
            )
        )
        for answer in answers:
            if isinstance(answer, RankdumpError):
                raise answer

    def _options(self) -> ChannelOptions:
        host = self._own_host()
        return (
            (*_CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", host))
            if host
            else _CHANNEL_OPTIONS
        )

    def _ask(
        self, call: Callable[[grpc.Channel], _WorkerCall[Answer]]
    ) -> list[Answer | RankdumpError]:
        """Return the answer of each, or why there is none."""
        with contextlib.ExitStack() as channels:
            calls: list[_WorkerCall[Answer] | RankdumpError] = []
            for member in self._members:
                try:
                    channel = open_channel(member.address, self._credentials, self._options())
                except RankdumpError as error:
                    calls.append(error)
                    continue
                channels.enter_context(channel)
                calls.append(call(channel))
            return [_await_answer(each) for each in calls]


def _is_serving(member: WorkerHandle) -> bool:
    try:
        return bool(member.address)
    except UnavailableError:
        return False


def _await_answer(call: _WorkerCall[Answer] | RankdumpError) -> Answer | RankdumpError:
    if isinstance(call, RankdumpError):
        return call
    try:
        return call.result()
    except grpc.RpcError as failure:
        return make_error(failure)
