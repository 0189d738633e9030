"""The frozen values that the rooms of the agent hand to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from rankdump.codec import Buffer
from rankdump.contract.exchange import Declaration, RecordHead, SessionRequest
from rankdump.contract.figure_rows import FigureRows
from rankdump.contract.layout.place import Place
from rankdump.contract.manifest import ManifestRecord
from rankdump.contract.status import SessionState
from rankdumpd.agent.elements import Elements
from rankdumpd.agent.members import Membership


@dataclass(frozen=True, slots=True)
class Ticket:
    """Identity of one frame, for ever: sending it again changes nothing."""

    session_id: str
    sequence: int


@dataclass(frozen=True, slots=True)
class Parcel:
    """A record that arrived whole."""

    ticket: Ticket
    head: RecordHead
    data: Elements
    """In C order, little endian; readable as long as the parcel is not committed."""
    checksum: bytes = b""
    """xxh3-128 of the elements as the rank sent them; empty when it did not say."""


@dataclass(frozen=True, slots=True)
class Examined:
    """A record and what its elements say of it."""

    ticket: Ticket
    head: RecordHead
    digest: str
    """xxh3-128 of the elements as they arrived, hexadecimal."""
    figures: tuple[str, ...] | None = None
    """Texts of its row in `statistic.csv`; None when it has no row."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A record as its file will hold it."""

    record: Examined
    suffix: str
    """What is appended to its name: nothing where the codec would not have saved enough."""
    parts: Sequence[Buffer]
    head_bytes: int = 0
    """Bytes before the elements, of a `bin` file."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """What tells a file that was written from any that took its place or was changed since."""

    inode: int
    size_bytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class Original:
    """A whole file of a tree, which others may be linked to."""

    path: str
    """Relative to the root of the tree."""
    stamp: Stamp


@dataclass(frozen=True, slots=True)
class TableRow:
    """One line of a table of figures."""

    table: Place
    text: str
    """The line, without its end."""


class Fate(str, Enum):
    """What became of a record; the value is the word in the ledger."""

    STORED = "stored"
    LINKED = "linked"
    DEGRADED = "degraded"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A record's end; `reason` is empty unless it was dropped."""

    ticket: Ticket
    head: RecordHead
    fate: Fate
    reason: str = ""
    path: str = ""
    """Relative to the root of the tree; empty when there is no file of its own."""
    digest: str = ""
    bytes_stored: int = 0
    """Room that its file took; nothing for a link."""
    row: TableRow | None = None
    original: Original | None = None
    """The file that was written for it."""
    membership: Membership | None = None
    """None where its path and its time stamp are its own."""


@dataclass(frozen=True, slots=True)
class Declared:
    """A numbered frame that is neither a record nor rows of figures."""

    ticket: Ticket
    declaration: Declaration
    raw: bytes
    """The frame as it came, for the ledger."""


Refused: TypeAlias = "Mapping[str, Sequence[int]]"
"""Places of the rows of a frame that are dropped, by reason."""


@dataclass(frozen=True, slots=True)
class Judged:
    """Rows of figures, and which of them are not kept."""

    ticket: Ticket
    rows: FigureRows
    refused: Refused
    raw: bytes
    """The frame as it came, for the ledger."""

    @property
    def fate(self) -> Fate:
        """What becomes of the rows that are kept."""
        return Fate.DEGRADED if self.rows.degraded else Fate.STORED

    @property
    def kept(self) -> int:
        """How many rows are kept."""
        return len(self.rows) - sum(map(len, self.refused.values()))


@dataclass(frozen=True, slots=True)
class KeptRecord:
    """A record that is in the tree, as the ledger gives it back."""

    sequence: int
    graph: int
    record: ManifestRecord


@dataclass(frozen=True, slots=True)
class KeptRow:
    """A record's row in its table, as the ledger gives it back."""

    sequence: int
    row: TableRow


@dataclass(frozen=True, slots=True)
class KeptFrame:
    """Rows of figures as the ledger gives them back."""

    sequence: int
    raw: bytes
    refused: Refused


def dropped(ticket: Ticket, head: RecordHead, reason: str) -> Outcome:
    """Return the outcome of a record that is not in the tree."""
    return Outcome(ticket, head, Fate.DROPPED, reason)


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session as the ledger knows it."""

    request: SessionRequest
    state: SessionState
    watermark: int
    """Every frame up to this number is committed; more may be."""
    iterations_seen: int
    notes: tuple[str, ...]
    ordered_graphs: tuple[int, ...]
    """Graphs whose program order is in the tree."""


@dataclass(frozen=True, slots=True)
class CountRow:
    """Committed records of one iteration that ended the same way."""

    iteration: int
    fate: Fate
    reason: str
    records: int
    bytes_in: int
    bytes_stored: int


@dataclass(frozen=True, slots=True)
class EndRow:
    """What a rank declared at the end of an iteration."""

    iteration: int
    expected: int
    dropped: Mapping[str, int]
    stall_us: int = 0
    first_position: int = 0
    last_position: int = 0


@dataclass(frozen=True, slots=True)
class QuietRank:
    """A session all of whose frames that came are committed."""

    job_id: str
    rank: int
    session_id: str
    watermark: int
    """Number of the last one."""


class ItemKind(str, Enum):
    """What an item of the log says; the value is the word in the ledger."""

    SESSION = "session"
    TIMEOUTS = "timeouts"
    EVENTS = "events"
    BALANCE = "balance"


@dataclass(frozen=True, slots=True)
class LogItem:
    """Something the coordinator is told, under a number that it keeps for ever."""

    number: int
    kind: ItemKind
    session_id: str
    job_id: str
    rank: int
    events: int
    """How many it holds."""
    body: bytes
    """The frame as the rank sent it; of sessions and balances their JSON."""


@dataclass(frozen=True, slots=True)
class Ended:
    """An iteration of a job, over for all of its ranks that are here."""

    job_id: str
    iteration: int
    ended_us: int
    """Since the epoch, when the last of them ended it."""


@dataclass(frozen=True, slots=True)
class Retiring:
    """A rank's part of an iteration that is removed."""

    session_id: str
    iteration: int
    byte_count: int
    """Room that its files leave: those with other names leave none."""
    began_us: int
    about: Mapping[str, object]
    """Its `job` and `rank`, and `why` it is removed."""
