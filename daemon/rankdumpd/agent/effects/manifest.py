"""The last step of an iteration: what ran in it, and the manifest that makes it complete."""

from __future__ import annotations

from rankdump.contract.manifest import Manifest, ManifestSession
from rankdump.contract.status import IterationStatus
from rankdumpd.agent import metadata
from rankdumpd.agent.effects.kept import manifest_records
from rankdumpd.agent.ledger import Ledger
from rankdumpd.agent.sessions import Session
from rankdumpd.agent.values import Ticket


def describe(
    ledger: Ledger, session: Session, status: IterationStatus, ticket: Ticket, *, repeated: bool
) -> None:
    """Write order files and manifest of an iteration that ended with a ticket's frame.

    With `repeated` they may be there in part.
    """
    request, outlet, iteration = session.request, session.outlet, status.iteration
    kept = ledger.kept(request.session_id, iteration)
    kept_graphs, records = manifest_records(kept, outlet.layout)
    tree, layout = outlet.tree, outlet.layout
    if layout.api is None:  # there the info file has the order
        graphs = session.program.graphs(iteration) | kept_graphs
        metadata.write_program_order(tree, request.rank, session.program.unwritten(iteration))
        metadata.append_iteration(tree, request.rank, graphs, iteration, repeated=repeated)
    manifest = Manifest(
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
    )
    metadata.write_manifest(tree, layout.rank_folder(request.rank), manifest)
