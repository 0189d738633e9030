"""Start, readiness, reloads and stop of a daemon process; knows no room by name."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from rankdump.contract.errors import ConfigError
from rankdumpd.leash import Leash
from rankdumpd.notify import Notifier
from rankdumpd.required_files import RequiredFiles
from rankdumpd.settings import Settings
from rankdumpd.settings.live import adopt
from rankdumpd.signals import Signals, Wish

_log = logging.getLogger(__name__)
_GRACE_S = 1.0
_USE_POLL_S = 0.2
_LOOK_S = 2.0
"""Longest until a process sees that its files were taken away."""
_START_S = 3600.0
"""Longest start for which the service manager is asked to wait."""
_EXIT_FAILED = 1

Reread = Callable[[Mapping[str, str]], Settings]
"""Reads the settings again, with an environment; ConfigError when they cannot be."""


class Room(Protocol):
    """A part of the process with a life of its own."""

    leave_s = 6.0
    """Seconds beyond the deadline of a drain in which `stop` is over, unless a disk hangs."""

    def start(self) -> None:
        """Begin to work."""
        ...

    def drain(self, timeout_s: float) -> int:
        """Take nothing new, finish what is there; return how much is left at the deadline."""
        ...

    def stop(self) -> None:
        """End at once; may be repeated, and called without `start`."""
        ...

    def reload(self, settings: Settings) -> None:
        """Take over those settings that may change while it works."""

    def fault(self) -> str:
        """Say which part of it has died, which only another process can mend; a disk that hangs
        is none.
        """
        return ""

    def brief(self) -> str:
        """Say how it stands in a few words with numbers, at once."""
        return ""


class Door(Protocol):
    """What lets the world in: the gRPC server."""

    def start(self) -> str:
        """Bind and serve; return the address."""
        ...

    def refuse(self) -> None:
        """Say in health checks that the end is near."""
        ...

    def show(self, *, well: bool) -> None:
        """Say in health checks how it stands; calls work all the same."""
        ...

    def stop(self, grace_s: float) -> None:
        """End all calls."""
        ...


def run(
    rooms: Sequence[Room],
    server: Door,
    *,
    settings: Settings,
    reread: Reread,
    leash: Leash | None = None,
    required: RequiredFiles | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, then drain; return the exit status of the process.

    Rooms are listed in the order in which tensors pass through them. A leash asks as well. SIGHUP
    reads the settings again. What is missing of `required` is said within seconds. A stop that a
    disk holds up ends the process with status 1.
    """
    life = _Life(rooms, server, settings, reread, leash)
    life.required = required or life.required
    try:
        life.start()
        life.serve()
    except BaseException:
        life.end(drains=False)
        raise
    return life.end(drains=True)


def stop_at_end_of(descriptor: int, *, still_used: Callable[[], bool] = lambda: False) -> None:
    """Ask this process to stop when that file has ended and it is no longer used.

    The end means that who started the process is gone, however that ended.
    """

    def wait() -> None:
        # Not through a buffered file: its lock, held by this thread, would abort the exit.
        while os.read(descriptor, 4096):
            pass
        while still_used():
            time.sleep(_USE_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="rankdumpd-lifeline", daemon=True).start()


