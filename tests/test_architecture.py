"""The structure of the code: import contracts, light imports, no unpickling, and the tables of
docs/architecture.md.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIBRARY, DAEMON = ROOT / "client" / "rankdump", ROOT / "daemon" / "rankdumpd"
SOURCES = sorted(
    path for half in (LIBRARY, DAEMON) for path in half.rglob("*.py") if "v1" not in path.parts
)
PAGE = (ROOT / "docs" / "architecture.md").read_text()
THREADS = {"training", "sender", "connection", "reader", "worker", "committer", "rpc"}
MAX_FILES, MAX_VALUES = 45, 8
"""Limits of the way of one tensor."""
HEAVY = {"click", "google.protobuf", "grpc", "mindspore", "numpy", "rich", "torch", "zstandard"}


def test_import_contracts():
    """The layers of docs/architecture.md are contracts in pyproject.toml."""
    tool = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_import_of_the_library_is_light():
    """A script without a plan pays for nothing but the names."""
    code = "import rankdump, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert HEAVY.isdisjoint(done.stdout.split())


def test_nothing_unpickles():
    """No read path ever runs code from a file."""
    for path in SOURCES:
        text = path.read_text()
        assert "import pickle" not in text, path
        assert "allow_pickle=True" not in text, path


# -- tables of docs/architecture.md


def table(heading: str) -> list[dict[str, str]]:
    """Return the rows of the table below a heading, by column."""
    section = PAGE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    titles, _, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in lines)
    assert rows, heading
    return [dict(zip(titles, row, strict=True)) for row in rows]


def code_of(cell: str) -> str:
    """Return what stands between the backticks of a cell."""
    found = re.fullmatch(r"`([^`]+)`", cell)
    assert found, cell
    return found[1]


def source(name: str) -> Path:
    """Return the module that the page names: `_` begins those of the library."""
    return (LIBRARY if name.startswith("_") else DAEMON) / name


@cache
def defined(path: Path) -> frozenset[str]:
    """Return the names that a module defines: classes, methods, functions and constants."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
            methods = (each for each in node.body if isinstance(each, ast.FunctionDef))
            names |= {f"{node.name}.{each.name}" for each in methods}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(names)


@cache
def defined_anywhere() -> frozenset[str]:
    """Return the names that any module defines, and the messages of the wire."""
    messages = (LIBRARY / "wire" / "v1" / "agent_pb2.pyi").read_text()
    return frozenset().union(
        re.findall(r"^class (\w+)\(", messages, re.MULTILINE), *map(defined, SOURCES)
    )


WAY = table("The way of one tensor")


@pytest.mark.parametrize(
    ("heading", "column"),
    [
        ("The way of one tensor", "function"),
        ("States of a record on the agent", "class"),
        ("Where do I find", "name"),
    ],
)
def test_table_names_code_that_exists(heading: str, column: str):
    for row in table(heading):
        path, name = source(code_of(row["file"])), code_of(row[column])
        assert path.is_file(), row
        assert name in defined(path), row


def test_tables_mention_only_classes_that_exist():
    for heading in ("The way of one tensor", "States of a record on the agent"):
        for row in table(heading):
            for name in re.findall(r"`([A-Z][a-z]\w+(?:\.\w+)?)`", "|".join(row.values())):
                assert name in defined_anywhere(), row


def test_way_of_a_tensor_has_the_stated_length():
    files = {code_of(row["file"]) for row in WAY}
    stated = re.search(r"These are (\d+) files\. (\d+) values describe[^:]*: (.*?);", PAGE, re.S)
    assert stated
    values = re.findall(r"`(\w+)`", stated[3])
    handed = {code_of(row["hands on"]) for row in WAY if row["hands on"]}
    assert (len(files), len(values)) == (int(stated[1]), int(stated[2]))
    assert len(files) <= MAX_FILES
    assert len(values) <= MAX_VALUES
    assert set(values) <= handed
    assert {row["thread"] for row in WAY} == THREADS


def test_packages_have_the_layers_of_the_contracts():
    """Every package of a contract has its row, with the place that the contract gives it."""
    contracts = re.findall(
        r'^containers = \["([\w.]+)"\].*?^layers = (\[.*?\])\n\n',
        (ROOT / "pyproject.toml").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    expected: dict[str, int] = {}
    for container, layers in contracts:
        prefix = container.partition(".")[2]
        for number, layer in enumerate(reversed(ast.literal_eval(layers)), 1):
            for name in re.findall(r"\w+", layer):
                if container != "rankdump" or name.startswith("_"):
                    expected[f"{prefix}.{name}" if prefix else name] = number
    expected = {name: at for name, at in expected.items() if not name.startswith("_analysis.")}
    listed = {code_of(row["package"]): int(row["layer"]) for row in table("Packages")}
    assert listed == expected
