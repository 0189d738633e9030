"""Dumps of torch's Flight Recorder: the calls of each rank, and the merged order of all ranks.

A dump is a file of one rank, whose number is the last number in the file name. It has no tensors.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rankdump._analysis.reader.call_order import MergedCalls, RankCall, merge_iterations
from rankdump._analysis.reader.foreign_files import find_marked_files, read_foreign_file
from rankdump._analysis.reader.query import Query
from rankdump._analysis.reader.tree import Tree
from rankdump._core.events import EventKind, Finding, FindingKind
from rankdump._core.number_ranges import ranges
from rankdump._layout.flight_record import (
    COMPLETED,
    FlightCall,
    FlightDump,
    FlightGroup,
    is_flight_dump,
    parse_flight_dump,
)
from rankdump._layout.foreign_calls import find_last_number
from rankdump._torchfile.pickle_values import read_pickle_values
from rankdump.errors import CorruptedError, UnsupportedError

FLIGHT_RECORDER = "torch Flight Recorder"
_MAX_NAMED = 8


def is_flight_folder(root: Path) -> bool:
    """Return whether a path is a dump of the Flight Recorder, or a folder with one."""
    return next(find_marked_files(root, is_flight_dump), None) is not None


def reject_flight_tree(root: Path, queries: Sequence[Query]) -> Tree:
    """Raise a CorruptedError, because a dump of the Flight Recorder has no tensors."""
    raise CorruptedError(
        f"{root}: a dump of torch's Flight Recorder has collectives but no tensors or statistics: "
        "rankdump ls lists them, and rankdump order merges those of all ranks"
    )


def read_flight_dumps(root: Path) -> list[FlightDump]:
    """Return the dumps in a folder, or in one file, by rank; CorruptedError names the file at
    fault.
    """
    found: dict[int, tuple[Path, FlightDump]] = {}
    for path in find_marked_files(root, is_flight_dump):
        rank = find_last_number(path.name.removesuffix(".json"))
        if rank is None:
            raise CorruptedError(f"{path}: its name has no number, which would be that of its rank")
        dump = read_flight_dump(path, rank)
        if rank in found:
            raise CorruptedError(
                f"{found[rank][0]} and {path} are both of rank {rank}: keep one of them"
            )
        found[rank] = path, dump
    return [dump for _, (_, dump) in sorted(found.items())]


def read_flight_dump(path: Path, rank: int) -> FlightDump:
    """Return the dump in a file, which is JSON or a pickle; CorruptedError when it is neither."""
    data = read_foreign_file(path)
    try:
        is_json = data.lstrip().startswith(b"{")
        return parse_flight_dump(json.loads(data) if is_json else read_pickle_values(data), rank)
    except (ValueError, RecursionError) as error:
        raise CorruptedError(f"{path}: not a whole JSON file: {error}") from None
    except (CorruptedError, UnsupportedError) as error:
        raise CorruptedError(f"{path}: {error}") from None


def read_flight_order(root: Path) -> MergedCalls:
    """Return the merged order of the calls of all ranks; calls with the same group and number are
    one entry.
    """
    dumps = read_flight_dumps(root)
    members = _find_members(dumps)
    first = _find_first_numbers(dumps)
    programs = {
        (0, dump.rank): [
            _make_rank_call(call, dump.rank, members[_identify_group(call.group)], first)
            for call in dump.calls
        ]
        for dump in dumps
    }
    merged = merge_iterations(programs, notes=tuple(_describe_states(dumps)))
    findings = [*merged.findings, *_find_lone_messages(programs), *_find_silent_ranks(dumps)]
    return merged._replace(findings=findings)


def _identify_group(group: FlightGroup) -> tuple[str, tuple[int, ...]]:
    # Groups that were created by splitting one group may have the same name.
    return group.name, group.members


def _find_members(
    dumps: Sequence[FlightDump],
) -> dict[tuple[str, tuple[int, ...]], tuple[int, ...]]:
    """Return the members of each group, from the dumps; if these lack them, the ranks that called
    it.
    """
    callers: defaultdict[tuple[str, tuple[int, ...]], set[int]] = defaultdict(set)
    for dump in dumps:
        for call in dump.calls:
            callers[_identify_group(call.group)].add(dump.rank)
    return {group: group[1] or tuple(sorted(ranks)) for group, ranks in callers.items()}


def _find_first_numbers(dumps: Sequence[FlightDump]) -> dict[tuple[int, str], int]:
    """Return the first collective of each rank and group that its ring still has; 0 if it has all.

    Earlier collectives may have been called, so their absence proves nothing.
    """
    found: dict[tuple[int, str], int] = {}
    for dump in dumps:
        for call in dump.calls if not dump.is_whole else ():
            place = dump.rank, call.group.name
            found[place] = min(found.get(place, call.sequence), call.sequence)
    return found


def _make_rank_call(
    call: FlightCall, rank: int, members: tuple[int, ...], first: dict[tuple[int, str], int]
) -> RankCall:
    is_message = call.kind in (EventKind.SEND, EventKind.RECV)
    key = None if is_message else (*_identify_group(call.group), call.sequence)
    known = tuple(
        member for member in members if first.get((member, call.group.name), 0) <= call.sequence
    )
    peer = -1
    if is_message and call.peers is not None:
        other = call.peers[1 if call.kind is EventKind.SEND else 0]
        peer = members[other] if other < len(members) else other
    return RankCall(
        name=call.name,
        kind=call.kind,
        key=key,
        group=call.group.name,
        members=() if is_message else known,
        sequence=call.sequence,
        start_us=call.created_us,
        end_us=call.completed_us or call.created_us,
        element_count=call.element_count,
        dtype=call.dtype,
        peer=peer,
    )


def _describe_states(dumps: Sequence[FlightDump]) -> list[str]:
    """Return one sentence for each state of calls that are not complete."""
    by_state: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for dump in dumps:
        for call in dump.calls:
            if call.state != COMPLETED:
                by_state[call.state, call.name].append(dump.rank)
    lines = [
        f"not complete: {name} is {state} on rank {ranges(ranks)}"
        for (state, name), ranks in by_state.items()
    ]
    left = len(lines) - _MAX_NAMED
    return [*lines[:_MAX_NAMED], *([f"... and {left} more are not complete"] if left > 0 else [])]


def _find_lone_messages(programs: dict[tuple[int, int], list[RankCall]]) -> list[Finding]:
    """Return findings about sends without a receive and receives without a send, between these
    ranks.
    """
    ends: defaultdict[tuple[str, int, int, int], set[EventKind]] = defaultdict(set)
    named: dict[tuple[str, int, int, int], tuple[int, RankCall]] = {}
    ranks = {rank for _, rank in programs}
    for (_, rank), calls in programs.items():
        for call in calls:
            if call.kind in (EventKind.SEND, EventKind.RECV) and call.peer in ranks:
                pair = (rank, call.peer) if call.kind is EventKind.SEND else (call.peer, rank)
                place = call.group, *pair, call.sequence
                ends[place].add(call.kind)
                named[place] = rank, call
    return [
        Finding(
            FindingKind.LONE_MESSAGE,
            0,
            f"{call.name} of rank {rank} has no "
            f"{'receive' if EventKind.SEND in kinds else 'send'} on rank {call.peer}",
            (rank, call.peer),
            call.group,
            call.sequence,
            call.name,
        )
        for place, kinds in ends.items()
        if len(kinds) == 1
        for rank, call in (named[place],)
    ]


def _find_silent_ranks(dumps: Sequence[FlightDump]) -> list[Finding]:
    """Return findings about members of groups that have no dump."""
    there = {dump.rank for dump in dumps}
    every = {rank for dump in dumps for call in dump.calls for rank in call.group.members}
    silent = tuple(sorted(every - there))
    if not silent:
        return []
    text = f"rank {ranges(silent)} has no dump, so nothing is known of its calls"
    return [Finding(FindingKind.SILENT_RANK, 0, text, silent)]
