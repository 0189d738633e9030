"""Tree that a page is about, and the job or attempt of it: part of all addresses of its links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rankdump._web.dump_source import EVERYTHING, DumpSource, JobAttempt
from rankdump._web.page_kinds import AbsentPageError, PageParameters

_MAX_JOB = 512
_MAX_ATTEMPT = (1 << 31) - 1
_MAX_LISTED = 100


class TreeChoice(int):
    """Number of a tree, as templates name it, with the job or attempt that is chosen."""

    part: JobAttempt = EVERYTHING
    has_attempts: bool = False
    """Whether the tree has several jobs or attempts."""

    def make_choice(self, part: JobAttempt, *, has_attempts: bool = False) -> TreeChoice:
        """Return the same tree with another job or attempt."""
        made = TreeChoice(self)
        made.part, made.has_attempts = part, has_attempts
        return made

    def get_values(self) -> dict[str, object]:
        """Return the parameters of an address."""
        named = {"tree": int(self) or None, "job": self.part.job, "attempt": self.part.attempt}
        return {name: value for name, value in named.items() if value not in (None, "")}


KEPT_PARAMETERS = ("search", "statistic", "side", "nonfinite", "collectives", "rank")
"""Parameters that a link to another job or attempt keeps: what they name need not be there."""


class PartLink(NamedTuple):
    """A job or attempt that a page can be about."""

    label: str
    choice: TreeChoice
    is_chosen: bool


def parse_choice(
    parameters: PageParameters, sources: Sequence[DumpSource]
) -> tuple[TreeChoice, DumpSource]:
    """Return the choice of an address, and that part of the tree.

    AbsentPageError for a job or attempt that is not in it.
    """
    number = parameters.read_number("tree", high=max(0, len(sources) - 1)) or 0
    job = parameters.read_text("job", longest=_MAX_JOB)
    part = JobAttempt(job, parameters.read_number("attempt", high=_MAX_ATTEMPT))
    source = sources[number]
    known = source.attempts
    if part != EVERYTHING and not any(_contains(part, each) for each in known):
        names = "; ".join(map(describe_part, known[:_MAX_LISTED])) or "none"
        raise AbsentPageError(f"the tree has no {describe_part(part)}; known: {names}")
    choice = TreeChoice(number).make_choice(part, has_attempts=len(known) > 1)
    return choice, source.select(part)


def list_choices(choice: TreeChoice, source: DumpSource) -> tuple[PartLink, ...]:
    """Return the jobs and attempts of a tree, all of them first; none where it has only one."""
    if not choice.has_attempts:
        return ()
    parts = [EVERYTHING, *source.attempts[-_MAX_LISTED:]]
    return tuple(
        PartLink(describe_part(part), choice.make_choice(part), part == choice.part)
        for part in parts
    )


def describe_part(part: JobAttempt) -> str:
    """Return a job or attempt in words."""
    job = f"job {part.job}" if part.job else ""
    attempt = f"attempt {part.attempt}" if part.attempt is not None else ""
    return ", ".join(filter(None, (job, attempt))) or "all attempts"


def _contains(part: JobAttempt, known: JobAttempt) -> bool:
    return part.job in ("", known.job) and part.attempt in (None, known.attempt)
