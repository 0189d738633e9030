from __future__ import annotations

from dataclasses import replace

from rankdump._analysis.reader.rank_tallies import (
    format_status_sentences,
    sum_iterations,
    tally_ranks,
)
from rankdump._cli.status_tables import format_status_table, format_summary_table
from rankdump._core.drop_reasons import describe_drops
from rankdump._core.status import (
    IterationStatus,
    JobUsage,
    SessionState,
    SessionStatus,
    StatusView,
)


def session(rank, **fields):
    whole = SessionStatus("job", f"s{rank}", rank, 4, rank, "h", 1, SessionState.CLOSED)
    return replace(whole, **fields)


def iteration(rank, number, **fields):
    whole = IterationStatus("job", f"s{rank}", rank, number, True, 10, 10, bytes_in=100)
    return replace(whole, bytes_stored=50, **fields)


VIEW = StatusView(
    sessions=(
        session(0, iterations_seen=5),
        session(1, iterations_seen=5, excluded="support_device [0] excludes this rank's device 1"),
        session(2, iterations_seen=5, excluded="support_device [0] excludes this rank's device 1"),
        session(3, state=SessionState.LOST, notes=("no operator matched 'Foo'",)),
    ),
    iterations=(
        iteration(0, 0),
        iteration(0, 1, stored=7, dropped={"disk_low": 3}),
        iteration(3, 0, stored=4),
        iteration(3, 1, complete=False, expected=0, stored=2),
    ),
    findings=("group world: rank 3 never arrived at AllReduce 7",),
)


def test_tally_ranks_sums_iterations():
    """A rank's tally adds up its iterations; seen counts what the plan left out too."""
    by_rank = {tally.rank: tally for tally in tally_ranks(VIEW)}
    assert sorted(by_rank) == [0, 1, 2, 3]
    assert (by_rank[0].iterations_complete, by_rank[0].iterations_seen) == (2, 5)
    sums = sum_iterations(by_rank[0].iterations)
    assert (sums.expected, sums.kept, sums.dropped) == (20, 17, 3)
    assert (sums.bytes_in, sums.bytes_stored) == (200, 100)
    assert by_rank[0].dropped == {"disk_low": 3}


def test_status_sentences_name_each_reason_once():
    """Equal reasons share one sentence, and no loss is without one."""
    assert format_status_sentences(VIEW) == (
        f"rank 0: {describe_drops({'disk_low': 3})[0]}",
        "ranks 1-2: nothing dumped: support_device [0] excludes this rank's device 1",
        "rank 3: no operator matched 'Foo'",
        "rank 3: the connection ended before the session was closed; the records received "
        "until then are kept",
        "rank 3: iteration 1 is not complete",
        "rank 3: iteration 0: not every expected tensor is accounted for",
        "group world: rank 3 never arrived at AllReduce 7",
    )


def test_status_sentences_of_a_lost_session_without_records():
    view = StatusView((session(0, state=SessionState.LOST),))
    assert format_status_sentences(view) == (
        "rank 0: the connection ended before the session was closed; no record had been received",
    )


def test_status_sentences_ignore_unfinished_iterations_of_open_sessions():
    """What a running rank is in the middle of is not called incomplete."""
    view = StatusView((session(0, state=SessionState.OPEN),), (iteration(0, 0, complete=False),))
    assert format_status_sentences(view) == ()


def test_agent_that_started_again_is_not_said_to_have_had_no_rank():
    """The sizes of earlier jobs are shown below."""
    view = StatusView(usage=(JobUsage("job", 1 << 20),))
    assert format_status_sentences(view) == ("no rank has been connected since this agent started",)
    assert format_status_sentences(StatusView(usage=(JobUsage("job", pinned=True),))) == (
        "no rank has opened a session",
    )


def test_status_tables_fit_100_columns():
    """Numbers of a large job still stand in one line each, with their sum below."""
    large = StatusView(
        tuple(session(rank, iterations_seen=100) for rank in range(100)),
        tuple(
            iteration(rank, 0, expected=9_999, stored=8_999, linked=1_000, bytes_in=1 << 40)
            for rank in range(100)
        ),
    )
    for lines in (format_status_table(large, width=100), format_summary_table(large, width=100)):
        assert all(len(line) <= 100 for line in lines)
        assert len(lines) == 1 + 64 + 1 + 1
        assert lines[-1].split()[0] == "all"
        assert "100/10000" in lines[-1]


def test_tables_separate_jobs():
    """An agent that serves two jobs shows them one after the other."""
    view = StatusView((session(0), session(0, job_id="other")))
    for lines in (format_status_table(view, width=100), format_summary_table(view, width=100)):
        assert "job job" in lines
        assert "job other" in lines
