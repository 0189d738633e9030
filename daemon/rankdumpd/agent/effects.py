"""What declarations bring about once everything before them is committed."""

from __future__ import annotations

import logging
import sqlite3

from rankdump.contract.events import EventColumns
from rankdump.contract.exchange import IterationEnd
from rankdump.contract.manifest import Manifest
from rankdump.contract.status import IterationStatus, RankEvents
from rankdumpd.agent import metadata
from rankdumpd.agent.ledger import Ledger
from rankdumpd.agent.report import Reporter
from rankdumpd.agent.sessions import Session
from rankdumpd.agent.values import Declared

_log = logging.getLogger(__name__)


class Effects:
    """Applies due declarations, in order; called from one thread at a time."""

    def __init__(self, ledger: Ledger, reporter: Reporter) -> None:
        self._ledger = ledger
        self._reporter = reporter

    def apply_due(self, session: Session) -> None:
        """Apply everything the watermark has passed, then acknowledge it."""
        while (declared := session.next_due()) is not None:
            self._apply(session, declared)
        session.acknowledge()

    def _apply(self, session: Session, declared: Declared) -> None:
        declaration = declared.declaration
        request = session.request
        if isinstance(declaration, EventColumns):
            session.program.take(declaration)
            self._reporter.events(RankEvents(request.job_id, request.rank), declaration)
        elif isinstance(declaration, IterationEnd):
            self._end_iteration(session, declared, declaration)
        else:
            session.say_goodbye(declaration)
            self._ledger.session_ended(declared.ticket, declaration)
            self._reporter.session(session.status(), str(session.tree.root))

    def _end_iteration(self, session: Session, declared: Declared, end: IterationEnd) -> None:
        status = session.end_iteration(end)
        try:
            self._describe(session, status, repeated=session.replayed(declared))
            session.program.ended(end.iteration)
            self._ledger.iteration_ended(declared.ticket, end, session.program.written)
        except (OSError, sqlite3.Error) as error:
            # Not marked as applied: the next start of the agent tries again.
            _log.exception("iteration %d of rank %d", end.iteration, status.rank)
            session.trouble(
                f"rank {status.rank}, iteration {end.iteration}: no manifest written: {error}"
            )
        self._reporter.iteration(status)

    def _describe(self, session: Session, status: IterationStatus, *, repeated: bool) -> None:
        request, tree, iteration = session.request, session.tree, status.iteration
        kept = self._ledger.kept(request.session_id, iteration)
        graphs = session.program.graphs(iteration) | {graph for graph, _ in kept}
        metadata.write_program_order(tree, request.rank, session.program.unwritten(iteration))
        metadata.append_iteration(tree, request.rank, graphs, iteration, repeated=repeated)
        metadata.write_manifest(
            tree,
            Manifest(
                status=status,
                world_size=request.world_size,
                device=request.device,
                host=request.host,
                records=tuple(record for _, record in kept),
            ),
        )