class _Life:
    """One process from start to end."""

    def __init__(
        self,
        rooms: Sequence[Room],
        server: Door,
        settings: Settings,
        reread: Reread,
        leash: Leash | None,
    ) -> None:
        self._rooms, self._server = rooms, server
        self._settings, self._reread, self._leash = settings, reread, leash
        self._environ: Mapping[str, str] = os.environ
        self._notifier = Notifier(os.environ)
        self._signals = Signals(reloads=True)
        self._started: list[Room] = []
        self._failed = False
        self._fault = ""
        self._gone: tuple[str, ...] = ()
        self.required = RequiredFiles()
        """Files without which it is not well."""

    def start(self) -> None:
        """Start everything, the last room first, then let the world in."""
        if self._leash:
            self._leash.follow(self._signals.ask, self._given)
        with self._notifier.busy(_START_S, unless=lambda: self._signals.stopping):
            for room in reversed(self._rooms):
                self._started.insert(0, room)
                room.start()
            address = self._server.start()
        _log.info("listening on %s", address)
        self._notifier.ready(self._brief())
        if self._leash:
            self._leash.ready(address)

    def serve(self) -> None:
        """Wait for the wish to stop; meanwhile reload, and say that all is well."""
        tick_s = min(self._notifier.tick_s, _LOOK_S)
        while (wish := self._signals.wait(tick_s)) is not Wish.STOP:
            self._look()
            if wish is Wish.RELOAD:
                self._reload()
            elif not self._ill():
                self._notifier.alive(self._brief())

    def end(self, *, drains: bool) -> int:
        """Drain and stop, or only stop; return the exit status. Leave where that does not end."""
        limit_s = max(room.leave_s for room in self._rooms)
        limit_s += self._settings.agent.drain_timeout_s if drains else 0.0
        thread = threading.Thread(
            target=self._drain_and_stop, args=(drains,), name="rankdumpd-end", daemon=True
        )
        with self._notifier.busy(limit_s):
            thread.start()
            thread.join(limit_s)
        hangs = [t.name for t in threading.enumerate() if t is thread or _keeps_process(t)]
        if hangs:
            _log.error(
                "the stop does not end, for a disk or a call hangs (%s): %s; what was not "
                "acknowledged is sent again",
                ", ".join(hangs),
                self._brief() or "nothing is known of what is left",
            )
            os._exit(_EXIT_FAILED)
        self._signals.close()
        if drains:
            _log.info("stopped")
        return _EXIT_FAILED if self._failed else 0

    def _drain_and_stop(self, drains: bool) -> None:
        try:
            if drains:
                self._notifier.stopping(self._brief())
                self._server.refuse()
                left = self._drain()
                self._notifier.status(f"drained, {left} items are left")
                if self._leash:
                    self._leash.left(left)
        except Exception:
            self._failed = True
            _log.exception("the drain failed")
        try:
            self._server.stop(_GRACE_S)
            for room in self._started:
                room.stop()
        except Exception:
            self._failed = True
            _log.exception("the stop failed")

    def _drain(self) -> int:
        timeout_s = self._settings.agent.drain_timeout_s
        deadline = time.monotonic() + timeout_s
        unfinished = 0
        for room in self._rooms:
            begun = time.monotonic()
            left = room.drain(max(0.0, deadline - begun))
            unfinished += left
            if left:
                _log.error(
                    "%s: %d items unfinished after %.1f s; what was not acknowledged is sent again",
                    type(room).__name__,
                    left,
                    time.monotonic() - begun,
                )
        return unfinished

    def _given(self, environ: Mapping[str, str]) -> None:
        """Take note of new settings that came on the leash."""
        self._environ = environ
        self._signals.ask(Wish.RELOAD)

    def _reload(self) -> None:
        self._notifier.reloading()
        try:
            news = adopt(self._settings, self._reread(self._environ))
        except ConfigError as error:
            _log.error("the settings stay as they are: %s", error)
        else:
            self._settings = news.settings
            logging.getLogger().setLevel(news.settings.log.level.upper())
            for room in self._rooms:
                room.reload(news.settings)
            _log.info("settings were read again; changed: %s", ", ".join(news.changed) or "none")
            if news.waiting:
                _log.warning("only a new start changes %s", ", ".join(news.waiting))
        self._notifier.ready(self._brief())

    def _look(self) -> None:
        """Say what somebody took away. It is no fault: a new process would know less than this."""
        gone = self.required.look()
        for sentence in gone:
            if sentence not in self._gone:
                _log.error(sentence)
        if bool(gone) is not bool(self._gone):
            self._server.show(well=not gone)
        self._gone = gone

    def _ill(self) -> bool:
        """Return whether a room has died; a worker ends then, and its front starts another."""
        faults = [f"{type(r).__name__}: {fault}" for r in self._rooms if (fault := r.fault())]
        said = "; ".join(faults)
        if said and said != self._fault:
            _log.error("%s; only a new process can mend that", said)
            self._notifier.status(said)
        self._fault = said
        if said and self._leash:
            os._exit(_EXIT_FAILED)
        return bool(said)

    def _brief(self) -> str:
        return "; ".join(filter(None, (*self._gone, *(room.brief() for room in self._rooms))))


def _keeps_process(thread: threading.Thread) -> bool:
    """Return whether the interpreter would wait for a thread of ours at its end."""
    return not thread.daemon and thread.name.startswith("rankdumpd")
