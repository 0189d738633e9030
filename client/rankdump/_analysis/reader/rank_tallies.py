"""Status of a job, rank by rank: sums over iterations, and sentences about problems and causes.
Pure: no terminal, no daemon.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from rankdump._core.drop_reasons import describe_degraded, describe_drops
from rankdump._core.job_control import NO_ITERATIONS
from rankdump._core.number_ranges import name_ranks, ranges
from rankdump._core.status import (
    IterationStatus,
    RankWait,
    SessionState,
    SessionStatus,
    StatusView,
)
from rankdump._core.tree_session import describe_crash
from rankdump._core.units import format_count, format_duration
from rankdump.errors import CorruptedError

MIN_SHOWN_WAIT_US = 2_000_000
"""Microseconds below which a wait is not shown, because every collective waits for its
last member.
"""


@dataclass(frozen=True, slots=True)
class RankTally:
    """Sums of one rank in one attempt of a job, over all its iterations."""

    job_id: str
    rank: int
    attempt: int
    sessions: tuple[SessionStatus, ...]
    iterations: tuple[IterationStatus, ...]
    is_followed: bool = False
    """Whether the rank has a later attempt."""
    wait: RankWait | None = None
    """The call that the rank waits in; None if it waits in none, or if that is not known."""

    @property
    def state(self) -> str:
        """State of the rank's last session; empty if only its tensors are known."""
        if self.crash:
            return "crashed"
        return self.sessions[-1].state.value if self.sessions else ""

    @property
    def crash(self) -> str:
        """How the rank ended with an error, as `crashed in iteration 2`; empty if it did not."""
        if not self.sessions:
            return ""
        last = self.sessions[-1]
        return describe_crash(last, self.iterations, is_followed=self.is_followed)

    @property
    def described_state(self) -> str:
        """State as text, with how long the rank of an open session has waited, and where another
        rank has ended.
        """
        if self.crash:
            return self.crash
        if self.state == SessionState.OPEN.value:
            if self.wait is None or self.wait.waited_us < MIN_SHOWN_WAIT_US:
                return self.state
            verb = "hangs" if self.wait.stuck else "waits"
            return f"{verb} {format_duration(self.wait.waited_us)}"
        unfinished = [each.iteration for each in self.iterations if not each.complete]
        unfinished += [self.wait.iteration] if self.wait else []
        verb = _describe_end(self.sessions[-1]) if self.sessions else ""
        if not verb or not unfinished:
            return verb
        verb = "ended" if verb == SessionState.CLOSED.value else verb
        return f"{verb} in iteration {max(unfinished)}"

    @property
    def iterations_seen(self) -> int:
        """Number of iterations that the rank is known to have run."""
        reported = sum(session.iterations_seen for session in self.sessions)
        return max(reported, len({i.iteration for i in self.iterations}))

    @property
    def iterations_complete(self) -> int:
        """Number of iterations that are complete."""
        return sum(iteration.complete for iteration in self.iterations)

    @property
    def dropped(self) -> Mapping[str, int]:
        """Number of lost tensors, by reason."""
        return _sum_counts(iteration.dropped for iteration in self.iterations)

    @property
    def same_as_baseline(self) -> int:
        """Number of tensors that have no file, because they are the same in the baseline."""
        return sum(iteration.same_as_baseline for iteration in self.iterations)

    @property
    def degraded_by(self) -> Mapping[str, int]:
        """Number of tensors of which less was kept than the plan selects, by reason."""
        return _sum_counts(iteration.degraded_by for iteration in self.iterations)


