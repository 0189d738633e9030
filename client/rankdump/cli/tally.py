"""A status view rank by rank, and in sentences what went wrong and why. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rankdump.cli.text import counted, reasons
from rankdump.contract.status import IterationStatus, SessionState, SessionStatus, StatusView
from rankdump.reader import ranges


@dataclass(frozen=True, slots=True)
class Tally:
    """One rank of one job over all its iterations."""

    job_id: str
    rank: int
    sessions: tuple[SessionStatus, ...]
    iterations: tuple[IterationStatus, ...]

    @property
    def state(self) -> str:
        """State of its last session; empty when only its tensors are known."""
        return self.sessions[-1].state.value if self.sessions else ""

    @property
    def seen(self) -> int:
        """Iterations the rank ran, as far as anybody said so."""
        said = sum(session.iterations_seen for session in self.sessions)
        return max(said, len({i.iteration for i in self.iterations}))

    @property
    def complete(self) -> int:
        """Iterations whose every tensor is accounted for."""
        return sum(iteration.complete for iteration in self.iterations)

    @property
    def dropped(self) -> Mapping[str, int]:
        """Tensors lost, by reason."""
        total: Counter[str] = Counter()
        for iteration in self.iterations:
            total.update(iteration.dropped)
        return total


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over iterations."""

    expected: int
    stored: int
    linked: int
    degraded: int
    dropped: int
    bytes_in: int
    bytes_stored: int
    bytes_compared: int
    """Of the bytes stored, those whose size before is known."""

    @property
    def kept(self) -> int:
        """Tensors that are in the tree in some form."""
        return self.stored + self.linked + self.degraded


def tallies(view: StatusView) -> tuple[Tally, ...]:
    """Return one tally per job and rank, in that order."""
    places = {(s.job_id, s.rank) for s in view.sessions}
    places |= {(i.job_id, i.rank) for i in view.iterations}
    sessions: dict[tuple[str, int], list[SessionStatus]] = {place: [] for place in places}
    iterations: dict[tuple[str, int], list[IterationStatus]] = {place: [] for place in places}
    for session in view.sessions:
        sessions[session.job_id, session.rank].append(session)
    for iteration in view.iterations:
        iterations[iteration.job_id, iteration.rank].append(iteration)
    return tuple(
        Tally(*place, tuple(sessions[place]), tuple(iterations[place])) for place in sorted(places)
    )


def jobs_over(ranks: Iterable[Tally]) -> set[str]:
    """Return the jobs of which no rank has an open session."""
    ranks = tuple(ranks)
    going = {tally.job_id for tally in ranks if tally.state == SessionState.OPEN.value}
    return {tally.job_id for tally in ranks} - going


def totals(iterations: Iterable[IterationStatus]) -> Totals:
    """Return the sums."""
    held = tuple(iterations)
    return Totals(
        # How many an open iteration expects is known only where it ends.
        expected=sum(i.expected if i.complete else i.accounted for i in held),
        stored=sum(i.stored for i in held),
        linked=sum(i.linked for i in held),
        degraded=sum(i.degraded for i in held),
        dropped=sum(sum(i.dropped.values()) for i in held),
        bytes_in=sum(i.bytes_in for i in held),
        bytes_stored=sum(i.bytes_stored for i in held),
        bytes_compared=sum(i.bytes_stored for i in held if i.bytes_in),
    )


def nobody_line(view: StatusView) -> str:
    """Return one sentence for a view without ranks; only a tree has a root then."""
    if view.roots:
        return "no manifest, and no iteration with tensors: rankdump ls says what is here"
    return "no rank has opened a session"


def sentences(view: StatusView) -> tuple[str, ...]:
    """Return what a person should know beyond the numbers; equal sentences share their ranks."""
    by_text: dict[str, list[int]] = {}
    for tally in tallies(view):
        for text in _of_rank(tally):
            by_text.setdefault(text, []).append(tally.rank)
    own = [
        f"{'rank' if len(set(ranks)) == 1 else 'ranks'} {ranges(ranks)}: {text}"
        for text, ranks in by_text.items()
    ]
    return (*own, *(finding for finding in view.findings if finding not in own))


def _of_rank(tally: Tally) -> list[str]:
    texts = [f"nothing dumped: {s.excluded}" for s in tally.sessions if s.excluded]
    texts += [note for s in tally.sessions for note in s.notes if note != s.excluded]
    if tally.state == SessionState.LOST.value:
        kept = "what it had sent is kept" if tally.iterations else "nothing had come of it"
        texts.append(f"its stream ended without a goodbye; {kept}")
    if sum(tally.dropped.values()):
        lost = counted(sum(tally.dropped.values()), "tensor")
        texts.append(f"{lost} dropped: {reasons(tally.dropped)}")
    unfinished = [i.iteration for i in tally.iterations if not i.complete]
    if unfinished and tally.state != SessionState.OPEN.value:
        texts.append(f"iteration {ranges(unfinished)} is not complete")
    unbalanced = [i.iteration for i in tally.iterations if i.complete and not i.balanced]
    if unbalanced:
        texts.append(f"iteration {ranges(unbalanced)}: not every expected tensor is accounted for")
    return texts
