from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("missing", ["click", "rich", "grpc_health"])
def test_a_missing_extra_is_one_line(missing):
    """Without the extra the command says what to install, in one line, with code 2."""
    code = (
        f"import sys; sys.modules[{missing!r}] = None; from rankdump.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "rankdump[daemon]" in done.stderr


def test_a_closed_pipe_ends_quietly(tree):
    """`rankdump ls | head -1` prints no traceback."""
    import numpy as np

    for number in range(300):
        tree.tensor(0, 0, f"Default/{'long' * 20}-Name/Op-op{number}", np.ones(1, np.float32))
    script = (
        f"{sys.executable} -m rankdump.cli ls {tree.root} --limit 0 --op '*' | head -1; "
        "exit ${PIPESTATUS[0]}"
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
