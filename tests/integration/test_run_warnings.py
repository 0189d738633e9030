"""Warnings of `rankdump run` before the job starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from support.configurations import body_of


def test_run_prints_warnings_before_the_job_starts(tmp_path: Path, short_dir: Path):
    """Each is one line on stderr before the job's output; output and exit code are the job's."""
    config = tmp_path / "data_dump.json"
    config.write_text(json.dumps(body_of(common={"iteration": "5-3", "support_device": [0, 0]})))
    script = "echo out; echo the job >&2; exit 3"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "rankdump", "run", "--config", str(config)),
            *("--output", str(tmp_path / "tree"), "--", "sh", "-c", script),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(short_dir)},
    )
    first, second, start, job, *_ = done.stderr.splitlines()
    key = "rankdump: warning: common_dump_settings"
    assert first == f"{key}.iteration: '5-3' runs backwards and matches no iteration"
    assert second == f"{key}.support_device: 0 is listed twice and counts once"
    assert start.startswith(f"rankdump: tree {tmp_path / 'tree'}, daemon at unix:")
    assert job == "the job"
    assert (done.returncode, done.stdout) == (3, "out\n")
