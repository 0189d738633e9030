"""A job of one rank, three steps and one operator, to check that a host collects dumps."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

import rankdump

PLAN = """{
  "common_dump_settings": {
    "dump_mode": 0, "path": "/var/dump/first", "net_name": "Net", "iteration": "all",
    "input_output": 0, "kernels": [], "support_device": [0]
  },
  "e2e_dump_settings": {"enable": true, "trans_flag": true}
}
"""

if __name__ == "__main__":
    plan = Path("first_dump.json")
    plan.write_text(PLAN)
    os.environ.setdefault("RANKDUMP_AGENT", "unix:/run/rankdump/agent.sock")
    os.environ["RANKDUMP_CONFIG"] = str(plan)
    with rankdump.Session.from_environment(os.environ) as session:
        for step in range(3):
            session.step(step)
            weights = np.full((4, 4), step, np.float32)
            session.dump("Dense", "Default/fc-Dense/Dense-op0", "output", 0, weights)
        dumped = session.active
    sys.exit(0 if dumped else "nothing was dumped")
