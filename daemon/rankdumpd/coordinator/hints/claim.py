"""How much of a wait is known: that a rank has not come holds only as far as it was heard. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rankdumpd.coordinator.hints.wording import duration
from rankdumpd.coordinator.values import Heard

FRESH_US = 10_000_000
"""Who was heard of so lately is heard of as usual: agents report once a second."""


@dataclass(frozen=True, slots=True)
class Claim:
    """How long one rank is known to have kept a call waiting."""

    rank: int
    known_us: int
    reason: str = ""
    """Why it may be longer; empty when the rank is heard of as usual."""


def claim_of(rank: int, heard: Heard | None, *, start_us: int, now_us: int) -> Claim:
    """Return how long a call that began at `start_us` is known to have waited for a rank."""
    if heard is None:
        return Claim(rank, 0, f"nothing has been heard of rank {rank} so far")
    known_us = max(0, min(now_us, heard.until_us) - start_us)
    behind_us = now_us - heard.until_us
    if behind_us <= FRESH_US:
        return Claim(rank, known_us)
    told = f"what rank {rank} did in the last {duration(behind_us)} is not known"
    return Claim(rank, known_us, f"{told}: {heard.agent}" if heard.agent else told)


def surest(claims: Sequence[Claim], stuck: set[int]) -> Claim:
    """Return the claim that says most of a wait.

    A rank that waits elsewhere itself is blamed only when no other is known to be as late.
    """
    longest_us = max(claim.known_us for claim in claims)
    near = [claim for claim in claims if 2 * claim.known_us >= longest_us]
    return min(near, key=lambda claim: (claim.rank in stuck, claim.rank))


def claims_of(
    ranks: Sequence[int], heard: Mapping[int, Heard], *, start_us: int, now_us: int
) -> list[Claim]:
    """Return the claim of each rank that has not come to a call."""
    return [claim_of(r, heard.get(r), start_us=start_us, now_us=now_us) for r in ranks]
