"""Runs a module of this package in a Python that has a peer, and reads its output.

It is run as a script, because troubleshooter fails on a stack that begins in `python -m`.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent.parent
_TIMEOUT_S = 600.0


def asked(
    python: str, module: str, *arguments: str, variables: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return what `main(*arguments)` of a module gives there; its numbers and texts.

    `variables` are added to the environment.
    """
    done = subprocess.run(
        [python, __file__, module, *arguments],
        cwd=_ROOT,
        env={**os.environ, **(variables or {})},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{python}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.path[0] = str(_ROOT)
    print(json.dumps(importlib.import_module(sys.argv[1]).main(*sys.argv[2:])), flush=True)