def _sum_counts(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return total


@dataclass(frozen=True, slots=True)
class IterationTotals:
    """Sums over iterations."""

    expected: int
    stored: int
    linked: int
    degraded: int
    dropped: int
    bytes_in: int
    bytes_stored: int
    bytes_compared: int
    """Stored bytes of those iterations whose size before compression is known."""

    @property
    def kept(self) -> int:
        """Number of tensors that are in the tree in some form."""
        return self.stored + self.linked + self.degraded


def _describe_end(session: SessionStatus) -> str:
    """Return how a session ended; if no more is known, its state."""
    by = session.ended_by
    if session.state is not SessionState.LOST or not by:
        return session.state.value
    return f"killed by {by}" if by.startswith("SIG") else f"ended with {by}"


def tally_ranks(view: StatusView) -> tuple[RankTally, ...]:
    """Return one tally per job, rank and attempt, sorted by these."""
    sessions: defaultdict[tuple[str, int, int], list[SessionStatus]] = defaultdict(list)
    iterations: defaultdict[tuple[str, int, int], list[IterationStatus]] = defaultdict(list)
    for session in view.sessions:
        sessions[session.job_id, session.rank, session.attempt].append(session)
    for iteration in view.iterations:
        iterations[iteration.job_id, iteration.rank, iteration.attempt].append(iteration)
    places = sorted({*sessions, *iterations})
    waits = {(wait.job_id, wait.rank): wait for wait in view.waits}
    last = {(job_id, rank): attempt for job_id, rank, attempt in places}
    return tuple(
        RankTally(
            *place,
            tuple(sessions.get(place, ())),
            tuple(iterations.get(place, ())),
            is_followed=place[2] < last[place[:2]],
            wait=waits.get(place[:2]) if place[2] == last[place[:2]] else None,
        )
        for place in places
    )


def select_attempt(view: StatusView, attempt: int) -> StatusView:
    """Return the view with only the sessions, balances and findings of an attempt.

    CorruptedError lists the attempts if the view does not have this one.
    """
    known = sorted({each.attempt for each in (*view.sessions, *view.iterations)})
    if attempt not in known:
        raise CorruptedError(f"no attempt {attempt}; known: {', '.join(map(str, known)) or 'none'}")
    return replace(
        view,
        sessions=tuple(each for each in view.sessions if each.attempt == attempt),
        iterations=tuple(each for each in view.iterations if each.attempt == attempt),
        order_findings=tuple(each for each in view.order_findings if each.attempt == attempt),
    )


def find_ended_jobs(ranks: Iterable[RankTally]) -> set[str]:
    """Return the jobs that have no open session."""
    ranks = tuple(ranks)
    going = {tally.job_id for tally in ranks if tally.state == SessionState.OPEN.value}
    return {tally.job_id for tally in ranks} - going


def sum_iterations(iterations: Iterable[IterationStatus]) -> IterationTotals:
    """Return the sums over iterations."""
    held = tuple(iterations)
    return IterationTotals(
        # The number of expected tensors of an open iteration is known only at its end.
        expected=sum(i.expected if i.complete else i.accounted_tensors for i in held),
        stored=sum(i.stored for i in held),
        linked=sum(i.linked for i in held),
        degraded=sum(i.degraded for i in held),
        dropped=sum(sum(i.dropped.values()) for i in held),
        bytes_in=sum(i.bytes_in for i in held),
        bytes_stored=sum(i.bytes_stored for i in held),
        bytes_compared=sum(i.bytes_stored for i in held if i.bytes_in),
    )


def _explain_empty_view(view: StatusView) -> list[str]:
    if view.sessions or view.iterations:
        return []
    if view.roots:  # only the view of a tree has a root and no ranks
        return [
            "the tree has no manifest and no iteration with tensors: rankdump ls lists "
            "what it contains"
        ]
    return [explain_no_ranks(view)]


def explain_no_ranks(view: StatusView) -> str:
    """Return why the view of a daemon has no ranks; an agent knows earlier jobs only by
    their size.
    """
    if any(job.bytes_stored for job in view.usage):
        return "no rank has been connected since this agent started"
    return "no rank has opened a session"


def format_status_sentences(view: StatusView) -> tuple[str, ...]:
    """Return sentences about problems; ranks with the same problem share a sentence."""
    by_text: dict[str, list[int]] = {}
    tallies = tally_ranks(view)
    # A tree that another tool wrote has neither sessions nor manifests.
    is_recorded = bool(view.sessions) or any(each.complete for each in view.iterations)
    several = any(tally.attempt for tally in tallies)
    for tally in tallies:
        attempt = f"attempt {tally.attempt}" if several else ""
        texts = [
            f"{attempt}: {text}" if several else text
            for text in _rank_sentences(tally, is_recorded=is_recorded)
        ]
        crash = [f"{attempt} {tally.crash}".lstrip()] if tally.crash else []
        for text in (*crash, *texts):
            by_text.setdefault(text, []).append(tally.rank)
    own = [f"{name_ranks(ranks)}: {text}" for text, ranks in by_text.items()]
    others = merge_rank_sentences(finding for finding in view.findings if finding not in own)
    return (*_explain_empty_view(view), *own, *_format_waits(view, tallies), *others)


_RANK_SENTENCE = re.compile(r"rank (\d+)((?:: | ended | and )?.*)", re.DOTALL)


def merge_rank_sentences(sentences: Iterable[str]) -> list[str]:
    """Return sentences about ranks; sentences that differ only in the rank become one that names
    all ranks.

    >>> merge_rank_sentences(["rank 1 ended within iteration 3", "rank 0 ended within iteration 3"])
    ['ranks 0-1 ended within iteration 3']
    """
    by_text: dict[str, list[int]] = {}
    for sentence in sentences:
        found = _RANK_SENTENCE.fullmatch(sentence)
        rank, text = (int(found[1]), found[2]) if found else (-1, sentence)
        by_text.setdefault(text, []).append(rank)
    return [
        text if ranks[0] < 0 else f"{name_ranks(ranks)}{text}" for text, ranks in by_text.items()
    ]


def _format_waits(view: StatusView, tallies: Iterable[RankTally]) -> list[str]:
    """Return a sentence for each call that ranks wait in, with the ranks that have not arrived."""
    by_call: dict[tuple[object, ...], list[RankWait]] = {}
    is_open = {tally.wait: tally.state == SessionState.OPEN.value for tally in tallies}
    for wait in view.waits:
        if is_open.get(wait) and wait.waited_us >= MIN_SHOWN_WAIT_US:
            key = (wait.job_id, wait.iteration, wait.group, wait.sequence, wait.name, wait.absent)
            by_call.setdefault(key, []).append(wait)
    return [_describe_call_wait(waits) for waits in by_call.values()]


def _describe_call_wait(waits: list[RankWait]) -> str:
    first = min(waits, key=lambda wait: (wait.start_us, wait.rank))
    ranks = [wait.rank for wait in waits]
    who = f"{name_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'}"
    since = time.strftime("%H:%M:%S", time.localtime(first.start_us / 1e6))
    source = f" at {first.source}" if first.source else ""
    absent = f" for {name_ranks(first.absent)}"
    return (
        f"{who} waited since {since} ({format_duration(first.waited_us)}) in {first.kind} number "
        f"{first.sequence} of group {first.group!r} in iteration {first.iteration}{source}"
        f"{absent if first.absent else ', where every member has arrived'}"
    )


def _describe_changed_plan(session: SessionStatus) -> str:
    """Return what a session dumps since its plan was changed."""
    since = f"since iteration {session.changed_in}"
    if session.selected == NO_ITERATIONS.text:
        return f"{since} it dumps nothing, for no iteration is selected"
    which = "every iteration" if session.selected == "all" else f"iterations {session.selected}"
    what = session.operators
    operators = "all operators" if what == "all" else f"operators {what}"
    return f"{since} it dumps {which} of {operators}, as {session.saved_data}"


def _rank_sentences(tally: RankTally, *, is_recorded: bool) -> list[str]:
    changed = tally.state == SessionState.OPEN.value and tally.sessions[-1].changed_in is not None
    texts = [_describe_changed_plan(tally.sessions[-1])] if changed else []
    texts += [f"nothing dumped: {s.excluded}" for s in tally.sessions if s.excluded]
    texts += [note for s in tally.sessions for note in s.notes if note != s.excluded]
    if tally.state == SessionState.LOST.value:
        kept = (
            "the records received until then are kept"
            if tally.iterations
            else "no record had been received"
        )
        by = tally.sessions[-1].ended_by
        how = f"the process ended ({by})" if by else "the connection ended"
        texts.append(f"{how} before the session was closed; {kept}")
    if tally.same_as_baseline:
        same = format_count(tally.same_as_baseline, "linked tensor")
        texts.append(f"{same} without a file: the same as in the baseline")
    texts += describe_degraded(tally.degraded_by)
    texts += describe_drops(tally.dropped)
    unfinished = [i.iteration for i in tally.iterations if not i.complete]
    is_explained = tally.crash == f"crashed in iteration {ranges(unfinished)}"
    is_open = tally.state == SessionState.OPEN.value
    if unfinished and is_recorded and not is_open and not is_explained:
        texts.append(f"iteration {ranges(unfinished)} is not complete")
    unbalanced = [i.iteration for i in tally.iterations if i.complete and not i.is_balanced]
    if unbalanced:
        texts.append(f"iteration {ranges(unbalanced)}: not every expected tensor is accounted for")
    return texts
