"""Agent with a full or damaged state folder: it ends with one line and status 1."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankdumpd.agent.ledger.agent_ledger import AgentLedger


def command(short_dir: Path) -> list[str]:
    options = ["--socket", f"{short_dir}/a.sock", "--state-dir", f"{short_dir}/state"]
    return [sys.executable, "-m", "rankdumpd", "standalone", *options]


def ended(arguments: list[str]) -> tuple[int, str]:
    done = subprocess.run(
        arguments, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL
    )
    return done.returncode, done.stderr


def test_full_state_folder_ends_with_exit_status_one(short_dir):
    """With this status a service manager restarts the agent, with that of a wrong setting it does
    not.
    """
    (short_dir / "state").mkdir()
    fill = f"mount -t tmpfs -o size=16k tmpfs {short_dir}/state && exec"
    status, said = ended(["unshare", "-rm", "sh", "-c", f'{fill} "$@"', "sh", *command(short_dir)])
    if "unshare" in said and os.environ.get("CI") != "true":
        pytest.skip("no user namespaces here to mount a small file system in")
    assert status == 1, said
    assert " CRITICAL rankdumpd.main: agent.state_dir: " in said.splitlines()[-1]
    assert "has no space" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("keeps", [0, 4096])
def test_damaged_ledger_ends_the_process(short_dir, keeps):
    """Wherever the file is damaged, one line names it."""
    AgentLedger(short_dir / "state").close()
    path = short_dir / "state" / "ledger.sqlite"
    data = path.read_bytes()
    path.write_bytes(data[:keeps] + b"\xff" * (len(data) - keeps))
    status, said = ended(command(short_dir))
    assert status == 1, said
    assert "damaged" in said.splitlines()[-1]
    assert said.splitlines()[-1].endswith("; `rankdumpd rebuild` makes a new one from a tree")
    assert str(short_dir / "state") in said.splitlines()[-1]
    assert "Traceback" not in said
