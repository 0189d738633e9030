"""Jobs of the scripts in tests/jobs that run scenarios with `rank_processes.run_ranks`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from support.data_dumps import write_data_dump

_RUN_S = 500


def run_scenarios(script: Path, folder: Path, world: int, names: Sequence[str]) -> Path:
    """Run scenarios with an agent that has everything when the command returns; return the folder,
    in which `log.txt` has what the command logged.
    """
    folder.mkdir(exist_ok=True)
    config = write_data_dump(folder, folder / "unused", devices=range(world))
    command = [sys.executable, "-m", "rankdump", "run", "--config", str(config), "--"]
    done = subprocess.run(
        [*command, sys.executable, str(script), str(world), str(folder), *names],
        capture_output=True,
        text=True,
        timeout=_RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "log.txt").write_text(done.stderr)
    return folder
