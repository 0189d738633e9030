"""Job that dumps a few arrays through an agent and reads them back; run on other runtimes.

Usage: round_trip.py FOLDER. Prints the versions it ran on.
"""

from __future__ import annotations

import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np

import rankdump
from rankdump._core.plan import DumpPlan, OutputSettings
from rankdump.reader import load, walk

folder = Path(sys.argv[1])
tree = folder / "tree"
address = f"unix://{folder}/a.sock"
command = [sys.executable, "-m", "rankdumpd", "standalone"]
agent = subprocess.Popen([*command, "--socket", f"{folder}/a.sock", "--state-dir", f"{folder}/s"])
try:
    deadline = time.monotonic() + 60
    while not Path(f"{folder}/a.sock").exists():
        assert time.monotonic() < deadline, "the agent did not come up"
        time.sleep(0.05)
    arrays = {
        f"Default/{name}-op0": np.arange(24).reshape(2, 3, 4).astype(name)
        for name in ("float16", "float32", "float64", "int8", "uint64", "bool", "complex64")
    }
    arrays["Default/large-op0"] = np.random.default_rng(0).random((600, 1000))
    with rankdump.Session(DumpPlan(output=OutputSettings(str(tree))), agent=address) as session:
        for name, array in arrays.items():
            session.dump("Op", name, "output", 0, array)
    found = {entry.op_name: load(entry) for entry in walk(tree).entries}
    assert found.keys() == arrays.keys(), found.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
finally:
    agent.terminate()
assert agent.wait(30) == 0, agent.returncode
print(*(f"{name} {version(name)}" for name in ("grpcio", "protobuf", "numpy")), sep=", ")
