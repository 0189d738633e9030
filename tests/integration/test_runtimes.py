"""Generated code and daemon on the oldest and the newest allowed runtimes."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
ROOT = Path(__file__).parent.parent.parent
JOB = Path(__file__).parent / "jobs" / "round_trip.py"


FIRST_WHEELS = {
    (3, 12): {"numpy": "1.26.0"},
    (3, 13): {"numpy": "2.1.0", "grpcio": "1.66.2", "zstandard": "0.23", "xxhash": "3.5"},
}
"""The oldest versions that have wheels for a Python younger than the oldest that are allowed."""


def requirements(*, oldest: bool) -> list[str]:
    """Return the requirements of pyproject.toml, at one end of each range."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = project["dependencies"] + extras["cli"] + extras["daemon"]
    # An extra names another one as "rankdump[cli]", which no index holds.
    lines = [line for line in lines if not line.startswith("rankdump[")]
    plain = [line.partition(";")[0].strip() for line in lines if "python_version" not in line]
    if sys.version_info < (3, 11):
        plain.append("tomli>=2.0")
    return list(map(lowest, plain)) if oldest else plain


def lowest(line: str) -> str:
    """Return the lowest version of a requirement that need not be built from source."""
    name, _, version = line.partition(">=")
    return f"{name}=={FIRST_WHEELS.get(sys.version_info[:2], {}).get(name, version)}"


@pytest.mark.parametrize("end", ["oldest", "newest"])
def test_round_trip_works_on_oldest_and_newest_runtimes(end: str, socket_folder: Path):
    """The lower bounds in pyproject.toml suffice, and the newest versions work."""
    home = ROOT / "build" / "runtimes" / end
    wanted = requirements(oldest=end == "oldest")
    python = home / "bin" / "python"
    stamp = home / "requirements.txt"
    if not stamp.exists() or stamp.read_text().split("\n") != wanted:
        shutil.rmtree(home, ignore_errors=True)
        # Neither a pip of its own nor compiled modules: most of them are never imported.
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-compile"]
        pip += ["--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--only-binary", ":all:", "--upgrade", *wanted], check=True)
        subprocess.run([*pip, "--no-deps", "--editable", ROOT], check=True)
        stamp.write_text("\n".join(wanted))
    done = subprocess.run(
        [python, "-W", "error::DeprecationWarning:rankdump", JOB, socket_folder],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if end == "oldest":
        grpcio = next(line for line in wanted if line.startswith("grpcio=="))
        assert re.sub("==", " ", grpcio) in done.stdout
