"""What committed frames bring about: rows of tables at once, declarations in their order."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable

from rankdump.contract.events import EventColumns
from rankdump.contract.exchange import CallStacks, IterationEnd, KernelArguments, SessionEnd
from rankdump.contract.graph import Graph, GraphPart
from rankdump.contract.layout.place import NAME_MAX_BYTES
from rankdump.contract.manifest import Manifest, ManifestSession
from rankdump.contract.plan import UNNAMED
from rankdump.contract.status import IterationStatus
from rankdump.contract.timeouts import Timeouts
from rankdumpd.agent import metadata
from rankdumpd.agent.draw import drawings
from rankdumpd.agent.effects.joined import Joining
from rankdumpd.agent.effects.kept import manifest_records, rows_of_tables
from rankdumpd.agent.ledger import Ledger
from rankdumpd.agent.report import Reporter
from rankdumpd.agent.sessions import Session
from rankdumpd.agent.tabulate import Tables
from rankdumpd.agent.values import Declared, Ticket

_log = logging.getLogger(__name__)


class Effects:
    """Applies due declarations, in order; called from one thread at a time."""

    def __init__(self, ledger: Ledger, reporter: Reporter) -> None:
        self._ledger = ledger
        self._reporter = reporter
        self._joining: dict[str, Joining] = {}
        """By session: the iteration whose operators are being joined."""

    def apply_due(self, session: Session) -> bool:
        """Apply what the watermark has passed, then acknowledge it; return whether that was all.

        Joining operators may take long: a little of it is done at a time, and others go on.
        """
        self._tabulate(session)
        done = self._apply_some(session)
        self._reporter.wake()
        session.acknowledge()
        return done

    def _apply_some(self, session: Session) -> bool:
        while self._join_some(session):
            declared = session.next_due()
            if declared is None:
                return True
            self._apply(session, declared)
        return False

    def _join_some(self, session: Session) -> bool:
        """Return whether no operators are left to be joined; their iteration ends then."""
        joining = self._joining.pop(session.request.session_id, None)
        if joining is None:
            return True
        try:
            joined = joining.go_on()
        except sqlite3.Error as error:
            self._failed(session, f"iteration {joining.end.iteration}: operators not joined", error)
            self._end_iteration(session, joining.declared, joining.end, joined=False)
            return True
        if joined:
            self._end_iteration(session, joining.declared, joining.end)
        else:
            self._joining[session.request.session_id] = joining
        return joined

    def _apply(self, session: Session, declared: Declared) -> None:
        declaration = declared.declaration
        if isinstance(declaration, EventColumns):
            session.program.take(declaration)
        elif isinstance(declaration, Timeouts):
            self._ledger.timeouts_kept(declared.ticket)
        elif isinstance(declaration, GraphPart):
            graph = session.graphs.take(declared.ticket, declaration)
            if graph:
                self._draw(session, graph)
        elif isinstance(declaration, KernelArguments):
            self._keep_arguments(session, declared.ticket, declaration)
        elif isinstance(declaration, CallStacks):
            self._keep_stacks(session, declared, declaration)
        elif isinstance(declaration, IterationEnd):
            joining = Joining(self._ledger, session, declared, declaration)
            self._joining[session.request.session_id] = joining
        elif isinstance(declaration, SessionEnd):
            self._end_session(session, declared.ticket, declaration)

    def _tabulate(self, session: Session) -> None:
        """Write the rows of all that is committed without a gap; what fails is tried again."""
        tables = session.outlet.tables
        if tables is None:
            return
        try:
            while session.tabulated_to < session.watermark:
                self._tabulate_some(session, tables, session.watermark)
        except (OSError, sqlite3.Error) as error:
            self._failed(session, "tables of figures: rows have to wait", error)

    def _tabulate_some(self, session: Session, tables: Tables, up_to: int) -> None:
        session_id = session.request.session_id
        found, reached = self._ledger.table_rows(
            session_id, after=session.tabulated_to, up_to=up_to
        )
        for sentence in tables.add(rows_of_tables(found, session)):
            session.trouble(sentence)
        session.tabulated_to = reached

    def _draw(self, session: Session, graph: Graph) -> None:
        tree, rank = session.outlet.tree, session.request.rank
        try:
            metadata.write_graph(tree, rank, drawings(graph, session.outlet.stand.profile))
            if graph.compiled:
                names = [node.name for node in graph.nodes]
                metadata.write_program_order(tree, rank, {graph.number: names})
                session.program.given(graph.number)
            self._carried_out(session, session.graphs.settled(graph.number))
        except (OSError, sqlite3.Error) as error:
            self._failed(session, f"graph {graph.number}: not written", error)

    def _keep_arguments(self, session: Session, ticket: Ticket, arguments: KernelArguments) -> None:
        rank, outlet = session.request.rank, session.outlet

        def folder_of(graph: int) -> str:
            return outlet.layout.folder_of(
                outlet.stand,
                rank=rank,
                net_name=session.plan.output.net_name or UNNAMED,
                graph=graph,
                iteration=arguments.iteration,
                constant=False,
            )

        try:
            unnameable = metadata.write_arguments(
                outlet.tree, arguments, folder_of=folder_of, mark=_mark(ticket)
            )
            self._carried_out(session, [ticket])
        except (OSError, sqlite3.Error) as error:
            self._failed(session, f"iteration {arguments.iteration}: arguments not written", error)
            return
        for name in unnameable:
            session.trouble(
                f"rank {rank}: no file holds the arguments of {name!r}: "
                f"its name would be over {NAME_MAX_BYTES} bytes"
            )

    def _keep_stacks(self, session: Session, declared: Declared, stacks: CallStacks) -> None:
        file = session.outlet.stacks
        try:
            if file is not None:
                file.add(stacks, again=session.replayed(declared))
            self._carried_out(session, [declared.ticket])
        except (OSError, sqlite3.Error) as error:
            self._failed(session, f"iteration {stacks.iteration}: stacks not written", error)

    def _end_iteration(
        self, session: Session, declared: Declared, end: IterationEnd, *, joined: bool = True
    ) -> None:
        ticket = declared.ticket
        status = session.end_iteration(end)
        try:
            # A manifest says that everything is there: without its rows it has to wait as they do.
            if joined and _tabulated(session, ticket):
                self._describe(session, status, ticket, repeated=session.replayed(declared))
                session.program.ended(end.iteration)
                self._ledger.iteration_ended(ticket, end, session.program.written, status)
                return
        except (OSError, sqlite3.Error) as error:
            self._failed(session, f"iteration {end.iteration}: no manifest written", error)
        try:
            self._ledger.iteration_waits(ticket, status)
        except sqlite3.Error as error:
            self._failed(session, f"iteration {end.iteration}: not reported", error)

    def _end_session(self, session: Session, ticket: Ticket, end: SessionEnd) -> None:
        session.say_goodbye(end)
        if _tabulated(session, ticket):
            self._ledger.session_ended(ticket, end)
        self._reporter.session(session.status(), str(session.outlet.tree.root))

    def _carried_out(self, session: Session, tickets: Iterable[Ticket]) -> None:
        self._ledger.carried_out(tickets, session.program.written)

    def _failed(self, session: Session, what: str, error: Exception) -> None:
        # Not marked as applied: the next start of the agent tries again.
        rank = session.request.rank
        _log.error("rank %d, %s", rank, what, exc_info=error)
        session.trouble(f"rank {rank}, {what}: {error}")

    def _describe(
        self, session: Session, status: IterationStatus, ticket: Ticket, *, repeated: bool
    ) -> None:
        request, tree, iteration = session.request, session.outlet.tree, status.iteration
        kept_graphs, records = manifest_records(
            self._ledger.kept(request.session_id, iteration), session.outlet.layout
        )
        layout = session.outlet.layout
        if layout.api is None:  # there the info file has the order
            graphs = session.program.graphs(iteration) | kept_graphs
            metadata.write_program_order(tree, request.rank, session.program.unwritten(iteration))
            metadata.append_iteration(tree, request.rank, graphs, iteration, repeated=repeated)
        metadata.write_manifest(
            tree,
            layout.rank_folder(request.rank),
            Manifest(
                status=status,
                world_size=request.world_size,
                device=request.device,
                host=request.host,
                records=records,
                session=ManifestSession(
                    pid=request.pid,
                    framework=request.framework,
                    device_target=request.device_target,
                    last_sequence=ticket.sequence,
                    plan=request.plan_json.decode(errors="replace"),
                ),
            ),
        )


def _tabulated(session: Session, ticket: Ticket) -> bool:
    """Return whether every row before a declaration stands in its table."""
    return session.outlet.tables is None or session.tabulated_to >= ticket.sequence


def _mark(ticket: Ticket) -> str:
    return f"{ticket.session_id}-{ticket.sequence}"
