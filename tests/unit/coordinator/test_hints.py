"""Hints name the widest spread of arrivals of each group."""

from __future__ import annotations

from suites.order_jobs import view_of

from rankdump.contract.events import Event, EventColumns, EventKind, ProcessGroup
from rankdumpd.coordinator.hints import arrival_hints, widest
from rankdumpd.coordinator.merge import merge

WORLD = ProcessGroup("world", (0, 1, 2))
PAIR = ProcessGroup("pair", (0, 1))


def order(*arrivals: tuple[str, EventKind, list[int]], iteration: int = 2):
    """Return an order where each call has one arrival per rank."""
    programs: dict[int, list[Event]] = {}
    for position, (group, kind, starts) in enumerate(arrivals):
        for rank, start in enumerate(starts):
            peer = 1 - rank if kind in (EventKind.SEND, EventKind.RECV) else -1
            programs.setdefault(rank, []).append(
                Event(0, iteration, position, position, "C", kind, start, start, group=group,
                      sequence=position, peer=peer)
            )  # fmt: skip
    columns = {rank: [EventColumns.of(events, (WORLD, PAIR))] for rank, events in programs.items()}
    return merge(view_of(columns, iteration=iteration))


REDUCE = EventKind.ALL_REDUCE


def test_the_widest_spread_of_each_group_wins() -> None:
    """One hint per group, with who came first and last, and by how much."""
    hints = arrival_hints(
        order(("world", REDUCE, [10, 20, 30]), ("pair", REDUCE, [40, 45]),
              ("world", REDUCE, [950, 2450, 50]), ("world", REDUCE, [3000, 3001, 3002])),
        job_id="j",
    )  # fmt: skip
    assert set(hints) == {WORLD, PAIR}
    hint = hints[WORLD]
    assert (hint.job_id, hint.group, hint.kind, hint.iteration) == ("j", "world", REDUCE, 2)
    assert (hint.sequence, hint.spread_us, hint.first_rank, hint.last_rank) == (2, 2400, 2, 1)
    for word in ["rank 1 arrived 2.400 ms after rank 2", "number 2", "'world'", "iteration 2"]:
        assert word in hint.reason
    assert hints[PAIR].spread_us == 5


def test_no_spread_and_messages_give_no_hint() -> None:
    """Members that arrive at once, and sends and receives, are nothing to hint at."""
    assert arrival_hints(order(("world", REDUCE, [5, 5, 5])), job_id="j") == {}
    assert arrival_hints(order(("pair", EventKind.SEND, [5, 500])), job_id="j") == {}
    assert arrival_hints(merge(view_of({}, iteration=0)), job_id="j") == {}


def test_of_equal_spreads_the_first_stays() -> None:
    """Neither a later call nor a later iteration replaces an equal one."""
    one = arrival_hints(order(("pair", REDUCE, [1, 4]), ("pair", REDUCE, [11, 14])), job_id="j")
    assert one[PAIR].sequence == 0
    two = arrival_hints(order(("pair", REDUCE, [1, 4]), iteration=3), job_id="j")
    assert widest(one, two)[PAIR].iteration == 2


def test_iterations_keep_the_widest() -> None:
    """Merging hints keeps the larger of each group, and groups only one side knows."""
    one = arrival_hints(order(("pair", REDUCE, [1, 4])), job_id="j")
    two = arrival_hints(
        order(("pair", REDUCE, [1, 9]), ("world", REDUCE, [20, 30, 40]), iteration=5), job_id="j"
    )
    both = widest(one, two)
    assert (both[PAIR].iteration, both[PAIR].spread_us) == (5, 8)
    assert set(both) == {PAIR, WORLD}
    assert widest(two, one) == both


def test_a_spread_wider_than_a_signed_number_is_still_right() -> None:
    """Clocks at both ends of their type give the true distance."""
    hints = arrival_hints(order(("pair", REDUCE, [-(2**63), 2**63 - 1])), job_id="j")
    assert hints[PAIR].spread_us == 2**64 - 1
