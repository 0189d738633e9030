"""A session as people and coordinators see it. Pure."""

from __future__ import annotations

from rankdump.contract import selection
from rankdump.contract.exchange import SessionEnd, SessionRequest
from rankdump.contract.plan import DumpPlan
from rankdump.contract.status import SessionState, SessionStatus


def status_of(
    request: SessionRequest, plan: DumpPlan, state: SessionState, farewell: SessionEnd
) -> SessionStatus:
    """Return who a session is and how it stands; `farewell` is empty until it says goodbye."""
    return SessionStatus(
        request.job_id,
        request.session_id,
        request.rank,
        request.world_size,
        request.device,
        request.host,
        request.pid,
        state=state,
        excluded=selection.device_verdict(plan, request.device).reason,
        iterations_seen=farewell.iterations_seen,
        notes=farewell.notes,
        framework=request.framework,
        device_target=request.device_target,
        selected=plan.selection.iterations.text,
    )
