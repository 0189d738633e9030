"""Records are packed and written to a dump tree, linked to one of its files, or dropped with a
reason; and the index of duplicates by digest.

The table row of a record is formatted here and appended later, in the order of the frames. The
index removes its oldest files when it is full, and is empty after a restart; a tensor whose
original it has lost is written once more.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from rankdump._codec.file_codec import (
    CODECS,
    SMALL_FILE_BYTES,
    FileCodec,
    pack_file,
    pack_part,
    select_codec,
)
from rankdump._codec.zstd_frames import (
    STORED_HEAD_BYTES,
    ByteBuffer,
    compute_stored_bytes,
    is_stored_frame,
)
from rankdump._core.bounded_cache import look_up
from rankdump._core.log_once import LogOnce
from rankdump._core.record import TensorKey, TensorKind
from rankdump._core.session_protocol import RecordHead
from rankdump._layout.tree_layouts import Layout
from rankdump._layout.tree_paths import FilePlace, TreeContext
from rankdump.errors import CorruptedError
from rankdumpd.agent.records import (
    BaselineMatch,
    FileStamp,
    OperatorMembership,
    OriginalFile,
    ReceivedRecord,
    RecordOutcome,
    RecordStatus,
    format_member,
    make_drop_outcome,
)
from rankdumpd.agent.storage.baseline import BaselineIndex, TensorIdentity, make_identity
from rankdumpd.agent.storage.folders import OutsideRootError, release_open_folders
from rankdumpd.agent.storage.record_formats import encode_bin, encode_npy
from rankdumpd.agent.storage.statistic_tables import TableFormat
from rankdumpd.agent.storage.tree import DumpTree, MappingFiles

NAME_TAKEN = "name_taken"
"""Drop reason: another tensor of the dump has the same file name."""

_NO_DESCRIPTOR_ERRNOS = (errno.EMFILE, errno.ENFILE)
_REASONS = {
    errno.ENOSPC: "disk_full",
    errno.EDQUOT: "disk_full",
    **dict.fromkeys(_NO_DESCRIPTOR_ERRNOS, "no_descriptors"),
}

RESENT = "resent"
"""Reason for an unpacked file that an earlier process has written."""

_MAX_REMEMBERED_IDENTITIES = 1 << 14
_SUFFIXES = tuple({codec.suffix: None for codec in CODECS.values()})
PressureCheck: TypeAlias = "Callable[[ReceivedRecord], str]"
"""Function that returns why the file of a record should be packed later; empty to pack it now."""


def find_no_pressure(record: ReceivedRecord) -> str:
    """Return an empty text, because there is time to pack a file now."""
    return ""


_logger = logging.getLogger(__name__)


class _FileDraft(NamedTuple):
    """An examined record with the content of its file."""

    record: ReceivedRecord
    place: FilePlace
    parts: Sequence[ByteBuffer]
    membership: OperatorMembership | None
    plain: Sequence[ByteBuffer] = ()
    """Unpacked content of the file, if the file is packed or may be packed."""
    unpacked: str = ""
    """Why the file is stored unpacked; empty if it is not."""


class RecordWriter:
    """Writes the records of one session; safe to use from several threads."""

    def __init__(
        self,
        tree: DumpTree,
        names: MappingFiles,
        *,
        codec: FileCodec,
        layout: Layout,
        context: TreeContext,
        table_format: TableFormat,
        device_target: str,
        writes_npy: bool = True,
    ) -> None:
        """With `writes_npy`, each tensor gets a file of its own."""
        self._tree, self._names, self._codec = tree, names, codec
        self._layout, self._context, self._device_target = layout, context, device_target
        self._table_format = table_format
        self._shares_timestamps = layout.shares_timestamps
        self._writes_npy = writes_npy
        self._identities: dict[TensorKind, TensorIdentity] = {}
        self._log = LogOnce(_logger)

    def write(
        self,
        records: Sequence[ReceivedRecord],
        degraded: str = "",
        *,
        pressure: PressureCheck = find_no_pressure,
    ) -> list[RecordOutcome]:
        """Write the npy files of examined records; return each record as stored, dropped or
        `degraded`.

        Small files of one folder are written together. A large file is stored unpacked if its codec
        allows that and there is `pressure`. An existing file with the `parts`, or with the `plain`
        content, of a record counts as the file of that record.
        """
        outcomes = self._write_files([self._draft_file(each, pressure) for each in records])
        if not degraded:
            return outcomes
        return [
            each
            if each.status is RecordStatus.DROPPED
            else each._replace(status=RecordStatus.DEGRADED, reason=degraded)
            for each in outcomes
        ]

    def write_members(self, records: Sequence[ReceivedRecord]) -> list[RecordOutcome]:
        """Write examined records as `bin` files, to be joined into the files of their operators."""
        return self._write_files(list(map(self._draft_member, records)))

    def _draft_file(self, record: ReceivedRecord, pressure: PressureCheck) -> _FileDraft:
        """Return an examined record with the content of its npy file."""
        codec, plain = self._codec, encode_npy(record)
        may_wait = record.head.kind.byte_count > SMALL_FILE_BYTES and codec.is_deferrable
        cause = pressure(record) if may_wait else ""
        parts = pack_file(codec, plain, later=bool(cause))
        suffix = "" if parts is plain else codec.suffix
        key = self._make_key(record.head)
        return _FileDraft(
            record,
            self._layout.place_tensor(key, self._context, suffix),
            parts,
            self._find_membership(key),
            plain,
            cause if cause and is_stored_frame(parts[0]) else "",
        )

    def _draft_member(self, record: ReceivedRecord) -> _FileDraft:
        codec, context = self._codec, self._context
        header, elements = encode_bin(record, self._layout)
        head = pack_part(codec, header)
        key = self._make_key(record.head)
        membership = OperatorMembership(
            format_member(key.side, key.slot),
            self._layout.place_operator(key, context, codec.suffix),
            sum(map(len, head)),
        )
        place = self._layout.place_member(key, context, codec.suffix)
        return _FileDraft(record, place, (*head, *pack_part(codec, elements)), membership)

    def _write_files(self, files: Sequence[_FileDraft]) -> list[RecordOutcome]:
        made = self._put_files(files)
        lacking = [number for number, each in enumerate(made) if _has_no_descriptor(each)]
        if lacking and release_open_folders():
            again = self._put_files([files[number] for number in lacking])
            for number, each in zip(lacking, again, strict=True):
                made[number] = each
        return list(map(self._make_outcome, files, made))

    def _put_files(self, files: Sequence[_FileDraft]) -> list[FileStamp | OSError]:
        """Return the stamp of each written file, or the error that prevented it."""
        made: dict[int, FileStamp | OSError] = {}
        small: dict[str, list[int]] = {}
        for number, file in enumerate(files):
            if sum(map(len, file.parts)) <= SMALL_FILE_BYTES:
                small.setdefault(file.place.folder, []).append(number)
            else:
                made[number] = self._put_large(file)
        for folder, numbers in small.items():
            stamps = self._put_small(folder, [files[number] for number in numbers])
            made.update(zip(numbers, stamps, strict=True))
        return [made[number] for number in range(len(files))]

    def _put_small(self, folder: str, files: Sequence[_FileDraft]) -> Sequence[FileStamp | OSError]:
        if any(file.place.mapped_from for file in files):
            if len(files) > 1:
                return [self._put_small(folder, (file,))[0] for file in files]
            try:
                self._names.write_mapping(files[0].place)
            except OSError as error:
                return (error,)
        return self._tree.put_small_files(
            folder,
            [(_make_mark(f.record), f.place.name, b"".join(f.parts)) for f in files],
        )

    def _put_large(self, file: _FileDraft) -> FileStamp | OSError:
        place = file.place
        try:
            self._names.write_mapping(place)
            return self._tree.put(
                place.folder, place.name, file.parts, mark=_make_mark(file.record), replaces=False
            )
        except OSError as error:
            return error

    def _make_outcome(self, file: _FileDraft, made: FileStamp | OSError) -> RecordOutcome:
        record, place, parts, membership, plain, unpacked = file
        path, original = f"{place.folder}/{place.name}", None
        if isinstance(made, FileStamp):
            size, original = made.size_bytes, OriginalFile(path, made, unpacked)
        else:
            # An existing file may hold another tensor, because file names contain no session id.
            try:
                written = self._find_written(place, parts, plain)
            except OSError as error:
                # If the existing file cannot be read, it is not known whose file it is.
                return self._drop(record, error if isinstance(made, FileExistsError) else made)
            if written is None:
                return self._drop(record, made)
            size, unpacked = written
        # Arguments are passed by position, which is faster: this runs for each small record.
        return RecordOutcome(
            record.frame_id,
            record.head,
            RecordStatus.STORED,
            "",
            path,
            record.digest,
            size,
            self._table_format.format_record(record, place),
            original,
            membership,
            unpacked,
            record.fingerprint,
        )

    def _drop(self, record: ReceivedRecord, error: OSError) -> RecordOutcome:
        """Return a record as dropped, because its file could not be written."""
        is_taken = isinstance(error, FileExistsError)
        reason = NAME_TAKEN if is_taken else find_write_reason(error)
        what = (
            "has two tensors with one file name"
            if is_taken
            else f"drops records for the reason {reason}"
        )
        self._log_once(logging.ERROR, what, error, record)
        return make_drop_outcome(record.frame_id, record.head, reason)

    def has(self, head: RecordHead) -> bool:
        """Return whether the tree has a file with the name of a record, with any codec's suffix."""
        key, context = self._make_key(head), self._context
        places = [
            find_place(key, context, suffix)
            for find_place in (self._layout.place_tensor, self._layout.place_member)
            for suffix in _SUFFIXES
        ]
        try:
            return any(self._tree.has(place.folder, place.name) for place in places)
        except OSError:
            return False

    def link(self, record: ReceivedRecord, original: OriginalFile) -> RecordOutcome | None:
        """Return the record linked to a file with the same bytes; None where it cannot
        be linked.
        """
        key = self._make_key(record.head)
        place = self._layout.place_tensor(key, self._context, select_codec(original.path).suffix)
        if place.path == original.path:
            return None  # the record was resent, and the original is its own file
        try:
            self._names.write_mapping(place)
            self._tree.link(original, place.folder, place.name, mark=_make_mark(record))
        except FileExistsError:
            return None
        except OSError as error:
            self._log_once(
                logging.INFO, "writes copies because files cannot be linked", error, record
            )
            return None
        unpacked = original.unpacked
        return self._refer(record, key, place, RecordStatus.LINKED, unpacked=unpacked)

    def compare(self, record: ReceivedRecord, root: str, index: BaselineIndex) -> BaselineMatch:
        """Return the result of comparing an examined record with the baseline at a root."""
        head = record.head
        kind, folder = head.kind, self._layout.rank_folder(head.rank)
        identity = look_up(
            self._identities, kind, lambda: self._make_identity(head), _MAX_REMEMBERED_IDENTITIES
        )
        content = record.digest, kind.dtype, kind.shape
        return index.find_match(root, folder, head.iteration, identity, content)

    def _make_identity(self, head: RecordHead) -> TensorIdentity:
        kind, layout = head.kind, self._layout
        read = layout.make_readable_key(self._make_key(head), self._context)
        return make_identity(
            (read.net_name, read.graph, read.constant),
            (kind.op_type, kind.op_name, kind.argument),
            format_member(kind.side, kind.slot),
            (kind.microbatch, kind.phase),
            is_npy=self._writes_npy,
        )

    def refer(self, record: ReceivedRecord, match: BaselineMatch) -> RecordOutcome | None:
        """Return the record as the same as its counterpart in the baseline; None where it has to be
        stored.

        The path in the result is that of the file that the record would have got.
        """
        if match.file is None:
            return None
        key, context, layout = self._make_key(record.head), self._context, self._layout
        if self._writes_npy:
            place = layout.place_tensor(key, context, select_codec(match.file.path).suffix)
        else:
            place = layout.place_operator(key, context, self._codec.suffix)
        try:
            self._names.write_mapping(place)
        except OSError:
            return None  # storing the record will fail in the same way and count the error
        return self._refer(record, key, place, RecordStatus.SAME_AS_BASELINE, baseline=match)

    def _refer(
        self,
        record: ReceivedRecord,
        key: TensorKey,
        place: FilePlace,
        status: RecordStatus,
        *,
        unpacked: str = "",
        baseline: BaselineMatch | None = None,
    ) -> RecordOutcome:
        """Return the outcome of a record whose elements are in an existing file."""
        return RecordOutcome(
            record.frame_id,
            record.head,
            status,
            path=place.path,
            digest=record.digest,
            row=self._table_format.format_record(record, place),
            membership=self._find_membership(key),
            unpacked=unpacked,
            fingerprint=record.fingerprint,
            baseline=baseline,
        )

    def _make_key(self, head: RecordHead) -> TensorKey:
        """Return the key of a record, which has all values that its file name contains."""
        layout, kind = self._layout, head.kind
        # Arguments are passed by position, which is faster than `head.key`: this runs for each
        # record.
        return TensorKey(
            head.rank,
            kind.model,
            kind.graph,
            head.iteration,
            head.timestamp_us,
            kind.op_type,
            kind.op_name,
            kind.side,
            kind.slot,
            head.task,
            head.stream,
            layout.tensor_format(kind.shape),
            kind.constant,
            self._context.profile.make_element_token(kind.dtype, self._device_target),
            kind.argument if layout.api_files is not None else "",
        )

    def _find_membership(self, key: TensorKey) -> OperatorMembership | None:
        """Return the place of an npy file's tensor within its operator; None in layouts that do not
        need it.
        """
        if not self._shares_timestamps:
            return None
        return OperatorMembership(format_member(key.side, key.slot))

    def _find_written(
        self, place: FilePlace, parts: Sequence[ByteBuffer], plain: Sequence[ByteBuffer]
    ) -> tuple[int, str] | None:
        """Return the size of an existing file that holds exactly this record, because the record
        was resent, and why that file is unpacked. None if there is no such file; OSError when the
        disk fails.
        """
        try:
            size, start = self._tree.read_start(place.path, STORED_HEAD_BYTES)
            found = size, RESENT if is_stored_frame(start) else ""
            if self._tree.holds(place.folder, place.name, parts):
                return found
            # The file may have been packed since it was written, or not be packed yet.
            if not plain or size > compute_stored_bytes(map(len, plain)):
                return None
            data = self._tree.read(place.folder, place.name)
            content = self._codec.decode(data, limit_bytes=sum(map(len, plain)))
        except CorruptedError:
            return None
        except OSError as error:
            if error.errno == errno.EIO:
                raise
            return None
        return found if b"".join(plain) == content else None

    def _log_once(self, level: int, what: str, error: OSError, record: ReceivedRecord) -> None:
        session_id = record.frame_id.session_id
        message = f"session {session_id} {what}: {error}"
        self._log.log(level, message, about=what, extra={"session": session_id})


