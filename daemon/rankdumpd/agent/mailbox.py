"""What one stream has to tell its rank. Knows no gRPC."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

from rankdump.contract.errors import RankdumpError, UnavailableError
from rankdump.contract.exchange import Acknowledgement


class Mailbox:
    """What one stream has to tell its rank; filled by many threads, emptied by one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._acknowledged = 0
        self._draining = self._slab_ready = False
        self._warnings: list[str] = []
        self._last: int | None = None
        self._error: RankdumpError | None = None
        self.at_rest = False
        """Whether all that came was taken in, to the end of a record; its reader says so."""

    def acknowledge(self, sequence: int) -> None:
        """Tell that everything up to this number is accounted for."""
        with self._changed:
            self._acknowledged = max(self._acknowledged, sequence)
            self._changed.notify_all()

    def warn(self, text: str) -> None:
        """Let the rank say this in its log."""
        with self._changed:
            self._warnings.append(text)
            self._changed.notify_all()

    def drain(self) -> None:
        """Tell that the agent is about to stop."""
        with self._changed:
            self._draining = True
            self._changed.notify_all()

    def offer_slab(self) -> None:
        """Tell that shared memory is there for who opens the session again."""
        with self._changed:
            self._slab_ready = True
            self._changed.notify_all()

    def end(self, reason: str) -> None:
        """Break the stream off as something that may work later."""
        self.fail(UnavailableError(reason))

    def fail(self, error: RankdumpError) -> None:
        """Break the stream off; the first error counts."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def complete(self, last_sequence: int) -> None:
        """Let the stream end once this number is acknowledged: nothing more comes in."""
        with self._changed:
            self._last = last_sequence
            self._changed.notify_all()

    def answers(self) -> Iterator[Acknowledgement]:
        """Yield what there is to tell until the stream is complete; raise its error."""
        told = Acknowledgement(0)
        while True:
            with self._changed:
                self._changed.wait_for(lambda told=told: self._has_news(told))
                warnings, self._warnings = tuple(self._warnings), []
                news = self._news(warnings)
                error, complete = self._error, self._complete()
            if news != told:
                told = replace(news, warnings=())
                yield news
            elif error:
                raise error
            elif complete:
                return

    def _has_news(self, told: Acknowledgement) -> bool:
        news = self._news(tuple(self._warnings)) != told
        return news or self._error is not None or self._complete()

    def _news(self, warnings: tuple[str, ...]) -> Acknowledgement:
        return Acknowledgement(self._acknowledged, self._draining, warnings, self._slab_ready)

    def _complete(self) -> bool:
        return self._last is not None and self._acknowledged >= self._last
