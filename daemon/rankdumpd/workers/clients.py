"""Clients of all workers: requests for status, metrics, drains, pins and freezes go to every worker
at the same time, and the answers are merged into the view of one agent.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from typing import TypeVar

import grpc

from rankdump._core import forecast
from rankdump._core.status import (
    BlackBoxStatus,
    DiskStatus,
    JobUsage,
    LedgerStatus,
    MemoryStatus,
    MetricSample,
    PackBacklog,
    StatusView,
    sum_loads,
)
from rankdump._wire import status_messages
from rankdump._wire.channel import ChannelOptions, TlsCredentials, make_error, open_channel
from rankdump.errors import RankdumpError, RejectedError, UnavailableError
from rankdump.wire.v1 import agent_pb2, agent_pb2_grpc, metrics_pb2, metrics_pb2_grpc
from rankdumpd.server.metrics import (
    AGENT_PREFIX,
    LEDGER_COUNTERS,
    REFUSED_CALLS_METRIC,
    SampleKey,
    aggregate_samples,
    build_sample_key,
    is_cumulative,
)
from rankdumpd.server.state_files import RequiredFiles
from rankdumpd.workers.worker_process import WorkerProcess

_Part = TypeVar("_Part", MemoryStatus, PackBacklog, BlackBoxStatus, DiskStatus, JobUsage)


def merge_views(views: Sequence[StatusView], findings: Iterable[str]) -> StatusView:
    """Return the sum of the status of all workers, whose ranks are disjoint, with
    further findings.
    """
    disks = _merge_disks(disk for view in views for disk in view.disks)
    usage = _merge_usage(job for view in views for job in view.usage)
    needs = forecast.sum_job_needs(need for view in views for need in view.needs)
    ahead = forecast.describe_shortages(needs, disks, usage)
    all_findings = (*_iter_findings(views, without_forecasts=bool(ahead)), *ahead, *findings)
    return StatusView(
        sessions=tuple(session for view in views for session in view.sessions),
        iterations=tuple(status for view in views for status in view.iterations),
        load=sum_loads(view.load for view in views),
        roots=tuple(dict.fromkeys(root for view in views for root in view.roots)),
        findings=tuple(dict.fromkeys(all_findings)),
        disks=disks,
        usage=usage,
        memory=_sum_parts(MemoryStatus(), [view.memory for view in views]),
        needs=needs,
        ledger=_merge_ledgers([view.ledger for view in views if view.ledger.folder]),
        backlog=_sum_parts(PackBacklog(), [view.backlog for view in views]),
        black_box=_sum_parts(BlackBoxStatus(), [view.black_box for view in views]),
    )


def _iter_findings(views: Iterable[StatusView], *, without_forecasts: bool) -> Iterator[str]:
    """Yield the findings of all workers. With `without_forecasts`, leave out their own forecasts of
    shortages, because a forecast for all workers together replaces them.
    """
    for view in views:
        left_out: Sequence[str] = ()
        if without_forecasts:
            left_out = forecast.describe_shortages(view.needs, view.disks, view.usage)
        yield from (sentence for sentence in view.findings if sentence not in left_out)


def _merge_ledgers(ledgers: Sequence[LedgerStatus]) -> LedgerStatus:
    """Return the sum of all ledgers; its folder is the parent of the workers' folders."""
    if not ledgers:
        return LedgerStatus()
    return LedgerStatus(
        folder=ledgers[0].folder.rpartition("/")[0],
        used_bytes=sum(each.used_bytes for each in ledgers),
        free_bytes=min(each.free_bytes for each in ledgers),
        total_bytes=min(each.total_bytes for each in ledgers),
    )


def _add_fields(earlier: _Part, later: _Part, names: Iterable[str]) -> _Part:
    """Return `later`, with the named fields set to the sums of both parts."""
    sums = {name: getattr(earlier, name) + getattr(later, name) for name in names}
    return replace(later, **sums)


def _sum_parts(zero: _Part, parts: Iterable[_Part]) -> _Part:
    """Return the sum of all parts, field by field; `zero` if there are none."""
    names = [each.name for each in fields(zero)]
    return reduce(lambda one, other: _add_fields(one, other, names), parts, zero)


