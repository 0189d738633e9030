"""Published order of a job: content of its files, and missing or late operators."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from faults.tensor_content import name_of
from faults.values import PlacedOperator

from rankdump._cli.daemon_client import fetch_job_status, fetch_order_findings
from rankdump._core.events import FindingKind
from rankdump.errors import RankdumpError
from rankdump.reader import read_order

_LOOK_S = 0.2
_LATE = re.compile(r"(\d+) events of rank")


def wait_published(address: str, patience_s: float) -> list[str]:
    """Wait until the coordinator has written all that it received; return what it has not."""
    until_s = time.monotonic() + patience_s
    while any(job.pending_iterations for job in fetch_job_status(address).merges):
        if time.monotonic() > until_s:
            view = fetch_job_status(address)
            left = {m.job_id: m.pending_iterations for m in view.merges if m.pending_iterations}
            return [f"iterations that are not published: {left}; {' '.join(view.findings)}"]
        time.sleep(_LOOK_S)
    return []


def late(address: str) -> Mapping[tuple[int, int], int]:
    """Return how many events of a rank's iteration came too late for the order, as it says.

    Each run of a job says it of its own.
    """
    found: Counter[tuple[int, int]] = Counter()
    for merge in fetch_job_status(address).merges:
        for finding in fetch_order_findings(address, job_id=merge.job_id):
            said = _LATE.search(finding.text)
            if finding.kind is FindingKind.LATE and said:
                found[finding.ranks[0], finding.iteration] += int(said[1])
    return found


def published(root: Path, job_id: str) -> tuple[Mapping[PlacedOperator, int], list[str]]:
    """Return how often each operator is in the files of a job, and why they cannot be read."""
    found: Counter[PlacedOperator] = Counter()
    try:
        for entry in read_order(root, job_id=job_id).entries():
            for rank in entry.ranks:
                name = name_of(rank, entry.iteration, entry.name, 0)
                found[PlacedOperator(str(root), name)] += 1
    except RankdumpError as error:
        return found, [f"{root}, the order of {job_id}: {error}"]
    return found, []
