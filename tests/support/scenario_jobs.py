"""Jobs of the scripts in tests/jobs that run scenarios with `rank_processes.run_ranks`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.data_dumps import write_data_dump

_RUN_S = 500


def run_scenarios(script: Path, folder: Path, names: Mapping[int, Sequence[str]]) -> Path:
    """Run scenarios, by the number of their ranks, with an agent that has everything when the
    command returns.

    Those of so many ranks have a folder of that number in the one that is returned, and `log.txt`
    has what the command logged.
    """
    config = write_data_dump(folder, folder / "unused", devices=range(max(names)))
    command = [sys.executable, "-m", "rankdump", "run", "--config", str(config), "--"]
    command += [sys.executable, str(script)]
    for world, some in names.items():
        own = folder / str(world)
        own.mkdir()
        command += [str(world), str(own), *some]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_RUN_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "log.txt").write_text(done.stderr)
    return folder
