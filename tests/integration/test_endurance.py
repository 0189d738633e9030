"""Memory of rank and agent over many records: a million of them in `make soak`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.jobs import endurance

from rankdump._cli.daemon_client import fetch_agent_status

pytestmark = pytest.mark.slow

WAIT_S = 590
RECORD_FACTOR = int(os.environ.get("ENDURANCE_FACTOR", "1"))
BUFFER_BYTES = 1 << 20
"""Full long before the first tenth is over: what waits is the same ever after."""
SLACK_BYTES = {"rank": 12 << 20, "agent": 40 << 20}
"""What allocators and a batch more or less may make of it. The daemon is a coordinator, too: eight
messages of 20,000 events may wait there to be merged."""


@pytest.fixture
def memory_dir() -> Iterator[Path]:
    """A folder in memory where there is one, so that no disk limits the speed."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="rd-", dir=shm if shm.is_dir() else None) as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("saved", "records"),
    [("statistic", 200_000 * RECORD_FACTOR), ("tensor", 20_000 * RECORD_FACTOR)],
    ids=["rows", "files"],
)
def test_memory_of_rank_and_agent_does_not_grow(
    memory_dir: Path, make_daemon, short_dir: Path, saved: str, records: int
):
    daemon = make_daemon()
    tree, config = memory_dir / "dump", short_dir / "dump.json"
    common = {
        "dump_mode": 0,
        "path": str(tree),
        "net_name": "Net",
        "iteration": "all",
        "input_output": 0,
        "kernels": [],
        "support_device": [0],
        "saved_data": saved,
    }
    body = {
        "common_dump_settings": common,
        "e2e_dump_settings": {"enable": True, "trans_flag": True},
        "rankdump": {"block_timeout_s": WAIT_S, "buffer_bytes": BUFFER_BYTES},
    }
    config.write_text(json.dumps(body))
    command = [sys.executable, endurance.__file__, str(records), str(daemon.process.pid), str(tree)]
    environ = {"RANKDUMP_CONFIG": str(config), "RANKDUMP_AGENT": daemon.address}
    ran = subprocess.run(
        command, env=os.environ | environ, capture_output=True, text=True, timeout=WAIT_S
    )
    assert ran.returncode == 0, ran.stderr
    view = fetch_agent_status(daemon.address)
    assert sum(each.stored + each.linked for each in view.iterations) == records
    assert not any(each.dropped for each in view.iterations)
    by_tenth = [tuple(map(int, line.split())) for line in ran.stdout.splitlines()]
    assert len(by_tenth) == endurance.TENTHS
    for who, column in zip(("rank", "agent"), zip(*by_tenth, strict=True), strict=True):
        first, *later = column
        assert max(later) - first < SLACK_BYTES[who], (who, [n >> 20 for n in column])
