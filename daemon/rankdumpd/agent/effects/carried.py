"""Declarations that are carried out one by one: graphs, arguments, stacks and timeouts."""

from __future__ import annotations

import sqlite3

from rankdump.contract.exchange import CallStacks, KernelArguments
from rankdump.contract.graph import Graph, GraphPart
from rankdump.contract.layout.place import NAME_MAX_BYTES
from rankdump.contract.plan import UNNAMED
from rankdump.contract.timeouts import Timeouts
from rankdumpd.agent import metadata
from rankdumpd.agent.draw import drawings
from rankdumpd.agent.effects.failing import failed
from rankdumpd.agent.ledger import Ledger
from rankdumpd.agent.sessions import Session
from rankdumpd.agent.values import Declared, Ticket


def carry_out(ledger: Ledger, session: Session, declared: Declared) -> None:
    """Carry one out and enter that it is; ExhaustedError when it has to wait."""
    declaration = declared.declaration
    if isinstance(declaration, Timeouts):
        _keep_timeouts(ledger, session, declared.ticket)
    elif isinstance(declaration, GraphPart):
        graph = session.graphs.take(declared.ticket, declaration)
        if graph:
            _draw(ledger, session, graph)
    elif isinstance(declaration, KernelArguments):
        _keep_arguments(ledger, session, declared.ticket, declaration)
    elif isinstance(declaration, CallStacks):
        _keep_stacks(ledger, session, declared, declaration)


def _keep_timeouts(ledger: Ledger, session: Session, ticket: Ticket) -> None:
    try:
        ledger.timeouts_kept(ticket)
    except sqlite3.Error as error:
        failed(session, "timeouts not kept", error)


def _draw(ledger: Ledger, session: Session, graph: Graph) -> None:
    tree, rank = session.outlet.tree, session.request.rank
    try:
        metadata.write_graph(tree, rank, drawings(graph, session.outlet.stand.profile))
        if graph.compiled:
            names = [node.name for node in graph.nodes]
            metadata.write_program_order(tree, rank, {graph.number: names})
            session.program.given(graph.number)
        ledger.carried_out(session.graphs.settled(graph.number), session.program.written)
    except (OSError, sqlite3.Error) as error:
        failed(session, f"graph {graph.number}: not written", error)


def _keep_arguments(
    ledger: Ledger, session: Session, ticket: Ticket, arguments: KernelArguments
) -> None:
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
        ledger.carried_out([ticket], session.program.written)
    except (OSError, sqlite3.Error) as error:
        failed(session, f"iteration {arguments.iteration}: arguments not written", error)
        return
    for name in unnameable:
        session.trouble(
            f"rank {rank}: no file holds the arguments of {name!r}: "
            f"its name would be over {NAME_MAX_BYTES} bytes"
        )


def _keep_stacks(ledger: Ledger, session: Session, declared: Declared, stacks: CallStacks) -> None:
    file = session.outlet.stacks
    try:
        if file is not None:
            file.add(stacks, again=session.due.begun(declared))
        ledger.carried_out([declared.ticket], session.program.written)
    except (OSError, sqlite3.Error) as error:
        failed(session, f"iteration {stacks.iteration}: stacks not written", error)


def _mark(ticket: Ticket) -> str:
    return f"{ticket.session_id}-{ticket.sequence}"
