"""Log lines of gRPC are shown only on request."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

OWN_LINE = re.compile(r"^(?:[IWEF]\d{4} |WARNING: All log messages before absl)", re.MULTILINE)
JOB = """
import os, sys
import numpy as np, rankdump
from rankdump._core.plan import DumpPlan, OutputSettings
session = rankdump.Session(DumpPlan(output=OutputSettings(root=sys.argv[2])), agent=sys.argv[1])
for step in range(3):
    session.step(step)
    session.dump("Op", "Default/Op-op0", "output", 0, np.ones(9))
    # As a loader of data starts its workers: a connection is open, and its threads are at work.
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
session.close()
print(session.undelivered, os.environ["GRPC_VERBOSITY"])
"""


def environment(**more: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "GRPC_VERBOSITY"} | more


@pytest.mark.parametrize(("verbosity", "says"), [("", False), ("INFO", True)])
def test_forking_job_shows_no_grpc_log_lines(make_daemon, short_dir, verbosity, says):
    """It shows them for a user who set GRPC_VERBOSITY."""
    address = make_daemon().address
    given = {"GRPC_VERBOSITY": verbosity} if verbosity else {}
    done = subprocess.run(
        [sys.executable, "-c", JOB, address, str(short_dir / "dump")],
        env=environment(**given),
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.stdout.split() == ["0", verbosity or "NONE"], done.stderr
    assert bool(OWN_LINE.search(done.stderr)) is says, done.stderr


@pytest.mark.parametrize(("module", "expected"), [("rankdump", "NONE"), ("rankdumpd", "ERROR")])
def test_verbosity_is_set_before_grpc_is_loaded(module, expected):
    """This holds for whichever module is imported first, because gRPC reads the variable once."""
    code = (
        "import os, sys, importlib\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'grpc':\n"
        "            print(os.environ.get('GRPC_VERBOSITY'))\n"
        "sys.meta_path.insert(0, Finder())\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
    )
    names = {
        "rankdump": ["rankdump._transport.agent_client"],
        "rankdumpd": ["rankdumpd.main", "rankdumpd.composition"],
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *names[module]],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=500,
    )
    assert done.stdout.split() == [expected]
