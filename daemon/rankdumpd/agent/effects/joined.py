"""Operators of an iteration that has ended, joined and entered in the ledger, some at a time."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from rankdump.contract.exchange import IterationEnd
from rankdumpd import faults
from rankdumpd.agent.join import Joiner
from rankdumpd.agent.ledger import Ledger
from rankdumpd.agent.members import Joined, Member
from rankdumpd.agent.sessions import Session
from rankdumpd.agent.usage import Taken, Usage
from rankdumpd.agent.values import Declared, Ticket

OPERATORS_AT_ONCE = 256
BYTES_AT_ONCE = 64 << 20
"""So much may stand twice on the disk, in an operator's file and in those of its tensors."""

_log = logging.getLogger(__name__)


class Joining:
    """The operators of an iteration that is over, joined some at a time."""

    def __init__(
        self,
        ledger: Ledger,
        session: Session,
        declared: Declared,
        end: IterationEnd,
        usage: Usage,
    ) -> None:
        self.declared, self.end = declared, end
        self._left = _groups(ledger, session, declared.ticket, end.iteration, usage)

    def go_on(self) -> bool:
        """Join some more; return whether that was all.

        OSError, of a disk that is full or ails, and sqlite3.Error leave it to another time. Where
        the disk refuses for good, tensors stay in files of their own. So do those that came when
        their operator had been joined already.
        """
        return next(self._left, True)


def _groups(
    ledger: Ledger, session: Session, end: Ticket, iteration: int, usage: Usage
) -> Iterator[bool]:
    """Join a group of operators at each step, and yield whether it was the last one."""
    joiner, session_id = session.outlet.joiner, end.session_id
    if joiner is None:
        return
    found = _operators(ledger.members(session_id, iteration, before=end.sequence))
    groups = list(_some_at_a_time(found))
    for number, operators in enumerate(groups, start=1):
        shares: list[Joined] = []
        done: list[Member] = []
        for members in operators:
            # Done before: what a crash left of it is removed.
            done += [member for member in members if member.joined]
            if not any(member.joined for member in members):
                parts = _joined(joiner, session, members)
                shares += parts
                done += members if parts else []
        if shares:
            ledger.joined(session_id, shares, synced=session.outlet.synced)
            more = _bytes_more(operators, shares)
            session.stored_anew(iteration, more)
            root = str(session.outlet.tree.root)
            usage.add(Taken(session.request.job_id, root, more))
        _remove(joiner, session, done)
        yield number == len(groups)


def _operators(members: Iterable[Member]) -> list[list[Member]]:
    operators: defaultdict[str, list[Member]] = defaultdict(list)
    for member in members:
        operators[member.whole.path].append(member)
    return [*operators.values()]


def _some_at_a_time(operators: Iterable[list[Member]]) -> Iterator[list[list[Member]]]:
    some: list[list[Member]] = []
    room = BYTES_AT_ONCE
    for members in operators:
        some.append(members)
        room -= sum(member.bytes_stored for member in members)
        if room <= 0 or len(some) >= OPERATORS_AT_ONCE:
            yield some
            some, room = [], BYTES_AT_ONCE
    if some:
        yield some


def _joined(joiner: Joiner, session: Session, members: Sequence[Member]) -> list[Joined]:
    mark = f"{session.request.session_id}-{members[0].sequence}"
    try:
        return joiner.join(members, mark=mark)
    except OSError as error:
        if faults.passes(error):
            raise
        _failed(session, "tensors stay in files of their own", error)
        return []


def _bytes_more(operators: Iterable[Sequence[Member]], shares: Iterable[Joined]) -> int:
    before = {each.sequence: each.bytes_stored for members in operators for each in members}
    return sum(share.bytes_stored - before[share.sequence] for share in shares)


def _remove(joiner: Joiner, session: Session, members: Sequence[Member]) -> None:
    try:
        joiner.remove(members)
    except OSError as error:
        if faults.passes(error):
            raise
        _failed(session, "tensors stand in files of their own as well", error)


def _failed(session: Session, what: str, error: OSError) -> None:
    rank = session.request.rank
    if session.trouble(f"rank {rank}, {what}: {error.strerror or error}"):
        _log.error("rank %d, %s", rank, what, exc_info=error)
