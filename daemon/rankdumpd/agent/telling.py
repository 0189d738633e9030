"""What the coordinator hears of sessions, and what their ranks hear of it."""

from __future__ import annotations

from collections.abc import Callable

from rankdumpd.agent.ledger import Ledger
from rankdumpd.agent.registry import Registry
from rankdumpd.agent.report import Reporter
from rankdumpd.agent.sessions import Session


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

    def tell(self, session: Session) -> None:
        """Tell the coordinator how a session stands, and the session what its job should know."""
        self._reporter.session(session.status(), str(session.outlet.tree.root))
        told = self._reporter.warnings(session.request.job_id)
        for text in (*told, *self._limits(session)):
            session.warn(text)

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
