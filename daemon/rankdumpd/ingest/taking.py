"""One file of the source to one file of the tree: settled, read, checked, then written or linked.

Runs on many threads at once; reading, packing and digests leave the interpreter to the others.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from rankdump.codec import Buffer, Codec, codec_of
from rankdump.codec.packing import KEPT_SHARE, Packed, pack
from rankdump.contract.errors import DamagedError
from rankdump.contract.layout.place import NAME_MAX_BYTES
from rankdumpd.agent.tree import Tree
from rankdumpd.agent.values import Original, Stamp
from rankdumpd.ingest.contents import examine
from rankdumpd.ingest.settled import leased, same_file
from rankdumpd.ingest.source import Source, stamp_of
from rankdumpd.ingest.values import Candidate, Content, Kind, Left, Taken, Why

MAPPED_BYTES = 32 << 20
"""Larger files are mapped, where a lease keeps others from cutting them off."""
LEAST_BYTES = 4096
"""Writing so little costs what a link does, and takes hardly any room."""
_TURNS = 256
_FRESH = 4096


class Taker:
    """Takes files into one tree; safe to use from several threads, each path on one at a time."""

    def __init__(
        self,
        source: Source,
        tree: Tree,
        codec: Codec,
        original: Callable[[str], Original | None],
        *,
        stored_as: str,
    ) -> None:
        """`original` names a file in the tree, by the digest under which it was taken.

        `stored_as` is part of that digest: what differs in it is not linked to each other.
        """
        self._source, self._tree, self._codec = source, tree, codec
        self._stored_as = stored_as
        self._original = original
        self._turns = [threading.Lock() for _ in range(_TURNS)]
        self._fresh: OrderedDict[str, Original] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, candidate: Candidate, before: Taken | None) -> Taken | Left:
        """Return the file as it stands in the tree now, or why it does not.

        `before` is what was taken of that path earlier.
        """
        path = candidate.path
        try:
            descriptor = self._source.open(path)
        except FileNotFoundError:
            return Left(path, Why.GONE)
        except OSError as error:
            return Left(path, Why.FAILED, f"cannot be opened: {error.strerror}")
        try:
            return self._settled(candidate, descriptor, before)
        except OSError as error:
            return Left(path, Why.FAILED, f"cannot be taken: {error.strerror}")
        finally:
            os.close(descriptor)

    def _settled(self, candidate: Candidate, descriptor: int, before: Taken | None) -> Taken | Left:
        path = candidate.path
        with leased(descriptor) as free:
            if free is False:
                return Left(path, Why.WRITTEN, "somebody has it open for writing")
            facts = os.fstat(descriptor)
            stamp = stamp_of(facts)
            if free is None and not (candidate.closed or candidate.aged):
                return Left(path, Why.YOUNG, stamp=stamp)
            data = _contents(descriptor, facts.st_size, mapped=bool(free))
            try:
                content = examine(path.rpartition("/")[2], memoryview(data))
            except DamagedError as error:
                return Left(path, Why.DAMAGED, str(error), stamp)
            if not same_file(descriptor, facts):
                return Left(path, Why.WRITTEN, "it changed while it was read", stamp)
            return self._kept(path, stamp, content, before)

    def _kept(
        self, path: str, stamp: Stamp, content: Content, before: Taken | None
    ) -> Taken | Left:
        digest = f"{content.digest} {content.kind.value} {self._stored_as}"
        if before and before.removed and before.digest.partition(" ")[0] != content.digest:
            return Left(path, Why.FAILED, "another file of that name was taken and removed", stamp)
        linkable = content.kind.tensors and stamp.size_bytes >= LEAST_BYTES
        with self._turns[hash(digest) % _TURNS]:
            original = self._known(digest) if linkable else None
            linked = self._link(path, original) if original else None
            stored = linked or self._write(path, content)
            if linkable and not linked:
                self._remember(digest, stored)
        return Taken(
            path=path,
            kind=content.kind,
            source=stamp,
            digest=digest,
            target=stored.path,
            stored=stored.stamp,
            linked=linked is not None,
            members=content.members,
        )

    def _link(self, path: str, original: Original) -> Original | None:
        folder, _, name = path.rpartition("/")
        target = path + codec_of(original.path).suffix if codec_of(path).suffix == "" else path
        name = target.rpartition("/")[2]
        if target == original.path or _too_long(name):
            return None  # taken again: its own file is no other's
        try:
            self._tree.link(original, folder, name, mark=mark_of(path))
        except OSError:
            return None  # changed since, or the disk will not: written once more
        return Original(target, original.stamp)

    def _write(self, path: str, content: Content) -> Original:
        folder, _, name = path.rpartition("/")
        packed = _packed(content, self._codec)
        if _too_long(name + packed.suffix):
            packed = Packed("", content.frames)
        name += packed.suffix
        stamp = self._tree.put(folder, name, packed.parts, mark=mark_of(path))
        return Original(path + packed.suffix, stamp)

    def _known(self, digest: str) -> Original | None:
        with self._lock:
            fresh = self._fresh.get(digest)
        return fresh or self._original(digest)

    def _remember(self, digest: str, original: Original) -> None:
        """Know a file until it is committed."""
        with self._lock:
            self._fresh[digest] = original
            self._fresh.move_to_end(digest)
            if len(self._fresh) > _FRESH:
                self._fresh.popitem(last=False)


def mark_of(path: str) -> str:
    """Return what names the hidden file that a path's copy grows in."""
    return f"ingest-{hashlib.blake2b(os.fsencode(path), digest_size=8).hexdigest()}"


def _contents(descriptor: int, size: int, *, mapped: bool) -> Buffer | mmap.mmap:
    if mapped and size > MAPPED_BYTES:
        return mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size and (count := os.preadv(descriptor, [view[at:]], at)):
        at += count
    return data[:at] if at < size else data


def _packed(content: Content, codec: Codec) -> Packed:
    """Return the bytes of the file in the tree."""
    frames = content.frames
    if content.kind in (Kind.PLAIN, Kind.PACKED) or not codec.suffix:
        return Packed("", frames)
    if len(frames) == 1:
        return pack(codec, frames)
    # Each payload of a bin file is packed for itself: it can be read alone then.
    parts: Sequence[Buffer] = [part for frame in frames for part in codec.encode((frame,))]
    pays = sum(map(len, parts)) <= KEPT_SHARE * sum(map(len, frames))
    return Packed(codec.suffix, parts) if pays else Packed("", frames)


def _too_long(name: str) -> bool:
    return len(os.fsencode(name)) > NAME_MAX_BYTES
