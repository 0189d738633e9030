"""Sentences about what became of an order to a running job. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rankdump._analysis.reader.query import ranges
from rankdump._core.job_control import ControlAction, ControlResult


def format_result(
    job_id: str, action: ControlAction, values: Sequence[str], result: ControlResult
) -> list[str]:
    """Return the lines about a result: what begins where, and ranks that are apart."""
    what = " ".join((action.value, *values))
    changed = [each.rank for each in result.ranks if each.iteration is not None]
    is_freeze = action is ControlAction.FREEZE
    done = "frozen" if is_freeze else "changed"
    if result.iteration is None or not changed:
        lines = [f"job {job_id}: {what}: no rank is {done}"]
    else:
        which = f"rank {changed[0]}" if len(changed) == 1 else f"ranks {ranges(changed)}"
        how = f"{what} from iteration {result.iteration} on"
        if is_freeze:
            how = f"frozen at iteration {result.iteration} (rankdump faults)"
        lines = [f"job {job_id}: {how}, {which}"]
    return [*lines, *_format_ranks(result, done)]


def _format_ranks(result: ControlResult, done: str) -> Iterator[str]:
    """Yield what is to be known of some ranks, a line for all of which it is true."""
    by_text: dict[str, list[int]] = {}
    for each in result.exceptions:
        begins = f"not {done}" if each.iteration is None else f"from iteration {each.iteration} on"
        begins = "not confirmed" if each.unconfirmed else begins
        by_text.setdefault(f"{begins}: {each.reason}", []).append(each.rank)
    for each in result.ranks:
        if each.note:
            by_text.setdefault(each.note, []).append(each.rank)
    for text, ranks in by_text.items():
        yield f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}: {text}"