def _merge_disks(disks: Iterable[DiskStatus]) -> tuple[DiskStatus, ...]:
    """Return each disk once, with the sums of the workers' usage and limits."""
    merged: dict[str, DiskStatus] = {}
    names = "used_bytes", "limit_bytes", "unfinished_ranks"
    for disk in disks:
        before = merged.get(disk.root)
        merged[disk.root] = disk if before is None else _add_fields(before, disk, names)
    return tuple(merged.values())


def _merge_usage(jobs: Iterable[JobUsage]) -> tuple[JobUsage, ...]:
    """Return each job once, with the sums of the workers' usage and shares of limits."""
    merged: dict[str, JobUsage] = {}
    names = "bytes_stored", "limit_bytes", "retired_iterations"
    for job in jobs:
        before = merged.get(job.job_id, JobUsage(job.job_id))
        pinned = before.pinned or job.pinned
        merged[job.job_id] = replace(_add_fields(before, job, names), pinned=pinned)
    return tuple(merged.values())


_START_TIME_METRIC = "rankdump_start_time_seconds"


@dataclass(slots=True)
class _WorkerCounts:
    """Counters of one worker, summed up across its restarts."""

    begun_s: float = 0.0
    now: dict[SampleKey, float] = field(default_factory=dict[SampleKey, float])
    """Counters of the running process, from its last answer."""
    before: dict[SampleKey, float] = field(default_factory=dict[SampleKey, float])
    """Sums of the counters of earlier processes of the worker."""


class WorkerMetricSums:
    """Sums of the workers' metrics; counters never decrease when a worker restarts or does not
    answer.

    Not safe to use from several threads at once.
    """

    def __init__(self) -> None:
        self._seen: dict[int, _WorkerCounts] = {}

    def add_up(self, answers: Mapping[int, Sequence[MetricSample]]) -> list[MetricSample]:
        """Return the sums of these answers, and for workers without an answer their
        last counters.
        """
        for index, samples in answers.items():
            self._update(self._seen.setdefault(index, _WorkerCounts()), samples)
        gauges = [
            sample
            for samples in answers.values()
            for sample in samples
            if sample.name.startswith(AGENT_PREFIX) and not is_cumulative(sample.name)
        ]
        counted = [
            MetricSample(name, value, dict(labels))
            for seen in self._seen.values()
            for sums in (seen.now, seen.before)
            for (name, labels), value in sums.items()
        ]
        return aggregate_samples([*gauges, *counted])

    def _update(self, seen: _WorkerCounts, samples: Sequence[MetricSample]) -> None:
        begun_s = next((each.value for each in samples if each.name == _START_TIME_METRIC), 0.0)
        if begun_s != seen.begun_s:
            for key, value in seen.now.items():
                if key[0] not in LEDGER_COUNTERS:
                    seen.before[key] = seen.before.get(key, 0.0) + value
            seen.begun_s = begun_s
        seen.now = {
            build_sample_key(each): each.value
            for each in samples
            if each.name == REFUSED_CALLS_METRIC
            or (each.name.startswith(AGENT_PREFIX) and is_cumulative(each.name))
        }


WORKER_STATUS_TIMEOUT_S = 5.0
WORKER_FREEZE_TIMEOUT_S = 150.0
_DRAIN_MARGIN_S = 2.0
# The status of a thousand ranks is larger than gRPC's default limit of 4 MiB.
_CHANNEL_OPTIONS = (("grpc.max_receive_message_length", 256 << 20),)

Answer = TypeVar("Answer")


