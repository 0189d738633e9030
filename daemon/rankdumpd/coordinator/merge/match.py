"""Finds the members of each collective, and the receive of each send. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankdump.contract.events import Column, EventKind
from rankdumpd.coordinator.merge.table import Table

_COLLECTIVE, _SEND, _RECEIVE = 0, 1, 2


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """Calls, numbered from 0: each is a collective with all its members, a send or a receive."""

    members: Column
    """Members of the table, call by call, each call's in the order of their ranks."""
    bounds: Column
    """The members of call i are the elements `bounds[i]` to `bounds[i + 1]`."""
    send_of: Column
    """The send that a receive waits for; -1 for all other calls."""
    collective: Column
    """Whether a call is a collective."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def first(self) -> Column:
        """Member of each call on the lowest rank that took part."""
        return self.members[self.bounds[:-1]]

    def of(self, call: int) -> list[int]:
        """Return the members of one call."""
        low, high = self.bounds[call : call + 2]
        return self.members[low:high].tolist()


def matched(table: Table) -> Match:
    """Return the calls of a table.

    Members of a collective agree on group and sequence; the two ends of a message on group,
    sender, receiver and sequence. A number that a rank repeats makes a call of its own.
    """
    kind, rank = table.members["kind"], table.members["rank"]
    role = np.full(len(kind), _COLLECTIVE, "i1")
    role[kind == int(EventKind.SEND)] = _SEND
    role[kind == int(EventKind.RECV)] = _RECEIVE
    peer = table.members["peer"].astype("i8")
    sender = np.select([role == _SEND, role == _RECEIVE], [rank, peer], -1)
    receiver = np.select([role == _SEND, role == _RECEIVE], [peer, rank], -1)
    message = [table.members["group"], sender, receiver, table.members["sequence"]]

    order = _ordered([*message, role])
    turn = _turns(_changes([key[order] for key in (*message, role, rank)]))
    if turn.any():
        turn = turn[np.argsort(order)]
        order = _ordered([*message, turn, role])
        turn = turn[order]
    same_message = ~_changes([*(key[order] for key in message), turn])
    role = role[order]
    starts = np.flatnonzero(~same_message | _changes([role]))
    bounds = np.append(starts, len(kind))
    answers = (role[starts] == _RECEIVE) & same_message[starts]
    send_of = np.where(answers, np.arange(len(starts)) - 1, -1)
    return Match(order, bounds, send_of, role[starts] == _COLLECTIVE)


def _ordered(keys: list[Column]) -> Column:
    """Return the stable order by those keys, the first one counting most."""
    return np.lexsort(keys[::-1])


def _changes(keys: list[Column]) -> Column:
    """Return whether an element differs from the one before; the first one does."""
    changes = np.ones(len(keys[0]), dtype=bool)
    if len(changes):
        changes[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return changes


def _turns(changes: Column) -> Column:
    """Number the elements of each run from 0."""
    places = np.arange(len(changes))
    return places - np.maximum.accumulate(np.where(changes, places, 0)) if len(changes) else places
