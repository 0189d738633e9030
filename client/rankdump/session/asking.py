"""What the environment asks for: a plan, and this process's place in its job."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rankdump.contract.dialect import load
from rankdump.contract.errors import RankdumpError
from rankdump.contract.plan import DumpPlan
from rankdump.identity import WARNED_VARIABLE, Identity, identify
from rankdump.session.native_dump import conflict_here

logger = logging.getLogger("rankdump")


@dataclass(frozen=True, slots=True)
class Asked:
    """A session that is to be."""

    plan: DumpPlan
    source: bytes
    """The configuration file."""
    identity: Identity


def asked_by(environ: Mapping[str, str]) -> Asked | None:
    """Return what RANKDUMP_CONFIG, else MINDSPORE_DUMP_CONFIG, asks for; None for nothing.

    None as well where MindSpore itself dumps it. RankdumpError when it cannot be used.
    """
    path = environ.get("RANKDUMP_CONFIG") or environ.get("MINDSPORE_DUMP_CONFIG")
    if not path:
        return None
    plan, source = load(Path(path), environ)
    identity = identify(environ, plan.output.root)
    if _left_to_mindspore(Path(path), plan, identity, environ):
        return None
    # Once a job: not by every rank, and not after `rankdump run` has said it.
    if identity.rank == 0 and environ.get(WARNED_VARIABLE) != path:
        for warning in plan.warnings:
            logger.warning("rankdump: %s", warning)
    return Asked(plan, source, identity)


def _left_to_mindspore(
    path: Path, plan: DumpPlan, identity: Identity, environ: Mapping[str, str]
) -> bool:
    """Return whether MindSpore writes the dump by itself, which is said once a job."""
    conflict = conflict_here(path, plan.output.root, environ) if plan.enabled else ""
    if conflict and identity.rank == 0:
        logger.warning("rankdump: %s", conflict)
    return bool(conflict)


def asked_or_told(environ: Mapping[str, str]) -> Asked | None:
    """Return the same; what cannot be used is logged instead of raised."""
    try:
        return asked_by(environ)
    except RankdumpError as error:
        logger.error("rankdump: nothing will be dumped: %s", error)
    except Exception:
        logger.exception("rankdump: nothing will be dumped: internal error")
    return None
