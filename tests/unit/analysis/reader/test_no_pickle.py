"""No reader of a tree unpickles its content."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import numpy as np
import pytest

import rankdump
from rankdump import reader
from rankdump._cli.command_group import run_command_line
from rankdump.errors import CorruptedError

SOURCES = sorted(Path(rankdump.__file__).parent.rglob("*.py"))
UNSAFE = {"pickle", "cPickle", "dill", "joblib", "shelve", "marshal", "cloudpickle"}
LOADERS = {"load", "memmap", "fromfile", "loadtxt", "genfromtxt"}


class Trap:
    """An object that leaves a file behind when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.fixture
def trapped(tree, tmp_path):
    """A tensor file that holds a pickle, with a header that says so."""
    path = tree.tensor(0, 0, "Default/a-A/A-op0", np.ones(1), codec="none")
    with path.open("wb") as file:
        np.save(file, np.array([Trap(tmp_path / "sprung")], dtype=object), allow_pickle=True)
    return path


def test_pickle_trap_works(trapped, tmp_path):
    """Unpickled on purpose, it leaves its mark: the next test can fail."""
    with trapped.open("rb") as file:
        np.load(file, allow_pickle=True)
    assert (tmp_path / "sprung").exists()


def test_no_reader_unpickles(trapped, tree, tmp_path):
    """Every way to read a tree refuses the file, or passes it by."""
    dump = reader.open(tree.root)
    with pytest.raises(CorruptedError):
        dump.load(dump.tensors()[0])
    with pytest.raises(CorruptedError):
        reader.load_file(trapped)
    for command in ("ls", "stats"):
        assert run_command_line([command, str(tree.root)]) == 1
    assert run_command_line(["show", str(trapped)]) == 1
    assert not (tmp_path / "sprung").exists()


def test_pickle_without_a_header_is_damage(tree, tmp_path):
    """Neither is a file without any header run."""
    path = tree.tensor(0, 0, "Default/a-A/A-op0", np.ones(1), codec="none")
    path.write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(CorruptedError, match="not an npy file"):
        reader.load_file(path)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_no_module_can_unpickle(path):
    """No pickle is imported, numpy's loaders are not called, nobody allows pickles."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & UNSAFE
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in UNSAFE
        elif isinstance(node, ast.Call):
            assert "allow_pickle" not in {keyword.arg for keyword in node.keywords}
            called = node.func
            if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
                assert not (called.value.id in ("np", "numpy") and called.attr in LOADERS)
