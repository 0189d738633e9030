"""Dumps that other tools wrote, kept in tests/golden/others.json.

`python foreign_dumps.py FOLDER` keeps every file below a folder of dumps; they are packed, because
most are stacks or mostly empty archives. Paths of the machine were replaced in texts, nothing else.

  msprobe-tensor, msprobe-weight    msprobe 26.2.0, torch 2.13.0, level mix, task tensor; the second
                                    with 0.5 added to one weight
  msprobe-statistics                two gloo ranks, task statistics
  msprobe-md5, -md5-weight, -xor    level L1, summary_mode md5 and xor
  debug-mode, -weight, -nan         DebugMode.save_logs of torch 2.14.1 with stacks; hashes `norm`,
                                    the last with `norm` and `hash_tensor`
  debug-mode-text                   debug_string() of torch 2.13.0, of the same program
  flight, flight-json               _dump_fr_trace and _dump_fr_trace_json of torch 2.13.0, two gloo
                                    ranks, of which one does not come to the last all-reduce
"""

from __future__ import annotations

import base64
import json
import sys
import zlib
from pathlib import Path

_KEPT = Path(__file__).parents[1] / "golden" / "others.json"


def keep(folder: Path) -> None:
    """Keep all files below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    body = {
        path.relative_to(folder).as_posix(): base64.b64encode(
            zlib.compress(path.read_bytes(), 9)
        ).decode()
        for path in files
    }
    _KEPT.write_text(json.dumps(body, indent=0) + "\n")


def write_dump(name: str, folder: Path) -> Path:
    """Write one of the dumps below a folder, and return its root."""
    for path, packed in json.loads(_KEPT.read_text()).items():
        if path.startswith(f"{name}/"):
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(zlib.decompress(base64.b64decode(packed)))
    assert (folder / name).is_dir(), name
    return folder / name


if __name__ == "__main__":
    keep(Path(sys.argv[1]))
