"""Trees of earlier versions: how they are stored beside the tests, and their expected answers.

`python golden_trees.py VERSION TREE...` keeps trees in tests/golden/tree-VERSION, with the answers
of the code that runs; `tests/integration/jobs/golden_tree.py` wrote those of 0.1.0.

A tree is kept as its own npy, csv and json files. What else it holds is in `NAME.other.json`:
the text or the bytes of other files, and of a hard link, which git does not know, what it is linked
to. The graphs for other programs (`.pb`) and the tables in Parquet are left out.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rankdump
from rankdump._cli.command_group import run_command_line

FOLDER = Path(__file__).parents[1] / "golden"
_PLAIN = {".npy", ".csv", ".json"}
_LEFT_OUT = {".pb", ".parquet"}
_SENTENCES = {"why", "reason", "reading", "notes"}
"""Texts for people: they may be said better."""
_HERE = {"tree", "root", "roots", "a", "b", "seconds", "load", "memory", "disks"}
"""What depends on where and when it is asked."""
MEASURE_TOLERANCE = 2**-15
"""Of float32 sums, which a comparison adds up as the matrix library of the processor does."""
_QUESTIONS = {
    "ls": ("ls", "--digest", "--limit", "0"),
    "status": ("status",),
    "fsck": ("fsck",),
    "order": ("order", "--limit", "0"),
    "stats": ("stats", "--limit", "0", "--rank", "0", "--iteration", "0"),
    "hints": ("hints",),
}
_COMPARED = {
    "diff of iterations": ("--iteration-a", "0", "--iteration-b", "1"),
    "diff of ranks": ("--rank-a", "0", "--rank-b", "1", "--iteration", "0"),
}


def keep(tree: Path, version: str) -> None:
    """Keep a tree, and what is answered about it."""
    target = FOLDER / f"tree-{version}" / tree.name
    other: dict[str, dict[str, str]] = {}
    first: dict[int, str] = {}
    for path in _files(tree):
        name = path.relative_to(tree).as_posix()
        link = first.setdefault(path.stat().st_ino, name)
        if link != name:
            other[name] = {"link": link}
        elif path.suffix in _PLAIN:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / name)
        elif path.suffix not in _LEFT_OUT:
            other[name] = _as_text(path.read_bytes())
    beside(target, "other").write_text(_in_lines(other))
    restored = restore(target, tree.parent / "restored" / tree.name)
    beside(target, "answers").write_text(_in_lines(answers(restored)))
    beside(target, "sums").write_text(_in_lines(sums(restored)))


def restore(kept: Path, target: Path) -> Path:
    """Return the tree again as it was written, but for modes and what was left out."""
    shutil.copytree(kept, target)
    links: dict[str, str] = {}
    for name, what in json.loads(beside(kept, "other").read_text()).items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if "link" in what:
            links[name] = what["link"]
        else:
            path.write_bytes(_from_text(what))
    for name, first in links.items():
        os.link(target / first, target / name)
    return target


def beside(kept: Path, what: str) -> Path:
    """Return the file beside a kept tree that holds its answers, sums, or other files."""
    return kept.with_name(f"{kept.name}.{what}.json")


def answers(tree: Path) -> dict[str, Any]:
    """Ask the commands about a tree: what they print, their exit codes, and what is loaded."""
    found: dict[str, Any] = {"loaded": _loaded(tree)}
    found |= {name: asked([*question, str(tree)]) for name, question in _QUESTIONS.items()}
    for name, more in _COMPARED.items():
        both = [str(tree), str(tree)]
        found[name] = asked(["diff", "--processes", "1", *both, *more])
    return found


def missing(found: Any, expected: Any, where: str = "") -> list[str]:
    """Return the places where something else stands than is expected; more fields may stand."""
    if isinstance(expected, dict) and isinstance(found, dict):
        return [
            place
            for name, value in expected.items()
            for place in missing(found.get(name, "nothing"), value, f"{where}.{name}")
        ]
    if isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        pairs = enumerate(zip(found, expected, strict=True))
        return [place for number, two in pairs for place in missing(*two, f"{where}[{number}]")]
    if isinstance(expected, float) and isinstance(found, float | int) and ".measures." in where:
        same = math.isclose(found, expected, rel_tol=MEASURE_TOLERANCE, abs_tol=MEASURE_TOLERANCE)
    else:
        same = found == expected
    return [] if same else [f"{where}: {found!r:.200} instead of {expected!r:.200}"]


def sums(tree: Path) -> dict[str, str]:
    """Return a sum of every file."""
    return {path.relative_to(tree).as_posix(): sum_of(path) for path in _files(tree)}


def sum_of(path: Path) -> str:
    """Return the sum of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _files(tree: Path) -> Iterator[Path]:
    return iter(sorted(path for path in tree.rglob("*") if path.is_file()))


def _loaded(tree: Path) -> str:
    """Return one sum of the elements of all tensors."""
    dump, found = rankdump.open(tree), hashlib.sha256()
    for entry in dump.tensors():
        array = dump.load(entry)
        found.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
    return found.hexdigest()


def asked(arguments: list[str]) -> dict[str, Any]:
    """Return what a command prints as JSON, but for sentences, places and durations."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = run_command_line([*arguments, "--json"])
    return {"code": code, **_lasting(json.loads(out.getvalue() or "{}"))}


def _lasting(value: Any) -> Any:
    if isinstance(value, dict):
        left_out = _SENTENCES | _HERE
        return {name: _lasting(item) for name, item in value.items() if name not in left_out}
    return [_lasting(item) for item in value] if isinstance(value, list) else value


def _as_text(data: bytes) -> dict[str, str]:
    with contextlib.suppress(UnicodeDecodeError):
        return {"text": data.decode()}
    return {"base64": base64.b64encode(data).decode()}


def _from_text(what: dict[str, str]) -> bytes:
    return what["text"].encode() if "text" in what else base64.b64decode(what["base64"])


def _in_lines(value: Any, depth: int = 3) -> str:
    """Return JSON in which an item of the upper levels is a line: it is small, and can be read."""
    if not depth or not value or not isinstance(value, dict | list):
        return json.dumps(value)
    if isinstance(value, list):
        return "[\n" + ",\n".join(json.dumps(item) for item in value) + "\n]"
    items = (f"{json.dumps(name)}: {_in_lines(item, depth - 1)}" for name, item in value.items())
    return "{\n" + ",\n".join(items) + "\n}" + "\n" * (depth == 3)


if __name__ == "__main__":
    for each in sys.argv[2:]:
        keep(Path(each), sys.argv[1])
