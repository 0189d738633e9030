"""Version of the library, the installed package, the commands and the packages."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

from click.testing import CliRunner

import rankdump
from rankdump._cli.command_group import run_command_line
from rankdump._kernels.kernel_functions import KERNELS
from rankdumpd.main import main as rankdumpd

ROOT = Path(__file__).parents[2]


def test_commands_and_package_have_the_version_of_the_library(capsys):
    """`make setup` installs again when the version changes."""
    assert version("rankdump") == rankdump.__version__
    assert run_command_line(["--version"]) == 0
    kernels = f"kernels: {KERNELS.description}"
    assert capsys.readouterr().out == f"rankdump, version {rankdump.__version__}\n{kernels}\n"
    said = CliRunner().invoke(rankdumpd, ["--version"])
    assert said.output == f"rankdumpd, version {rankdump.__version__}\n{kernels}\n"


def test_debian_kubernetes_and_changelog_have_the_version():
    debian = (ROOT / "deploy/debian/changelog").read_text()
    assert debian.startswith(f"rankdump ({rankdump.__version__}-")
    images = [p.read_text() for p in (ROOT / "deploy/kubernetes").iterdir()]
    tags = set(re.findall(r"/rankdump:(\S+)", "".join(images)))
    assert tags == {rankdump.__version__}
    released = re.findall(r"^## \[(\d\S+)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert released[0][0] == rankdump.__version__
    assert "version =" not in (ROOT / "pyproject.toml").read_text().partition("[tool.")[0]
