"""Encoded records to files of the tree, or to a drop with its reason; knows no gRPC.

A record's row of `statistic.csv` is made here, spelt like its file, and written later, in order.
"""

from __future__ import annotations

import errno
import logging
import threading
from dataclasses import replace

from rankdump.codec import codec_of
from rankdump.contract.exchange import RecordHead
from rankdump.contract.layout import mindspore_sync as layout
from rankdump.contract.layout import statistic_csv
from rankdump.contract.layout.place import MAPPING_FILE, Place
from rankdump.contract.layout.profile import DEFAULT_PROFILE, Profile
from rankdumpd.agent.tree import OutsideRootError, Tree
from rankdumpd.agent.values import (
    Encoded,
    Examined,
    Fate,
    Original,
    Outcome,
    TableRow,
    dropped,
)

_MAX_MAPPED_FOLDERS = 64

_log = logging.getLogger(__name__)


class Writer:
    """Writes the records of one session; safe to use from several threads."""

    def __init__(
        self, tree: Tree, *, profile: Profile = DEFAULT_PROFILE, device_target: str = "CPU"
    ) -> None:
        self._tree = tree
        self._profile, self._device_target = profile, device_target
        self._lock = threading.Lock()
        self._mapped: dict[str, set[str]] = {}
        self._logged: set[str] = set()

    def write(self, encoded: Encoded) -> Outcome:
        """Return the record stored under its place, or dropped with the disk's reason."""
        record = encoded.record
        try:
            original = self._put(encoded)
        except OSError as error:
            reason = reason_of(error)
            self._log_once(logging.ERROR, f"drops records, reason {reason}", error, record)
            return dropped(record.ticket, record.head, reason)
        return Outcome(
            record.ticket,
            record.head,
            Fate.STORED,
            path=original.path,
            digest=record.digest,
            bytes_stored=original.stamp.size_bytes,
            row=self._row(record),
            original=original,
        )

    def link(self, record: Examined, original: Original) -> Outcome | None:
        """Return the record linked to a file with its bytes; None where the disk will not."""
        place = self._place(record.head, codec_of(original.path).suffix)
        if place.path == original.path:
            return None  # sent again: its own file is no other's
        try:
            self._map(place)
            self._tree.link(original, place.folder, place.name, mark=_mark(record))
        except OSError as error:
            self._log_once(logging.INFO, "writes copies where it cannot link", error, record)
            return None
        return Outcome(
            record.ticket,
            record.head,
            Fate.LINKED,
            path=place.path,
            digest=record.digest,
            row=self._row(record),
        )

    def _put(self, encoded: Encoded) -> Original:
        place = self._place(encoded.record.head, encoded.suffix)
        self._map(place)
        stamp = self._tree.put(place.folder, place.name, encoded.parts, mark=_mark(encoded.record))
        return Original(place.path, stamp)

    def _place(self, head: RecordHead, suffix: str) -> Place:
        element = self._profile.element_of(head.dtype, self._device_target)
        key = head.key if head.key.element == element else replace(head.key, element=element)
        return layout.place_of(key, suffix, self._profile)

    def _row(self, record: Examined) -> TableRow | None:
        if record.figures is None:
            return None
        text = statistic_csv.row(record.head, record.figures, self._profile)
        return TableRow(layout.tensor_folder(record.head.key), text)

    def _map(self, place: Place) -> None:
        if not place.mapped_from:
            return
        # Under the lock as a whole: two tensors of a name must not both add its line.
        with self._lock:
            if place.folder not in self._mapped:
                if len(self._mapped) >= _MAX_MAPPED_FOLDERS:
                    self._mapped.clear()
                lines = self._tree.lines(place.folder, MAPPING_FILE)
                self._mapped[place.folder] = {line.partition(",")[0] for line in lines}
            names = self._mapped[place.folder]
            if place.name not in names:
                line = f"{place.name},{place.mapped_from}"
                self._tree.append_lines(place.folder, MAPPING_FILE, (line,))
                names.add(place.name)

    def _log_once(self, level: int, said: str, error: OSError, record: Examined) -> None:
        with self._lock:
            if said in self._logged:
                return
            self._logged.add(said)
        _log.log(level, "session %s %s: %s", record.ticket.session_id, said, error)


def _mark(record: Examined) -> str:
    return f"{record.ticket.session_id}-{record.ticket.sequence}"


def reason_of(error: OSError) -> str:
    """Return the word under which a failed write is counted."""
    if isinstance(error, OutsideRootError):
        return "outside_root"
    return "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "write_error"
