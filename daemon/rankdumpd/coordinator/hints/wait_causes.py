"""Causes of waits that a longer timeout does not cure: a deadlock, members that call different
operations, a rank that has ended. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rankdump._core.events import Finding, FindingKind
from rankdump._core.status import RankWait, SessionState, SessionStatus
from rankdump._core.timeouts import HintLevel, TimeoutHint
from rankdumpd.coordinator.fleet_views import DEADLOCK_TEXT

MIN_STUCK_US = 5_000_000
"""A call that ranks entered so long ago is not one that they have only started, to wait later."""
_MISMATCHES = (
    FindingKind.OPERATION_MISMATCH,
    FindingKind.SIZE_MISMATCH,
    FindingKind.DTYPE_MISMATCH,
)
STANDING_KINDS = (FindingKind.CYCLE, *_MISMATCHES)
"""Findings about calls that do not end."""
SETTINGS_CLAUSE = "; the suggested settings allow twice the expected wait"


def may_be_stuck(waits: Iterable[RankWait]) -> bool:
    """Return whether the waits may be a deadlock or a mismatch: a cheap test before a merge."""
    long = [each for each in waits if each.waited_us >= MIN_STUCK_US]
    ranks = {each.rank for each in long}
    if any(ranks.intersection(each.absent) for each in long):
        return True
    calls = [(each.group, each.sequence) for each in long if each.sequence >= 0]
    return len(set(calls)) < len(calls) and any(not each.absent for each in long)


def select_standing_findings(
    findings: Iterable[Finding], waits: Iterable[RankWait]
) -> tuple[Finding, ...]:
    """Return the findings about calls that all their ranks have waited in for long."""
    long = {each.rank for each in waits if each.waited_us >= MIN_STUCK_US}
    return tuple(
        finding
        for finding in findings
        if finding.kind in STANDING_KINDS and long.issuperset(finding.ranks)
    )


def mark_stuck_waits(
    waits: Iterable[RankWait], findings: Sequence[Finding]
) -> tuple[RankWait, ...]:
    """Return the waits, with those marked that cannot end because of a finding."""
    return tuple(
        replace(each, stuck=any(_is_about_wait(finding, each) for finding in findings))
        for each in waits
    )


def _is_about_wait(finding: Finding, wait: RankWait) -> bool:
    if finding.iteration != wait.iteration:
        return False
    same_call = (finding.group, finding.sequence) == (wait.group, wait.sequence)
    if finding.kind in _MISMATCHES:
        return same_call
    return wait.rank in finding.ranks or bool(set(finding.ranks).intersection(wait.absent))


def explain_hint(
    hint: TimeoutHint, findings: Iterable[Finding], sessions: Mapping[int, SessionStatus]
) -> TimeoutHint:
    """Return a hint with its cause in place of settings, when a longer timeout does not help."""
    cause = next((each.text for each in findings if _is_about_hint(each, hint)), "")
    late = sessions.get(hint.last_rank)
    if not cause and hint.waiting and late is not None and late.state is SessionState.CLOSED:
        cause = (
            f"iteration {hint.iteration}: rank {hint.last_rank} has ended, and rank "
            f"{hint.first_rank} waits for it in {hint.kind} number {hint.sequence} of group "
            f"{hint.group!r}"
        )
    if not cause:
        return hint
    reason = hint.reason.replace(SETTINGS_CLAUSE, "")
    return replace(hint, cause=cause, settings=(), reason=reason)


def _is_about_hint(finding: Finding, hint: TimeoutHint) -> bool:
    """Return whether a finding explains a wait that has no end, not one that is only long."""
    if finding.kind not in STANDING_KINDS or finding.iteration != hint.iteration:
        return False
    if finding.kind in _MISMATCHES:
        return (finding.group, finding.sequence) == (hint.group, hint.sequence)
    unended = hint.waiting or hint.level is not HintLevel.OK
    return unended and hint.last_rank in finding.ranks and DEADLOCK_TEXT in finding.text
