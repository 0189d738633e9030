"""Status of a job: text at 100 columns, and JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from support.status_schema import schema

from rankdump._analysis.reader.job_sentences import format_freezes, format_resource_usage
from rankdump._analysis.reader.rank_tallies import format_status_sentences
from rankdump._cli.status_tables import format_job_status, format_status_table
from rankdump._core.events import Finding, FindingKind
from rankdump._core.status import (
    AgentLoad,
    AgentStatus,
    BlackBoxStatus,
    ClockEstimate,
    FreezeStatus,
    IterationStatus,
    MergeStatus,
    SessionState,
    SessionStatus,
    StatusView,
    view_as_json,
)
from rankdump._core.timeouts import HintLevel, TimeoutHint, TimeoutLimit

DOCS = Path(__file__).parents[3] / "docs"
LIMIT = TimeoutLimit("timeout of init_process_group", 20_000_000, "process group", (0, 1))
HINT = TimeoutHint(
    job_id="job",
    group="0",
    backend="gloo",
    level=HintLevel.WARNING,
    waiting=False,
    kind="all_reduce",
    name="Default/group-0/AllReduce-op7",
    iteration=5,
    sequence=7,
    first_rank=0,
    last_rank=1,
    spread_us=12_000_000,
    dump_us=11_000_000,
    limit=LIMIT,
    limits=(LIMIT,),
    projected_us=12_000_000,
    projected_iteration=8,
    settings=("init_process_group(..., timeout=timedelta(seconds=60))",),
    reason="rank 0 waited 12.0 s of 20 s for rank 1 at all_reduce number 7 of group '0'",
)
FINDING = Finding(FindingKind.MISSING_MEMBER, 5, "iteration 5: rank 1 never arrived", (1,))
VIEW = StatusView(
    sessions=tuple(
        SessionStatus("job", f"s{rank}", rank, 2, rank, f"host{rank}", 7, SessionState.OPEN)
        for rank in range(2)
    ),
    iterations=tuple(
        IterationStatus(
            "job",
            f"s{rank}",
            rank,
            iteration,
            complete=(rank, iteration) != (1, 8),
            expected=1200,
            stored=1000,
            linked=150,
            degraded=20,
            dropped={"disk_low": 20, "buffer_full": 10},
            bytes_in=1 << 30,
            bytes_stored=1 << 29,
            stall_us=340_000 * (1 + rank),
        )
        for rank in range(2)
        for iteration in range(9)
    ),
    load=AgentLoad(3, 4 << 20, 50 << 30, 100 << 30),
    roots=("/data/dump",),
    agents=(
        AgentStatus(
            "a0", "host0", 0.4, True, ClockEstimate(1200, 310, 0, True), 0, 0, AgentLoad(2)
        ),
        AgentStatus(
            "a1", "host1", 12.0, False, ClockEstimate(-90, 400, 1, True), 700, 3, AgentLoad(1)
        ),
    ),
    merges=(MergeStatus("job", 8, 163_200, 1, 10_200, 0.4),),
    hints=(HINT,),
    order_findings=(FINDING,) * 7,
)


def test_job_status_fits_100_columns():
    """Tables fit; sentences are folded by who prints them."""
    lines = [*format_status_table(VIEW, width=100), *format_job_status(VIEW, width=100)]
    tables = [line for line in lines if not line.startswith(("timeout", "missing", "  set"))]
    assert max(map(len, tables)) <= 100
    text = "\n".join(" ".join(line.split()) for line in lines)
    assert "8 1/2 2,400 2,000 300 40 1.00 GiB 680 ms disk_low 40, buffer_full 20" in text
    assert "and 3 earlier iterations" in text
    assert "host1 12.0 s ago, gone -0.09 ±0.40 ms, set 1x 1 - 700 3" in text
    assert "8 iterations published (163,200 events), 1 under way (10,200 events, 0.4 s" in text
    assert "timeout warning: rank 0 waited 12.0 s of 20 s for rank 1" in text
    assert "set: init_process_group(..., timeout=timedelta(seconds=60))" in text
    assert "missing_member: iteration 5: rank 1 never arrived" in text
    assert "... 2 more findings: rankdump order --findings" in text


def test_unknown_disk_is_left_out():
    """As of agents that have no session, or are gone."""
    assert format_resource_usage(StatusView()) == ["queued: 0 tensors, 0 B"]


def test_job_status_lists_disconnected_agents_first():
    """An agent that is gone stands above one that answers."""
    hosts = [
        line.split()[0] for line in format_job_status(VIEW, width=100) if line.startswith("host")
    ]
    assert hosts[1:] == ["host1", "host0"]


def test_job_status_names_the_widest_wait_without_urgent_hints():
    """Without anything to set, the widest wait is one line."""
    quiet = replace(VIEW, hints=(replace(HINT, level=HintLevel.OK, spread_us=40_000),))
    text = "\n".join(format_job_status(quiet, width=100))
    assert "widest wait was 40 ms, 0.2% of 20 s (timeout of init_process_group" in text


def test_job_status_of_an_agent_view_is_empty():
    """Only a coordinator knows agents, order and hints."""
    assert format_job_status(replace(VIEW, agents=(), merges=()), width=100) == []


def test_status_table_cuts_many_ranks_and_keeps_the_sum():
    """A page has so many lines: ranks beyond them stand in the sum."""
    lines = format_status_table(VIEW, width=100, most=1)
    assert [line.split()[0] for line in lines] == ["rank", "0", "...", "all"]


@pytest.mark.parametrize("view", [VIEW, StatusView()])
def test_status_json_follows_the_schema(view: StatusView):
    """Scripts rely on it."""
    body = json.loads(json.dumps(view_as_json(view)))
    jsonschema.validate(body, schema())


def test_status_schema_in_docs_is_current():
    """`make schema` writes it."""
    assert json.loads((DOCS / "status.schema.json").read_text()) == schema()


def test_freezes_and_steps_of_black_boxes_are_lines():
    written = FreezeStatus("job", 37, "non_finite", "rank 2: NaN", "/d/blackbox/37", 1)
    view = StatusView(black_box=BlackBoxStatus(64, 4096, 1, (written,)))
    assert format_freezes(view) == [
        "frozen at iteration 37: rank 2: NaN; rankdump faults /d/blackbox/37"
    ]
    line = "black box: 64 steps of ranks, 4.00 KiB; 1 older step dropped because memory was short"
    assert line in format_resource_usage(view)
    short = replace(view.black_box, dropped_tensors=3)
    line = line.replace("step dropped", "step and 3 older full tensors dropped")
    assert line in format_resource_usage(replace(view, black_box=short))
    waiting = replace(written, job_id="other", root="")
    both = replace(view.black_box, freezes=(written, waiting))
    assert format_freezes(StatusView(black_box=both))[1] == (
        "frozen at iteration 37 of job other: rank 2: NaN; its tree is not written"
    )
    assert not any("black box" in each for each in format_resource_usage(StatusView()))


def test_selection_of_a_controlled_job_is_a_line_for_its_ranks():
    """As long as its session is open; afterwards it dumps nothing anyway."""
    session = SessionStatus("j", "s0", 0, 4, 0, "h", 1, SessionState.OPEN, selected="5-8")
    changed = replace(session, operators="conv, fc", saved_data="full", changed_in=12)
    sessions = (
        session,
        replace(changed, rank=1),
        replace(changed, rank=2),
        replace(changed, rank=3, selected="none"),
        replace(changed, rank=4, state=SessionState.CLOSED),
        replace(changed, rank=5, selected="all"),
        replace(changed, rank=6, selected="all", operators="all"),
    )
    assert list(format_status_sentences(StatusView(sessions))) == [
        "ranks 1-2: since iteration 12 it dumps iterations 5-8 of operators conv, fc, as full",
        "rank 3: since iteration 12 it dumps nothing, for no iteration is selected",
        "rank 5: since iteration 12 it dumps every iteration of operators conv, fc, as full",
        "rank 6: since iteration 12 it dumps every iteration of all operators, as full",
    ]
