"""Findings about collectives that are not in the order."""

from __future__ import annotations

from dataclasses import replace

from support.order_events import op
from support.order_jobs import view_of

from rankdump._core.events import EventColumns, FindingKind, UnseenCollectives
from rankdumpd.coordinator.merge.iteration_merge import merge_iteration


def batch(*unseen: tuple[str, int, str], position: int = 1) -> EventColumns:
    values = tuple(UnseenCollectives(7, group, count, reason) for group, count, reason in unseen)
    return replace(EventColumns.from_events([op(position)]), unseen=values)


def test_ranks_with_the_same_loss_share_a_finding() -> None:
    """Numbers of a rank are added up over its batches."""
    once, twice = ("tp", 1, "backend_call"), ("tp", 2, "backend_call")
    view = view_of({0: [batch(twice)], 1: [batch(once), batch(once, position=2)]})
    found = [each for each in merge_iteration(view).findings if each.name == ""]
    (finding,) = (each for each in found if each.kind is FindingKind.COLLECTIVES_NOT_SEEN)
    assert (finding.ranks, finding.group, finding.iteration) == ((0, 1), "tp", 7)
    assert finding.text == (
        "iteration 7: 2 collectives of group 'tp' on ranks 0-1 are not in the order: "
        "the script called the backend itself, past torch's operators"
    )


def test_finding_says_what_is_known() -> None:
    """One collective, an unknown number, an unknown group, a reason of a newer version."""
    view = view_of({3: [batch(("a", 1, "cuda_graph"), ("b", 0, "python_group"), ("", 4, "new"))]})
    assert [finding.text for finding in merge_iteration(view).findings] == [
        "iteration 7: 4 collectives on rank 3 are not in the order: the reason is 'new'",
        "iteration 7: 1 collective of group 'a' on rank 3 is not in the order: "
        "a CUDA graph captured the call, and its replays are not seen",
        "iteration 7: collectives of group 'b' on rank 3 are not in the order: "
        "a class in Python implements the group",
    ]


def test_part_without_events_has_its_findings() -> None:
    """The iteration of a loss may have no event in the batch that reports it."""
    empty = replace(batch(("tp", 2, "backend_call")), columns=EventColumns.from_events([]).columns)
    (finding,) = merge_iteration(view_of({0: [empty]})).findings
    assert finding.kind is FindingKind.COLLECTIVES_NOT_SEEN
