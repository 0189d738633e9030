"""Settings of workers: separate folders, and shares within the limits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rankdumpd.settings import (
    AgentSettings,
    DaemonSettings,
    LogSettings,
    TlsSettings,
    build_environment,
    load_settings,
    strip_settings,
)
from rankdumpd.workers.supervisor import build_redirect, build_worker_address, build_worker_settings

MIB = 1 << 20


def shares(settings: AgentSettings, *, memory_bytes: int, cores: int) -> list[AgentSettings]:
    return [
        build_worker_settings(
            settings,
            index,
            state_dir=f"/s/{index}",
            runtime_dir=f"/r/{index}",
            memory_bytes=memory_bytes,
            cores=cores,
        )
        for index in range(settings.workers)
    ]


@given(
    workers=st.integers(2, 256),
    queue=st.integers(256 * MIB, 1 << 36),
    more=st.integers(0, 1 << 36),
    threads=st.integers(0, 64),
    cores=st.integers(1, 64),
    sessions=st.integers(1, 1 << 16),
)
def test_worker_limits_add_up_to_at_most_the_whole(workers, queue, more, threads, cores, sessions):
    whole = AgentSettings(
        workers=workers, queue_bytes=queue, encode_threads=threads, max_sessions=sessions
    )
    each = shares(whole, memory_bytes=queue + more, cores=cores)
    assert sum(s.queue_bytes for s in each) <= queue
    assert sum(s.report_bytes for s in each) <= whole.report_bytes
    assert sum(s.memory_bytes for s in each) <= queue + more
    limits = AgentSettings(workers=workers, queue_bytes=queue, job_bytes=queue, retain_bytes=1)
    parts = shares(limits, memory_bytes=queue + more, cores=cores)
    assert queue - workers < sum(s.job_bytes for s in parts) <= queue
    assert {(s.disk_bytes, s.retain_bytes) for s in parts} == {(0, 1)}
    assert {s.encode_threads for s in each} == {max(1, (threads or cores) // workers)}
    assert {s.workers for s in each} == {1}
    assert sessions <= sum(s.max_sessions for s in each) < sessions + workers
    for places in ({s.listen for s in each}, {s.state_dir for s in each}):
        assert len(places) == workers
    assert len({s.runtime_dir for s in each}) == workers


def test_worker_settings_keep_other_settings():
    whole = AgentSettings(workers=2, coordinator="c:1", slab_bytes=0, drain_timeout_s=2.5)
    (first, _) = shares(whole, memory_bytes=1 << 30, cores=4)
    assert (first.coordinator, first.slab_bytes, first.drain_timeout_s) == ("c:1", 0, 2.5)


def test_worker_address_and_redirect():
    assert build_worker_address("unix:/run/a.sock", 3) == "unix:/run/a.sock.3"
    assert build_worker_address("[::1]:7420", 3) == "[::1]:0"
    assert build_redirect("unix:/run/a.sock.3") == "a.sock.3"
    assert build_redirect("[::1]:41321") == "41321"


def test_worker_environment_round_trips_settings():
    """Law: a worker reads the settings of its supervisor in any environment."""
    mine = DaemonSettings(
        agent=AgentSettings(
            listen="unix:/a b.sock", state_dir='/x "y"', workers=2, drain_timeout_s=0.25
        ),
        tls=TlsSettings(ca="/c", certificate="/d", key="/e"),
        log=LogSettings(format="json"),
    )
    outer = {"PATH": "/bin", "RANKDUMPD_AGENT__LISTEN": "x", "RANKDUMPD_COORDINATOR__LISTEN": "y"}
    inherited = strip_settings(outer)
    assert inherited == {"PATH": "/bin"}
    assert load_settings(None, inherited | build_environment(mine)) == mine
