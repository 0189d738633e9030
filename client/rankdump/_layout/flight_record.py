"""Dumps of torch's Flight Recorder (versions 2.x): the collectives and messages that one rank
called last, from the values in a dump. Pure.

    {prefix}{rank}     a pickle, as the watchdog of NCCL and `_dump_fr_trace` write it
    {name}{rank}.json  the same in JSON, of `_dump_fr_trace_json`, where 0 stands for no time

A dump is a ring, so the first calls of a job may be missing. `sequence` counts the collectives of a
group, and separately its messages; coalesced calls share one number. gloo does not report states,
so one of its calls counts as complete when it is retired.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from rankdump._core.events import EventKind
from rankdump._layout.foreign_calls import find_collective_kind, parse_extents
from rankdump.errors import CorruptedError

COMPLETED = "completed"
_VERSION = re.compile(r"2\.[0-9]{1,4}")
_MAX_RANKS = 1 << 20
_PICKLE_STARTS = tuple(b"\x80" + bytes([protocol]) for protocol in range(2, 6))
_MARKS = (b"pg_config", b"collective_seq_id", b"comm_lib_version", b"nccl_version")
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}
_MESSAGE_PEERS = re.compile(r"([0-9]{1,9})(->|<-)([0-9]{1,9})")
_UNDEFINED = ("undefined", "")


class FlightGroup(NamedTuple):
    """A process group in a dump."""

    name: str
    description: str
    """Name that the program gave the group; empty if it gave none."""
    members: tuple[int, ...]
    """Global ranks of the members; empty if the dump does not have them, as for gloo."""

    @property
    def label(self) -> str:
        """Name of the group in lists."""
        return self.description or f"group {self.name}"


@dataclass(frozen=True, slots=True)
class FlightCall:
    """One collective or message of a rank."""

    number: int
    """Number of the call on the rank, from 0, rising by one with each call."""
    group: FlightGroup
    sequence: int
    operation: str
    """Name of the operation without that of the library, such as `all_reduce`."""
    kind: EventKind
    """Kind of the operation; OPERATOR if it is not known."""
    sizes: tuple[tuple[int, ...], ...]
    """Shapes of the input tensors."""
    result_sizes: tuple[tuple[int, ...], ...]
    dtype: str
    state: str
    """State of the call: `scheduled`, `started` or `completed`."""
    created_us: int
    started_us: int | None
    completed_us: int | None
    duration_ms: float | None
    peers: tuple[int, int] | None
    """Sender and receiver of a message, as ranks within the group; None for a collective."""
    source: str
    """`file:line` of the innermost line outside of torch; empty if unknown."""

    @property
    def element_count(self) -> int:
        """Number of elements of the inputs, or of the results of a call without inputs."""
        return sum(map(math.prod, self.sizes or self.result_sizes))

    @property
    def op_type(self) -> str:
        """Operator type as in execution orders of rankdump, such as `AllReduce`."""
        return "".join(part.capitalize() for part in self.operation.strip("_").split("_"))

    @property
    def name(self) -> str:
        """Name of the call in an execution order, with group and number."""
        return f"{self.group.label}/{self.op_type}-op{self.sequence}"


@dataclass(frozen=True, slots=True)
class FlightDump:
    """The dump of one rank."""

    rank: int
    version: str
    calls: tuple[FlightCall, ...]
    """Calls in the order in which the rank made them."""

    @property
    def is_whole(self) -> bool:
        """Whether the ring still contains the first call of the rank."""
        return not self.calls or self.calls[0].number == 0


def is_flight_dump(start: bytes) -> bool:
    """Return whether a file with this beginning is a dump of the Flight Recorder."""
    if not start.startswith(_PICKLE_STARTS) and not start.lstrip().startswith(b"{"):
        return False
    return any(mark in start for mark in _MARKS)


def parse_flight_dump(body: object, rank: int) -> FlightDump:
    """Return the dump that plain values describe; CorruptedError for other values."""
    if not isinstance(body, dict):
        raise CorruptedError("not a dump of the Flight Recorder: it is no dictionary")
    values = cast("dict[str, Any]", body)
    version, entries = values.get("version"), values.get("entries", [])
    if not isinstance(version, str) or not _VERSION.fullmatch(version):
        raise CorruptedError(f"a dump of version {version!r:.40}; versions 2.x are read")
    if not isinstance(entries, list):
        raise CorruptedError("not a dump of the Flight Recorder: its entries are no list")
    config = values.get("pg_config")
    named = cast("dict[str, Any]", config) if isinstance(config, dict) else {}
    groups = {name: _parse_group(name, each) for name, each in named.items()}
    calls: list[FlightCall] = []
    for number, entry in enumerate(cast("list[Any]", entries)):
        try:
            calls.append(_parse_entry(entry, groups))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise CorruptedError(
                f"entry {number} is not one of the recorder: {error!r:.80}"
            ) from None
    return FlightDump(rank, version, tuple(sorted(calls, key=lambda call: call.number)))


def _parse_group(name: str, value: Any) -> FlightGroup:
    """Return a group; its members are given as a list, or as the text of one."""
    fields = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    ranks = fields.get("ranks")
    try:
        ranks = json.loads(ranks) if isinstance(ranks, str) else ranks
    except (ValueError, RecursionError):
        ranks = None
    members = parse_extents(ranks) or ()
    known = tuple(sorted(members)) if len(members) <= _MAX_RANKS else ()
    return FlightGroup(name, _describe(fields.get("desc")), known)


def _describe(text: object) -> str:
    return text if isinstance(text, str) and text not in _UNDEFINED else ""


def _parse_entry(entry: Any, groups: Mapping[str, FlightGroup]) -> FlightCall:
    name, description = entry["process_group"]
    group = groups.get(name) or FlightGroup(str(name), _describe(description), ())
    words = entry["profiling_name"].rpartition(":")[2].split()
    is_message = bool(entry.get("is_p2p"))
    sequence = entry["p2p_seq_id" if is_message else "collective_seq_id"]
    dtypes = entry.get("input_dtypes") or entry.get("output_dtypes") or [""]
    state = entry["state"]
    if entry.get("retired") and entry["profiling_name"].startswith("gloo:"):
        state = COMPLETED
    return FlightCall(
        number=_check_number(entry["record_id"]),
        group=group,
        sequence=_check_number(sequence),
        operation=words[0],
        kind=find_collective_kind(words[0]),
        sizes=_parse_sizes(entry.get("input_sizes")),
        result_sizes=_parse_sizes(entry.get("output_sizes")),
        dtype=_DTYPES.get(dtypes[0], str(dtypes[0]).lower()),
        state=str(state),
        created_us=_check_number(entry["time_created_ns"]) // 1000,
        started_us=_parse_time(entry.get("time_discovered_started_ns")),
        completed_us=_parse_time(entry.get("time_discovered_completed_ns")),
        duration_ms=_parse_duration(entry.get("duration_ms")),
        peers=_parse_peers(words[1:]),
        source=_find_source(entry.get("frames") or []),
    )


def _check_number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r:.40} is not a number of 0 or more")
    return value


def _parse_time(value: Any) -> int | None:
    """Return a time in microseconds; None if it is unknown."""
    return _check_number(value) // 1000 if value else None


def _parse_duration(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _parse_sizes(value: Any) -> tuple[tuple[int, ...], ...]:
    found: list[tuple[int, ...]] = []
    for each in value or ():
        extents = parse_extents(list(each))
        if extents is None:
            raise ValueError(f"size {each!r:.40}")
        found.append(extents)
    return tuple(found)


def _parse_peers(words: list[str]) -> tuple[int, int] | None:
    found = _MESSAGE_PEERS.fullmatch(words[0]) if words else None
    if found is None:
        return None
    first, second = int(found[1]), int(found[3])
    return (first, second) if found[2] == "->" else (second, first)


def _find_source(frames: list[Any]) -> str:
    """Return the innermost line outside of torch; `frames` begin with the innermost one."""
    for frame in frames:
        file, line = str(frame["filename"]), frame["line"]
        if "/torch/" not in file:
            return f"{file}:{line}"
    return ""
