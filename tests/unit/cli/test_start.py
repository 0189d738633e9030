"""Modules that a command loads: only those it needs."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

DAEMONS = {"grpc", "google.protobuf", "asyncio", "rankdump._wire", "rankdump._session"}
LOADED = "import json, sys; print(json.dumps(list(sys.modules)))"


def loaded(code: str, *arguments: str) -> set[str]:
    """Return the modules that are there when some code has run."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{LOADED}", *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "command", [["ls"], ["status"], ["forecast"], ["stats"], ["find-source", "loss"]], ids=str
)
def test_reader_commands_do_not_load_grpc(tree, command):
    """They take longer to load than most of these take to answer."""
    tree.tensor(0, 0, "Default/a-A/A-op0", np.ones(1, np.float32))
    tree.graph(0, "subgraph @kernel_graph0() {\n}\n")
    tree.complete(0, 0, world_size=1)
    group = "from rankdump._cli.command_group import run_command_line"
    code = f"import sys; {group}; run_command_line(sys.argv[1:])"
    name, *rest = command
    assert loaded(code, name, str(tree.root), *rest).isdisjoint(DAEMONS)


def test_import_of_rankdump_loads_no_other_library():
    """Not even numpy: a script that imports it and has no plan pays nothing."""
    found = loaded("import rankdump")
    assert found.isdisjoint({*DAEMONS, "numpy", "zstandard", "click", "rich"})
    assert {name for name in found if name.startswith("rankdump")} == {"rankdump"}


def test_dir_lists_public_names_before_use():
    """`dir(rankdump)` and tab completion know what is loaded on use."""
    code = (
        "import rankdump\n"
        "names = {*rankdump.__all__, 'acl', 'integrations', 'migrator', 'tf'}\n"
        "assert names <= set(dir(rankdump)), dir(rankdump)\n"
        "for name in names: getattr(rankdump, name)\n"
        "from rankdump import *; attach, open, compare\n"
        "assert not hasattr(rankdump, 'nothing')"
    )
    assert "rankdump._session" in loaded(code)
