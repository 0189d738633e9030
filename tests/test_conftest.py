"""What tests/conftest.py does with every run: nothing is skipped on CI, slow modules begin."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MAKEFILE = HERE.parent / "Makefile"
TESTS = """
import pytest
def test_passes(): pass
def test_cannot_run(): pytest.skip("no such device")
"""

FAILING = """
import pytest
@pytest.fixture
def broken(): raise OSError("no disk")
@pytest.fixture
def left():
    yield
    raise OSError("still open")
def test_passes(): pass
def test_fails(): assert not "wrong"
def test_cannot_begin(broken): pass
def test_cannot_end(left): pass
def test_is_skipped(): pytest.skip("no such device")
"""

SHARING = """
import pytest
@pytest.fixture(scope="module")
def shared(request):
    with open(request.path.parent / "made", "a") as made:
        made.write("once\\n")
@pytest.mark.parametrize("number", range(8))
def test_shares(shared, number): pass
"""


def run(folder: Path, *options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run tests of a folder under the settings and the conftest of this one."""
    shutil.copyfile(HERE / "conftest.py", folder / "conftest.py")
    settings = ["-c", str(HERE.parent / "pyproject.toml"), "--rootdir", str(folder)]
    command = [sys.executable, "-m", "pytest", *settings, "-p", "no:cacheprovider", *options]
    return subprocess.run(
        [*command, str(folder)],
        env={**os.environ, **environ},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_skipped_test_fails_the_gate_only(tmp_path: Path, workers: str):
    """Also where pytest-xdist runs the tests in other processes."""
    (tmp_path / "test_skipping.py").write_text(TESTS)
    gate = run(tmp_path, "-n", workers, CI="true")
    assert gate.returncode == pytest.ExitCode.TESTS_FAILED, gate.stdout + gate.stderr
    assert "CI=true and 1 tests were skipped" in gate.stdout
    at_home = run(tmp_path, "-n", workers, CI="")
    assert at_home.returncode == 0, at_home.stdout + at_home.stderr


@pytest.mark.parametrize("workers", ["0", "2"])
def test_failure_before_or_after_a_test_is_reported(tmp_path: Path, workers: str):
    """Processes of pytest-xdist leave out what passes, and nothing else."""
    (tmp_path / "test_failing.py").write_text(FAILING)
    done = run(tmp_path, "-n", workers, CI="")
    assert "1 failed, 2 passed, 1 skipped, 2 errors" in done.stdout
    assert all(text in done.stdout for text in ("wrong", "no disk", "still open"))


def test_what_a_module_shares_is_made_by_one_process(tmp_path: Path):
    (tmp_path / "test_sharing.py").write_text(SHARING)
    (parallel,) = re.findall("^PARALLEL := (.*)", MAKEFILE.read_text(), re.MULTILINE)
    done = run(tmp_path, *parallel.replace("$(JOBS)", "2").split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "made").read_text() == "once\n"


def test_modules_with_slow_tests_begin_and_folders_mark(tmp_path: Path):
    for name in ("a", "integration"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "test_quick.py").write_text("def test_quick(): pass\n")
    slow = "import pytest\ndef test_first(): pass\n@pytest.mark.slow\ndef test_slow(): pass\n"
    (tmp_path / "test_z.py").write_text(slow)
    listed = run(tmp_path, "--collect-only").stdout.splitlines()
    assert [line.rpartition("::")[2] for line in listed if "::" in line] == [
        *("test_first", "test_slow", "test_quick", "test_quick"),
    ]
    chosen = run(tmp_path, "--collect-only", "-m", "process").stdout
    assert "integration/test_quick.py" in chosen
    assert "a/test_quick.py" not in chosen
