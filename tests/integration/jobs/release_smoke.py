"""Checks an installed release; run by `make release`, independent of the clone.

python release_smoke.py base: without extras. With `daemon`: commands, and a session that brings its
own daemon.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np

import rankdump
from rankdump._core.plan import DumpPlan, OutputSettings
from rankdump._kernels.kernel_functions import KERNELS

BIN = Path(sys.executable).parent


def said(code: int, *command: str) -> str:
    """Return the output of a command that has to end with that code."""
    done = subprocess.run([BIN / command[0], *command[1:]], capture_output=True, text=True)
    assert done.returncode == code, (command, done.returncode, done.stdout, done.stderr)
    return done.stdout + done.stderr


def base() -> None:
    """Check that each command says in one line what has to be installed."""
    for command, extra in (("rankdump", "cli"), ("rankdumpd", "daemon")):
        line = said(2, command, "--help")
        assert line.count("\n") == 1, line
        assert f"pip install 'rankdump[{extra}]'" in line, line


def commands() -> None:
    """Check the version and the subcommands of both commands."""
    for command in ("rankdump", "rankdumpd"):
        release = f"{command}, version {rankdump.__version__}"
        assert said(0, command, "--version") == f"{release}\nkernels: {KERNELS.description}\n"
        assert "Usage:" in said(0, command, "--help")


def session(folder: Path) -> None:
    """Check that an array is dumped, listed, checked and read back."""
    array = np.random.default_rng(0).random((100, 100))
    plan = DumpPlan(output=OutputSettings(str(folder / "tree")))
    with rankdump.Session(plan) as job:
        for iteration in range(2):
            job.step(iteration)
            job.dump("MatMul", "Default/fc/MatMul-op0", "output", 0, array + iteration)
    dump = rankdump.open(folder / "tree")
    found = [dump.load(entry) for entry in dump.tensors()]
    assert len(found) == 2, dump.problems
    for iteration, loaded in enumerate(found):
        np.testing.assert_array_equal(loaded, array + iteration)
    assert "MatMul" in said(0, "rankdump", "ls", str(folder / "tree"))
    said(0, "rankdump", "fsck", str(folder / "tree"))


def main() -> None:
    assert "site-packages" in rankdump.__file__, rankdump.__file__
    assert version("rankdump") == rankdump.__version__
    # Also from the sdist: there is a compiler where releases are tried.
    assert KERNELS.is_compiled, KERNELS.description
    if sys.argv[1] == "base":
        base()
        return
    commands()
    with tempfile.TemporaryDirectory() as folder:
        # Fullness of the disk of whoever builds says nothing of the release.
        for name in ("KEEP_FREE_RATIO", "KEEP_FREE_INODES_RATIO"):
            os.environ[f"RANKDUMPD_AGENT__{name}"] = "0"
        session(Path(folder))


if __name__ == "__main__":
    main()
