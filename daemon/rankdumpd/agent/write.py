"""Encoded records to files of the tree, or to a drop with its reason; knows no gRPC.

A record's row of `statistic.csv` is made here, spelt like its file, and written later, in order.
"""

from __future__ import annotations

import errno
import logging
import threading
from dataclasses import replace

from rankdump.contract.layout import mindspore_sync as layout
from rankdump.contract.layout import statistic_csv
from rankdump.contract.layout.mindspore_sync import Place
from rankdump.contract.layout.profile import DEFAULT_PROFILE, Profile
from rankdumpd.agent.tree import OutsideRootError, Tree
from rankdumpd.agent.values import Encoded, Fate, Outcome, TableRow, dropped

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
        ticket, head = encoded.ticket, encoded.head
        try:
            path = self._put(encoded) if head.figures is None else ""
        except OSError as error:
            reason = reason_of(error)
            self._log_once(reason, error, ticket.session_id)
            return dropped(ticket, head, reason)
        return Outcome(
            ticket,
            head,
            Fate.STORED,
            path=path,
            digest=encoded.digest,
            bytes_stored=encoded.bytes_stored,
            row=self._row(encoded),
        )

    def _put(self, encoded: Encoded) -> str:
        ticket, head = encoded.ticket, encoded.head
        element = self._profile.element_of(head.dtype, self._device_target)
        key = replace(head.key, element=element)
        place = layout.place_of(key, encoded.suffix, self._profile)
        if place.mapped_from:
            self._map(place)
        mark = f"{ticket.session_id}-{ticket.sequence}"
        self._tree.put(place.folder, place.name, encoded.parts, mark=mark)
        return place.path

    def _row(self, encoded: Encoded) -> TableRow | None:
        if encoded.figures is None:
            return None
        text = statistic_csv.row(encoded.head, encoded.figures, self._profile)
        return TableRow(layout.tensor_folder(encoded.head.key), text)

    def _map(self, place: Place) -> None:
        # Under the lock as a whole: two tensors of a name must not both add its line.
        with self._lock:
            if place.folder not in self._mapped:
                if len(self._mapped) >= _MAX_MAPPED_FOLDERS:
                    self._mapped.clear()
                lines = self._tree.lines(place.folder, layout.MAPPING_FILE)
                self._mapped[place.folder] = {line.partition(",")[0] for line in lines}
            names = self._mapped[place.folder]
            if place.name not in names:
                line = f"{place.name},{place.mapped_from}"
                self._tree.append_lines(place.folder, layout.MAPPING_FILE, (line,))
                names.add(place.name)

    def _log_once(self, reason: str, error: OSError, session_id: str) -> None:
        with self._lock:
            if reason in self._logged:
                return
            self._logged.add(reason)
        _log.error("session %s drops records, reason %s: %s", session_id, reason, error)


def reason_of(error: OSError) -> str:
    """Return the word under which a failed write is counted."""
    if isinstance(error, OutsideRootError):
        return "outside_root"
    return "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "write_error"
