"""What a session must be to be let in. Pure: no clock, no disk, no network."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import re

from rankdump.codec import CODECS
from rankdump.contract.errors import ForbiddenError, ProtocolError, RefusedError
from rankdump.contract.exchange import SessionRequest
from rankdump.contract.layout.layouts import LAYOUTS
from rankdump.contract.layout.profile import PROFILES
from rankdump.contract.plan import DumpPlan
from rankdump.contract.plan_json import plan_from_json

# The id's first characters become part of a file name.
_SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_OWNER_MAY_ENTER = 0o300


def plan_of(request: SessionRequest) -> DumpPlan:
    """Return the plan of a session that may be served; say what is wrong with any other."""
    if not _SESSION_ID.fullmatch(request.session_id):
        raise ProtocolError(f"session id {request.session_id!r}: letters, digits, _ and - only")
    plan = plan_from_json(request.plan_json)
    fault = _fault_of(plan)
    if fault:
        raise RefusedError(f"plan of rank {request.rank}: {fault}")
    return plan


def sealed(request: SessionRequest) -> SessionRequest:
    """Return an introduction that has the SHA-256 of its secret in the secret's place.

    Nothing behind the door knows the secret itself. A client that has none keeps none.
    """
    secret = hashlib.sha256(request.secret).digest() if request.secret else b""
    return dataclasses.replace(request, secret=secret)


def check_holder(known: SessionRequest, request: SessionRequest) -> None:
    """Raise ForbiddenError where who resumes a session is not who opened it; both are sealed.

    One that was opened without a secret, by an older client or in front of an older agent, goes
    to whoever resumes it, and is theirs from then on.
    """
    if known.secret and not hmac.compare_digest(known.secret, request.secret):
        raise ForbiddenError(
            f"session {request.session_id!r} was opened by another process: its secret is not known"
        )


def check_same(known: SessionRequest, request: SessionRequest) -> None:
    """Raise RefusedError where who resumes a session is another rank than it was opened for."""
    for name in ("job_id", "rank", "world_size", "device", "plan_json"):
        if getattr(known, name) != getattr(request, name):
            raise RefusedError(f"session {request.session_id!r} was opened with another {name}")


def _fault_of(plan: DumpPlan) -> str:
    output = plan.output
    if output.codec not in CODECS:
        return f"codec {output.codec!r} is none of {', '.join(CODECS)}"
    if output.layout not in LAYOUTS:
        return f"layout {output.layout!r} is none of {', '.join(LAYOUTS)}"
    if LAYOUTS[output.layout].timed and not output.started:
        return f"layout {output.layout!r} without the time when the session began"
    if output.profile not in PROFILES:
        return f"profile {output.profile!r} is none of {', '.join(PROFILES)}"
    if output.folder_mode & _OWNER_MAY_ENTER != _OWNER_MAY_ENTER:
        return f"folder_mode {output.folder_mode:#o} keeps the agent itself from writing"
    return _contradiction_of(plan)


def _contradiction_of(plan: DumpPlan) -> str:
    output, content = plan.output, plan.content
    by_operator = content.tables == "operator"
    if not LAYOUTS[output.layout].shares_stamps and (output.file_format == "bin" or by_operator):
        what = "bin files" if output.file_format == "bin" else "tables of operators"
        return f"layout {output.layout!r} has no {what}"
    if output.file_format == "bin" and content.saved == "full":
        return "file_format 'bin' with saved_data 'full': only npy files have figures beside them"
    if by_operator and content.saved == "full":
        return "a table in the place of each operator's file, with saved_data 'full'"
    if LAYOUTS[output.layout].api is not None and content.saved == "tensor":
        return f"layout {output.layout!r} with saved_data 'tensor': its tensors all have a line"
    return ""