def _make_mark(record: ReceivedRecord) -> str:
    session_id, sequence = record.frame_id
    return f"{session_id}-{sequence}"


def find_write_reason(error: OSError) -> str:
    """Return the drop reason for an error of writing a file."""
    if isinstance(error, OutsideRootError):
        return "outside_root"
    return _REASONS.get(error.errno or 0, "write_error")


def _has_no_descriptor(made: FileStamp | OSError) -> bool:
    return isinstance(made, OSError) and made.errno in _NO_DESCRIPTOR_ERRNOS


MAX_ORIGINALS = 32_768
"""Largest number of files in the index: about 20 MB, of the 100 MB that an idle agent may take."""
MIN_LINKED_BYTES = 4096
"""Size in bytes below which a file is not linked: writing it costs as much as a link (15 us on
tmpfs), and a link would save hardly any space.
"""
_LOCK_COUNT = 1024


def is_linkable(kind: TensorKind) -> bool:
    """Return whether records of a kind may be linked to each other's files."""
    return kind.byte_count >= MIN_LINKED_BYTES


def make_content_key(digest: str, dtype: str, shape: tuple[int, ...], kind: str) -> str:
    """Return the key of a content among the files of a kind."""
    return f"{digest} {dtype} {shape} {kind}"


class DuplicateIndex:
    """Index of files in all trees that records can be linked to; safe to use from
    several threads.
    """

    def __init__(self, max_files: int = MAX_ORIGINALS) -> None:
        self._max_files = max_files
        self._known: OrderedDict[str, OriginalFile] = OrderedDict()
        self._lock = threading.Lock()
        self._key_locks = [threading.Lock() for _ in range(_LOCK_COUNT)]

    def __len__(self) -> int:
        return len(self._known)

    def link_or_write(
        self,
        record: ReceivedRecord,
        kind: str,
        *,
        link: Callable[[OriginalFile], RecordOutcome | None],
        write: Callable[[], RecordOutcome],
    ) -> RecordOutcome:
        """Return the record linked to an identical file of its kind; if there is none, written.

        `kind` names the tree and how files are stored in it. `link` returns None where linking
        fails.
        """
        about = record.head.kind
        key = make_content_key(record.digest, about.dtype, about.shape, kind)
        # An input often arrives right after the output that it equals. Waiting here takes no longer
        # than compressing the same bytes again.
        with self._key_locks[hash(key) % _LOCK_COUNT]:
            original = self.find(key)
            outcome = link(original) if original else None
            if outcome is None:
                outcome = write()
                if outcome.original:
                    self.remember(key, outcome.original)
            return outcome

    def find(self, key: str) -> OriginalFile | None:
        """Return the file with this content; None if the index has none."""
        with self._lock:
            found = self._known.get(key)
            if found:
                self._known.move_to_end(key)
            return found

    def remember(self, key: str, original: OriginalFile) -> None:
        """Enter a file, which later records with the same content are linked to."""
        with self._lock:
            self._known[key] = original
            self._known.move_to_end(key)
            if len(self._known) > self._max_files:
                self._known.popitem(last=False)
