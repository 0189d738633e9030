"""Rings of all sessions: granted to ranks, restored after a restart, and read to the end when a
rank dies.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass

from rankdump._core.session_protocol import SlabPlace
from rankdump._core.status import SessionState
from rankdump._shm.slab_format import JOURNAL_SLAB_VERSION
from rankdump.errors import ExhaustedError, RankdumpError, UnavailableError
from rankdumpd.agent.session.rank_session import RankSession
from rankdumpd.agent.shm.ring_reader import FrameIntake, RingReader
from rankdumpd.agent.shm.slab_file import SlabFile, SlabMaker
from rankdumpd.agent.shm.slab_folder import SlabFolder
from rankdumpd.server.background_thread import BackgroundThread
from rankdumpd.server.logs import log_about

CHECK_INTERVAL_S = 0.25
SLAB_TIMEOUT_S = 2.0
"""Longest time in seconds that an answer waits for a slab; a slab that is ready later is offered on
the stream.
"""
_JOIN_TIMEOUT_S = 1.0
LOCK_TIMEOUT_S = 30.0
"""Seconds that a rank has to lock a slab it was granted."""

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _SessionRingEntry:
    """A session with its slab and the state of both."""

    session: RankSession
    ring: RingReader
    since_s: float
    mapped: bool = False
    """Whether a rank has ever used the slab."""
    read: bool = False
    """Whether everything that an exited rank left in the slab was read."""
    last_events_known: bool = False
    """Whether the newest events of an exited rank were read from its journal."""

    @property
    def unused(self) -> bool:
        """Whether no rank has ever used the slab: the answer that named it may not have arrived."""
        return not self.mapped and self.ring.unused


@dataclass(slots=True)
class _ExpectedSlab:
    """A session whose slab was not ready in time for an answer."""

    session: RankSession
    expected_s: float
    """Time at which the rank was last expected to reopen the session."""


class RingRegistry:
    """The rings of all sessions, at most one for each; a thread reads the rings of exited ranks."""

    def __init__(
        self,
        slabs: SlabFolder,
        *,
        intake: Callable[[RankSession], FrameIntake],
        live_sessions: Callable[[], int],
        changed: Callable[[RankSession], None],
    ) -> None:
        self._slabs, self._intake = slabs, intake
        self._live_sessions, self._changed = live_sessions, changed
        self._lock = threading.Lock()
        self._rings: dict[str, _SessionRingEntry] = {}
        self._maker = SlabMaker(slabs.remove)
        self._expected: dict[str, _ExpectedSlab] = {}
        self._checking = threading.Lock()
        self.thread = BackgroundThread(self._run, "rankdumpd-rings", daemon=False)

    def find_ring(self, session: RankSession) -> RingReader | None:
        """Return the ring of a session; None if it has no ring."""
        entry = self._rings.get(session.request.session_id)
        return entry.ring if entry else None

    def find_filled_share(self) -> float:
        """Return the filled share of the fullest ring, between 0 and 1."""
        return max((each.ring.filled_share for each in list(self._rings.values())), default=0.0)

    def count_unread(self) -> int:
        """Return how many exited ranks have frames in shared memory that are not read yet."""
        return sum(
            each.ring.filled_share > 0 and not each.session.live and not each.ring.slab.is_in_use()
            for each in list(self._rings.values())
        )

    def grant(self, session: RankSession) -> SlabPlace | None:
        """Return the slab that a session can continue with, or a new one.

        None when the session gets no slab, or when its slab is not ready yet; the session is
        notified on its stream when it is.
        """
        request = session.request
        entry = self._rings.get(request.session_id)
        if entry and request.wants_slab and (entry.ring.may_go_on or entry.unused):
            return entry.ring.slab.place
        if entry:
            self._drop(entry)
        if not request.wants_slab or not self._slabs.offered:
            return None
        slab = self._wait_for_slab(session)
        if slab is not None:
            self._add_ring(session, slab)
        # An earlier call may have created the slab, and its rank may have cancelled that call.
        entry = self._rings.get(request.session_id)
        return entry.ring.slab.place if entry else None

    def _wait_for_slab(self, session: RankSession) -> SlabFile | None:
        request = session.request
        try:
            slab = self._maker.wait_for_slab(
                request.session_id,
                lambda: self._slabs.make(
                    request.session_id,
                    wanted_bytes=session.plan.delivery.buffer_bytes,
                    sessions=self._live_sessions() + 1,
                    secret_hash=request.secret.hex(),
                    has_journal=request.slab_version >= JOURNAL_SLAB_VERSION,
                ),
                timeout_s=SLAB_TIMEOUT_S,
                late=lambda fault: (
                    _note_stream_only(session, fault) if fault else session.offer_slab()
                ),
            )
        except ExhaustedError as error:
            _note_stream_only(session, str(error))
            return None
        if slab is None:
            with self._lock:
                self._expected[request.session_id] = _ExpectedSlab(session, time.monotonic())
        return slab

    def restore_rings(self, sessions: Iterable[RankSession]) -> None:
        """Find the slabs of these sessions that an earlier process left."""
        for session in sessions:
            request, slab = session.request, None
            try:
                slab = self._slabs.find(request.session_id, secret_hash=request.secret.hex())
                if slab:
                    self._add_ring(session, slab)
            except RankdumpError as error:
                _note_lost_slab(session, error)
                if slab:
                    self._slabs.remove(request.session_id, slab)

    def drop_unused(self, session: RankSession) -> None:
        """Remove the slab of a rank that cannot map it, as frames on its stream show."""
        entry = self._rings.get(session.request.session_id)
        if entry and not entry.ring.slab.is_in_use():
            self._drop(entry)

    def stop(self) -> None:
        """Stop the thread; may be repeated."""
        self.thread.stop()
        self._slabs.stop()
        self._maker.join(_JOIN_TIMEOUT_S)

    def drop_closed(self, session: RankSession) -> None:
        """Remove the slab of a closed session whose stream has ended."""
        if session.closed and session.idle:
            self._maker.drop(session.request.session_id)
            entry = self._rings.get(session.request.session_id)
            if entry:
                self._drop(entry)

    def close(self) -> None:
        """Close all slabs; the files of slabs that may still be needed stay for the
        next process.
        """
        for session_id in self._maker.sessions():
            self._maker.drop(session_id)
        for entry in list(self._rings.values()):
            self.drop_closed(entry.session)
            entry.ring.slab.close()
        self._slabs.leave()

    def check_rings(self) -> None:
        """Read what exited ranks left, and remove slabs that are not needed any more."""
        with self._checking:
            self._drop_unwanted()
            for entry in list(self._rings.values()):
                try:
                    self._check_entry(entry)
                except UnavailableError:
                    return
                except Exception:
                    request = entry.session.request
                    log_about(_logger, request).exception(
                        "checking the slab of session %s failed", request.session_id
                    )

    def _run(self) -> None:
        while not self.thread.wait(CHECK_INTERVAL_S):
            self.check_rings()

    def _drop_unwanted(self) -> None:
        """Remove slabs that were made for ranks that did not fetch them."""
        now_s, expected = time.monotonic(), list(self._expected.items())
        making = set(self._maker.sessions())
        for session_id, each in expected:
            session = each.session
            if session.status().state is SessionState.OPEN:
                each.expected_s = now_s
            elif session.closed or now_s - each.expected_s > LOCK_TIMEOUT_S:
                self._maker.drop(session_id)
            if session_id not in making:
                with self._lock:
                    self._expected.pop(session_id, None)

    def _check_entry(self, entry: _SessionRingEntry) -> None:
        session = entry.session
        if self._rings.get(session.request.session_id) is not entry:
            return
        in_use = entry.ring.slab.is_in_use()
        entry.mapped = entry.mapped or in_use or entry.ring.begun
        if session.live:
            return
        was_used = entry.mapped or time.monotonic() - entry.since_s > LOCK_TIMEOUT_S
        if was_used and not entry.read and not session.closed and not in_use:
            self._read_remains(entry)
        if session.idle and (entry.read or session.closed):
            self._drop(entry)
            if entry.last_events_known and not session.closed:
                # Done last, because the report of this state must follow the report of the events.
                session.confirm_last_events()
                self._changed(session)

    def _read_remains(self, entry: _SessionRingEntry) -> None:
        session = entry.session
        request = session.request
        log_about(_logger, request).info(
            "rank %d has exited: reading the rest of its slab", request.rank
        )
        with _noting_losses(session):
            entry.ring.read_remains()
        with _noting_losses(session):
            entry.last_events_known = entry.ring.read_journal()
        entry.read = True
        session.mark_lost()
        self._changed(session)

    def _add_ring(self, session: RankSession, slab: SlabFile) -> None:
        ring = RingReader(
            slab,
            self._intake(session),
            acknowledged=session.acknowledged,
            add_finding=lambda finding: session.add_finding(
                f"rank {session.request.rank}: {finding}"
            ),
        )
        with self._lock:
            self._rings[session.request.session_id] = _SessionRingEntry(
                session, ring, time.monotonic()
            )
        session.attach_ring(ring)

    def _drop(self, entry: _SessionRingEntry) -> None:
        session_id = entry.session.request.session_id
        with self._lock:
            if self._rings.get(session_id) is not entry:
                return
            del self._rings[session_id]
        entry.session.attach_ring(None)
        entry.ring.give_up()
        self._slabs.remove(session_id, entry.ring.slab)


def _note_stream_only(session: RankSession, fault: str) -> None:
    session.add_finding(
        f"rank {session.request.rank}: its frames are sent on the stream "
        f"instead of shared memory: {fault}"
    )


@contextmanager
def _noting_losses(session: RankSession) -> Generator[None]:
    """Add a finding for what cannot be read of a slab; UnavailableError if it can be read later."""
    try:
        yield
    except UnavailableError:
        raise
    except RankdumpError as error:
        _note_lost_slab(session, error)


def _note_lost_slab(session: RankSession, error: RankdumpError) -> None:
    sentence = f"rank {session.request.rank}: the rest of its slab is lost: {error}"
    log_about(_logger, session.request).warning(sentence)
    session.add_finding(sentence)
