"""What the coordinator hears of sessions, and what their ranks hear of it."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

from rankdumpd.agent.ledger import Ledger
from rankdumpd.agent.registry import Registry
from rankdumpd.agent.report import Reporter
from rankdumpd.agent.sessions import Session

MAX_SAID = 256
_FIGURE = re.compile(r"\d+(?:[.,]\d+)*")


class Telling:
    """Carries words between sessions and the reporter; safe to use from several threads."""

    def __init__(
        self,
        registry: Registry,
        ledger: Ledger,
        reporter: Reporter,
        limits: Callable[[Session], list[str]],
    ) -> None:
        """`limits` says why tensors of a session are refused at present."""
        self._registry, self._ledger, self._reporter = registry, ledger, reporter
        self._limits = limits
        self._lock = threading.Lock()
        self._said: dict[tuple[str, str], str] = {}

    def tell(self, session: Session) -> None:
        """Tell the coordinator how a session stands, and the session what its job should know."""
        self._reporter.session(session.status(), str(session.outlet.tree.root))
        job_id = session.request.job_id
        told = self._reporter.warnings(job_id)
        limits = (self._worded(job_id, text) for text in self._limits(session))
        for text in (*told, *limits):
            session.warn(text)

    def _worded(self, job_id: str, text: str) -> str:
        """Return a text as the job heard it first: its ranks say once what differs in figures."""
        with self._lock:
            said = self._said.setdefault((job_id, _FIGURE.sub("0", text)), text)
            for earliest in list(self._said)[: len(self._said) - MAX_SAID]:
                del self._said[earliest]
            return said

    def tell_again(self) -> None:
        """Tell everything to a coordinator that has forgotten it."""
        for session in self._registry.all():
            self.tell(session)
            self._ledger.log.tell_again(session.request.session_id)
        self._reporter.wake()

    def warn(self, job_id: str, text: str) -> None:
        """Have all ranks of a job say something."""
        for session in self._registry.all():
            if session.request.job_id == job_id:
                session.warn(text)
