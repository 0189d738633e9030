"""Metric definitions, counters and the aggregation of samples."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rankdumpd
from rankdump._core.drop_reasons import DROP_REASONS
from rankdump._core.session_protocol import IterationEnd
from rankdump._core.status import DiskStatus, JobUsage, MetricSample, StatusView
from rankdumpd.agent.commit.post_commit import count_iteration_end
from rankdumpd.agent.overview import sample_status
from rankdumpd.server.metrics import (
    AGENT_PREFIX,
    COORDINATOR_PREFIX,
    LEDGER_COUNTERS,
    MAX_LABELLED_SAMPLES,
    METRIC_DEFINITIONS,
    MetricCounters,
    MetricKind,
    SampleKey,
    aggregate_samples,
    build_sample_key,
    find_metric_name,
)
from rankdumpd.workers.clients import WorkerMetricSums

SOURCES = [path.read_text() for path in Path(rankdumpd.__file__).parent.rglob("*.py")]
CLIENT = [p.read_text() for p in (Path(rankdumpd.__file__).parents[2] / "client").rglob("*.py")]
DROPPED = "rankdump_agent_dropped_records_total"
GIVEN_TO = {"make_drop_outcome", "cut_off", "count_undelivered", "SelectionVerdict"}
REASONING = ("_reason", "_explain_unreadable", "_source")
CONSTANTS = {
    "BUFFER_FULL",
    "CHANGED_IN_PLACE",
    "COPY_FAILED",
    "CORRUPTED",
    "NAME_TAKEN",
    "OPERATOR_FAILED",
    "INTERNAL_ERROR",
    "STATISTICS_FAILED",
    "TORN",
    "UNREADABLE",
    "UNREADABLE_ARRAY",
}
WORD = re.compile("[a-z]+(_[a-z]+)*")
NAMES = re.compile(r'"(rankdump_(?:agent|coordinator|refused|build|start|tls)_\w+)"')


def values(samples: Iterable[MetricSample]) -> dict[SampleKey, float]:
    return {build_sample_key(sample): sample.value for sample in samples}


def test_metric_definitions_match_names_in_code():
    """Every name in the code is in the table, and every name of the table is used."""
    used = {find_metric_name(name) for text in SOURCES for name in NAMES.findall(text)}
    assert used == set(METRIC_DEFINITIONS)


def test_metric_names_follow_conventions():
    """Counters end with _total, units are base units, and a help text is a sentence."""
    for name, metric in METRIC_DEFINITIONS.items():
        assert re.fullmatch(r"[a-z][a-z_]*[a-z]", name)
        assert name.endswith("_total") == (metric.kind is MetricKind.COUNTER), name
        assert not re.search(r"_(ms|us|kb|mb|gb|percent)(_|$)", name)
        assert metric.help_text.endswith("."), name
        assert not {"le", "quantile", "job_name"} & set(metric.labels)


def test_drop_counters_start_at_zero_for_every_reason():
    counters = MetricCounters()
    counters.start_at_zero(AGENT_PREFIX)
    found = values(counters.samples())
    for reason in DROP_REASONS:
        for by in ("agent", "rank"):
            assert found[DROPPED, (("by", by), ("reason", reason))] == 0
    assert not any(name.startswith(COORDINATOR_PREFIX) for name, _ in found)


def literals(nodes: Iterable[ast.AST | None]) -> set[str]:
    """Yield every text among expressions, without those of comparisons."""
    inner = [each for node in nodes if node for each in ast.walk(node)]
    compared = {at for each in inner if isinstance(each, ast.Compare) for at in ast.walk(each)}
    texts = {e.value for e in inner if isinstance(e, ast.Constant) and e not in compared}
    return {each for each in texts if isinstance(each, str) and WORD.fullmatch(each)}


def name_of(function: ast.expr) -> str:
    """Return the last part of the name of what is called."""
    return getattr(function, "attr", getattr(function, "id", ""))


def drop_reasons_in(text: str) -> set[str]:
    """Yield every literal that code gives as the reason of a drop."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and name_of(node.func) in GIVEN_TO:
            found |= literals([*node.args, *(each.value for each in node.keywords)])
        elif isinstance(node, ast.FunctionDef) and node.name.endswith(REASONING):
            found |= literals(n.value for n in ast.walk(node) if isinstance(n, ast.Return))
        elif isinstance(node, ast.Assign):
            names = {ast.unparse(target) for target in node.targets}
            if names & CONSTANTS or any(name.endswith(".reason") for name in names):
                found |= literals([node.value])
    return found


@pytest.mark.slow
def test_drop_reasons_in_code_are_in_closed_list():
    """Law: no drop is counted as `other`."""
    words = {word for text in (*SOURCES, *CLIENT) for word in drop_reasons_in(text)}
    assert len(words) > 20
    assert words <= DROP_REASONS, words - DROP_REASONS


