"""What the environment asks for: a plan, this process's place in its job, and its agent."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rankdump.contract.dialect import load
from rankdump.contract.errors import RankdumpError
from rankdump.contract.plan import DumpPlan
from rankdump.identity import DEFAULT_AGENT, WARNED_VARIABLE, Identity, identify

logger = logging.getLogger("rankdump")


@dataclass(frozen=True, slots=True)
class Asked:
    """A session that is to be."""

    plan: DumpPlan
    source: bytes
    """The configuration file."""
    identity: Identity
    agent: str


def asked_by(environ: Mapping[str, str]) -> Asked | None:
    """Return what RANKDUMP_CONFIG, else MINDSPORE_DUMP_CONFIG, asks for; None for nothing.

    RankdumpError when it cannot be used.
    """
    path = environ.get("RANKDUMP_CONFIG") or environ.get("MINDSPORE_DUMP_CONFIG")
    if not path:
        return None
    plan, source = load(Path(path), environ)
    identity = identify(environ)
    # Once a job: not by every rank, and not after `rankdump run` has said it.
    if identity.rank == 0 and environ.get(WARNED_VARIABLE) != path:
        for warning in plan.warnings:
            logger.warning("rankdump: %s", warning)
    return Asked(plan, source, identity, environ.get("RANKDUMP_AGENT") or DEFAULT_AGENT)


def asked_or_told(environ: Mapping[str, str]) -> Asked | None:
    """Return the same; what cannot be used is logged instead of raised."""
    try:
        return asked_by(environ)
    except RankdumpError as error:
        logger.error("rankdump: nothing will be dumped: %s", error)
    except Exception:
        logger.exception("rankdump: nothing will be dumped: internal error")
    return None
