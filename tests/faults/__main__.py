"""`python -m faults`: injects faults for a while, and reports whether every law held.

Exit 0: all held; 1: one did not; 2: bad usage.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from faults.oracle import told_once
from faults.run import RunRequest, keep, run
from faults.schedule import schedule
from faults.values import FaultKind, RunVerdict, ScheduledFault

_INSIDE = "FAULTS_INSIDE"
_TOLD = 12


def main() -> int:
    """Run as the command line requests, in a private mount namespace."""
    asked = _asked()
    if _INSIDE not in os.environ:
        os.environ[_INSIDE] = "1"
        own = ["unshare", "-rm", sys.executable, "-m", "faults", *sys.argv[1:]]
        os.execvp(own[0], own)
    kinds = tuple(map(FaultKind, asked.only)) or tuple(FaultKind)
    faults = schedule(asked.seed, asked.seconds, asked.faults, kinds)
    if asked.replay:
        said = json.loads(Path(asked.replay).read_text())["schedule"]
        faults = tuple(ScheduledFault(**each | {"kind": FaultKind(each["kind"])}) for each in said)
    # Whoever is told to go ends the cast before.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = Path(tempfile.mkdtemp(prefix="rig-"))
    order = RunRequest(asked.seed, asked.seconds, faults, asked.small, asked.pause, folder)
    say = _silent if asked.quiet else _say
    say(f"seed {asked.seed}: {len(faults)} faults in {asked.seconds:g} s, in {folder}")
    verdict = run(order, say)
    for line in told_once(verdict.breaches)[:_TOLD]:
        _say(line)
    if verdict.breaches and asked.keep:
        keep(order, Path(asked.keep))
        _say(f"kept in {asked.keep}")
    if asked.json:
        print(json.dumps(_body(verdict, faults), indent=1))
    shutil.rmtree(folder, ignore_errors=True)
    _say(f"seed {asked.seed}: {sum(verdict.happened.values())} faults happened, "
         f"{len(verdict.breaches)} laws broken")  # fmt: skip
    return 1 if verdict.breaches else 0


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--only", nargs="*", default=[], choices=[kind.value for kind in FaultKind])
    parser.add_argument("--small", action="store_true", help="One agent and three ranks.")
    parser.add_argument("--pause", type=float, default=0.6, help="Seconds between iterations.")
    parser.add_argument("--replay", help="JSON of an earlier run, whose faults are played again.")
    parser.add_argument("--keep", default="build/soak", help="Where a broken run is kept.")
    parser.add_argument("--json", action="store_true", help="Print the verdict as JSON.")
    parser.add_argument("--quiet", action="store_true", help="No line for every second.")
    return parser.parse_args()


def _body(verdict: RunVerdict, faults: tuple[ScheduledFault, ...]) -> dict[str, Any]:
    return asdict(verdict) | {"schedule": [asdict(fault) for fault in faults]}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _silent(text: str) -> None:
    del text


if __name__ == "__main__":
    sys.exit(main())