@given(st.dictionaries(st.text(max_size=12), st.integers(1, 9), max_size=30))
def test_unknown_drop_reasons_add_no_labels(drops: dict[str, int]):
    """Law: hostile reasons are all counted under known labels."""
    found = count_iteration_end(IterationEnd(1, sum(drops.values()), drops, 0))
    by_reason = {key: value for key, value in found.items() if key[0] == DROPPED}
    assert {dict(labels)["reason"] for _, labels in by_reason} <= DROP_REASONS
    assert sum(by_reason.values()) == sum(drops.values())


def test_samples_of_roots_and_jobs_are_bounded():
    """Only the fullest disks and the largest jobs have a sample of their own."""
    many = range(3 * MAX_LABELLED_SAMPLES)
    view = StatusView(
        disks=tuple(DiskStatus(f"/{i}", free_bytes=i) for i in many),
        usage=tuple(JobUsage(f"j{i}", bytes_stored=i) for i in many),
    )
    samples = list(sample_status(view))
    roots = [s.labels["root"] for s in samples if s.name == "rankdump_agent_disk_free_bytes"]
    jobs = [s.labels["job"] for s in samples if s.name == "rankdump_agent_job_bytes"]
    assert roots == [f"/{i}" for i in range(MAX_LABELLED_SAMPLES)]
    assert jobs[0] == f"j{many[-1]}"
    assert len(jobs) == MAX_LABELLED_SAMPLES


def test_histogram_buckets_are_cumulative():
    counters = MetricCounters()
    for seconds in (0.0004, 0.001, 0.3, 99.0):
        counters.add_duration("rankdump_agent_commit_seconds", seconds)
    found = values(counters.samples())
    bucket = "rankdump_agent_commit_seconds_bucket"
    assert found[bucket, (("le", "0.001"),)] == 2
    assert found[bucket, (("le", "0.5"),)] == 3
    assert found[bucket, (("le", "10.0"),)] == 3
    assert found[bucket, (("le", "+Inf"),)] == 4
    assert found["rankdump_agent_commit_seconds_count", ()] == 4
    assert found["rankdump_agent_commit_seconds_sum", ()] == pytest.approx(99.3014)


def test_aggregate_samples_combines_processes():
    """Amounts are added, the lowest free space counts, and unknown names are omitted."""
    root = {"root": "/d"}
    found = aggregate_samples(
        [
            MetricSample("rankdump_agent_queue_bytes", 3),
            MetricSample("rankdump_agent_queue_bytes", 4),
            MetricSample("rankdump_agent_disk_free_bytes", 9, root),
            MetricSample("rankdump_agent_disk_free_bytes", 7, root),
            MetricSample("rankdump_agent_disk_floor_bytes", 1, root),
            MetricSample("rankdump_agent_disk_floor_bytes", 2, root),
            MetricSample("nonsense", 1),
        ]
    )
    assert [sample.value for sample in found] == [7, 7, 2]


Steps = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 5), st.booleans(), st.booleans()), max_size=40
)


@given(Steps)
def test_worker_metric_sums_never_fall(steps: list[tuple[int, int, bool, bool]]):
    """Law: counters of silent or restarted workers are kept, and none counts twice."""
    name = "rankdump_agent_received_bytes_total"
    sums, begun, counted = WorkerMetricSums(), [1.0, 2.0, 3.0], [0, 0, 0]
    total, told, clock = 0, [0, 0, 0], 3.0
    kept = [0, 0, 0]
    for worker, more, restarts, answers in steps:
        if restarts:
            # What it counted after its last answer is gone with it.
            clock += 1
            begun[worker], counted[worker] = clock, 0
            kept[worker] += told[worker]
            told[worker] = 0
        counted[worker] += more
        said = {}
        if answers:
            told[worker] = counted[worker]
            said[worker] = [
                MetricSample("rankdump_start_time_seconds", begun[worker]),
                MetricSample(name, counted[worker]),
            ]
        found = values(sums.add_up(said)).get((name, ()), 0)
        assert found >= total
        assert found == sum(kept) + sum(told)
        total = int(found)


@pytest.mark.parametrize("name", sorted(LEDGER_COUNTERS))
def test_worker_metric_sums_count_what_the_ledger_keeps_once(name: str):
    """The next process of a worker begins with it."""
    sums = WorkerMetricSums()
    for begun_s, counted in ((1.0, 3), (2.0, 3), (3.0, 5)):
        samples = [
            MetricSample("rankdump_start_time_seconds", begun_s),
            MetricSample(name, counted),
        ]
        assert values(sums.add_up({0: samples})).get((name, ())) == counted