class WorkerClients:
    """Calls all workers; each call opens its own connection, because a worker may die
    at any time.
    """

    def __init__(
        self,
        members: Sequence[WorkerProcess],
        credentials: TlsCredentials | None = None,
        *,
        own_host: Callable[[], str] = lambda: "",
        required: RequiredFiles | None = None,
    ) -> None:
        """Over TCP with `credentials`, workers show the supervisor's certificate, which is valid
        for `own_host` and not for their addresses. `required` contains the supervisor's own files.
        """
        self._required = required or RequiredFiles()
        self._members, self._credentials, self._own_host = members, credentials, own_host

    def get_address(self, index: int) -> str:
        """Return the address of a worker; UnavailableError while it does not serve."""
        return self._members[index].address

    @property
    def serving_count(self) -> int:
        """Number of workers that serve at present."""
        return sum(map(_is_serving, self._members))

    def collect_view(self) -> StatusView:
        """Return the merged status of all workers, with a finding for each worker that does not
        answer.
        """
        answered, silent = self._call_all(
            lambda channel: agent_pb2_grpc.AgentServiceStub(channel).Status.future(
                agent_pb2.AgentStatusRequest(), timeout=WORKER_STATUS_TIMEOUT_S
            )
        )
        own = [sentence for member in self._members for sentence in member.findings()]
        lacks = [
            f"worker {index} does not answer, and this status lacks its ranks: {error}"
            for index, error in silent.items()
        ]
        views = [status_messages.view_from_wire(answer.view) for answer in answered.values()]
        return merge_views(views, [*self._required.missing, *own, *lacks])

    def collect_metrics(self) -> dict[int, list[MetricSample]]:
        """Return the metrics by index of the worker, for the workers that answer."""
        answered, _ = self._call_all(
            lambda channel: metrics_pb2_grpc.MetricsServiceStub(channel).Metrics.future(
                metrics_pb2.MetricsRequest(), timeout=WORKER_STATUS_TIMEOUT_S
            )
        )
        return {
            index: status_messages.samples_from_wire(answer) for index, answer in answered.items()
        }

    def drain_workers(self, timeout_s: float) -> int:
        """Wait until all received records are in the tree. Return the number of records that are
        not, plus one for each worker that does not answer.
        """
        deadline_s = time.monotonic() + timeout_s
        for member in self._members:
            member.wait_up(deadline_s - time.monotonic())
        left_s = max(0.0, deadline_s - time.monotonic())
        drain = agent_pb2.Drain(timeout_ms=round(left_s * 1000))
        answered, silent = self._control_all(
            agent_pb2.ControlRequest(drain=drain), left_s + _DRAIN_MARGIN_S
        )
        return len(silent) + sum(answer.queued_records for answer in answered.values())

    def pin_job(self, pin: agent_pb2.Pin) -> None:
        """Pin or unpin a job with all workers; if a worker refuses, raise its error."""
        _, failed = self._control_all(agent_pb2.ControlRequest(pin=pin), WORKER_STATUS_TIMEOUT_S)
        for error in failed.values():
            raise error

    def freeze_job(self, freeze: agent_pb2.Freeze) -> agent_pb2.ControlResponse:
        """Freeze a job with all workers that have ranks of it; return their merged answers.

        RejectedError when no worker freezes the job.
        """
        answered, failed = self._control_all(
            agent_pb2.ControlRequest(freeze=freeze), WORKER_FREEZE_TIMEOUT_S
        )
        if not answered:
            raise RejectedError("; ".join(dict.fromkeys(map(str, failed.values()))))
        trees = dict.fromkeys(tree for answer in answered.values() for tree in answer.trees)
        notes = dict.fromkeys(note for answer in answered.values() for note in answer.notes)
        refusals = [f"worker {index}: {error}" for index, error in failed.items()]
        return agent_pb2.ControlResponse(trees=trees, notes=[*notes, *refusals])

    def _control_all(
        self, request: agent_pb2.ControlRequest, timeout_s: float
    ) -> tuple[dict[int, agent_pb2.ControlResponse], dict[int, RankdumpError]]:
        return self._call_all(
            lambda channel: agent_pb2_grpc.AgentServiceStub(channel).Control.future(
                request, timeout=timeout_s
            )
        )

    def _options(self) -> ChannelOptions:
        host = self._own_host()
        override = (("grpc.ssl_target_name_override", host),) if host else ()
        return (*_CHANNEL_OPTIONS, *override)

    def _call_all(
        self, call: Callable[[grpc.Channel], grpc.Future[Answer]]
    ) -> tuple[dict[int, Answer], dict[int, RankdumpError]]:
        """Call all workers at the same time; return their answers and their errors,
        each by index.
        """
        calls: dict[int, grpc.Future[Answer]] = {}
        answered: dict[int, Answer] = {}
        failed: dict[int, RankdumpError] = {}
        with contextlib.ExitStack() as channels:
            for member in self._members:
                try:
                    channel = open_channel(member.address, self._credentials, self._options())
                except RankdumpError as error:
                    failed[member.index] = error
                    continue
                channels.enter_context(channel)
                calls[member.index] = call(channel)
            for index, each in calls.items():
                try:
                    answered[index] = each.result()
                except grpc.RpcError as failure:
                    failed[index] = make_error(failure)
        return answered, dict(sorted(failed.items()))


def _is_serving(member: WorkerProcess) -> bool:
    try:
        return bool(member.address)
    except UnavailableError:
        return False
