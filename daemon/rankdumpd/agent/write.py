"""Encoded records to files of the tree, or to a drop with its reason; knows no gRPC.

A record's line of its table is made here, spelt like its file, and written later, in order.
"""

from __future__ import annotations

import errno
import logging
import threading

from rankdump.codec import CODECS, codec_of
from rankdump.contract.exchange import RecordHead
from rankdump.contract.key import TensorKey
from rankdump.contract.layout.layouts import Layout
from rankdump.contract.layout.place import Place, Stand
from rankdumpd.agent.folders import OutsideRootError
from rankdumpd.agent.lines import Lines
from rankdumpd.agent.members import Membership, member_text
from rankdumpd.agent.names import Names
from rankdumpd.agent.tree import Tree
from rankdumpd.agent.values import (
    Encoded,
    Examined,
    Fate,
    Original,
    Outcome,
    dropped,
)

NAME_TAKEN = "name_taken"
"""Another tensor of the dump has the name of its file."""

_REASONS = {
    errno.ENOSPC: "disk_full",
    errno.EDQUOT: "disk_full",
    errno.EMFILE: "no_descriptors",
    errno.ENFILE: "no_descriptors",
}

_SUFFIXES = tuple(codec.suffix for codec in CODECS.values())

_log = logging.getLogger(__name__)


class Writer:
    """Writes the records of one session; safe to use from several threads."""

    def __init__(
        self,
        tree: Tree,
        names: Names,
        *,
        layout: Layout,
        stand: Stand,
        lines: Lines,
        device_target: str,
    ) -> None:
        self._tree, self._names = tree, names
        self._layout, self._stand, self._device_target = layout, stand, device_target
        self._lines = lines
        self._lock = threading.Lock()
        self._logged: set[str] = set()

    def write(self, encoded: Encoded) -> Outcome:
        """Return the record stored under its place, or dropped with the disk's reason."""
        record = encoded.record
        key = self._key(record.head)
        place = self._place(key, encoded)
        try:
            self._names.note(place)
            parts, mark = encoded.parts, _mark(record)
            # What has the name already may be another tensor: no name says its session.
            stamp = self._tree.put(place.folder, place.name, parts, mark=mark, replaces=False)
        except FileExistsError as error:
            if not self._is_there(place, encoded):
                self._log_once(logging.ERROR, "gives two tensors one name", error, record)
                return dropped(record.ticket, record.head, NAME_TAKEN)
            stamp = None
        except OSError as error:
            if not self._is_there(place, encoded):
                reason = reason_of(error)
                self._log_once(logging.ERROR, f"drops records, reason {reason}", error, record)
                return dropped(record.ticket, record.head, reason)
            stamp = None
        return Outcome(
            record.ticket,
            record.head,
            Fate.STORED,
            path=place.path,
            digest=record.digest,
            bytes_stored=sum(map(len, encoded.parts)),
            row=self._lines.of_record(record, place),
            original=None if stamp is None else Original(place.path, stamp),
            membership=self._membership(key, encoded),
        )

    def has(self, head: RecordHead) -> bool:
        """Return whether something in the tree has the name of a record, in any form of it."""
        key, stand = self._key(head), self._stand
        places = [
            kind(key, stand, suffix)
            for kind in (self._layout.place_of, self._layout.member_place)
            for suffix in _SUFFIXES
        ]
        try:
            return any(self._tree.has(place.folder, place.name) for place in places)
        except OSError:
            return False

    def link(self, record: Examined, original: Original) -> Outcome | None:
        """Return the record linked to a file with its bytes; None where the disk will not."""
        key = self._key(record.head)
        place = self._layout.place_of(key, self._stand, codec_of(original.path).suffix)
        if place.path == original.path:
            return None  # sent again: its own file is no other's
        try:
            self._names.note(place)
            self._tree.link(original, place.folder, place.name, mark=_mark(record))
        except FileExistsError:
            return None
        except OSError as error:
            self._log_once(logging.INFO, "writes copies where it cannot link", error, record)
            return None
        return Outcome(
            record.ticket,
            record.head,
            Fate.LINKED,
            path=place.path,
            digest=record.digest,
            row=self._lines.of_record(record, place),
            membership=self._membership(key),
        )

    def _key(self, head: RecordHead) -> TensorKey:
        """Return a record's key with what its names say of the tensor beside."""
        element = self._stand.profile.element_of(head.kind.dtype, self._device_target)
        tensor_format = self._layout.tensor_format(head.kind.shape)
        argument = head.kind.argument if self._layout.api is not None else ""
        return head.key._replace(element=element, tensor_format=tensor_format, argument=argument)

    def _place(self, key: TensorKey, encoded: Encoded) -> Place:
        kind = self._layout.member_place if encoded.head_bytes else self._layout.place_of
        return kind(key, self._stand, encoded.suffix)

    def _membership(self, key: TensorKey, encoded: Encoded | None = None) -> Membership | None:
        if not self._layout.shares_stamps:
            return None
        member = member_text(key.side, key.slot)
        if encoded is None or not encoded.head_bytes:
            return Membership(member)
        whole = self._layout.operator_place(key, self._stand, encoded.suffix)
        return Membership(member, whole, encoded.head_bytes)

    def _is_there(self, place: Place, encoded: Encoded) -> bool:
        """Return whether a file is just this record, sent again or marked once more."""
        try:
            return self._tree.holds(place.folder, place.name, encoded.parts)
        except OSError:
            return False

    def _log_once(self, level: int, said: str, error: OSError, record: Examined) -> None:
        with self._lock:
            if said in self._logged:
                return
            self._logged.add(said)
        session_id = record.ticket.session_id
        _log.log(level, "session %s %s: %s", session_id, said, error, extra={"session": session_id})


def _mark(record: Examined) -> str:
    return f"{record.ticket.session_id}-{record.ticket.sequence}"


def reason_of(error: OSError) -> str:
    """Return the word under which a failed write is counted."""
    if isinstance(error, OutsideRootError):
        return "outside_root"
    return _REASONS.get(error.errno or 0, "write_error")
