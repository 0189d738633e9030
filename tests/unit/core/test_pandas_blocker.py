"""Processes of our own do without pandas, which pyarrow would import."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCKED = "from rankdump._core.pandas_blocker import leave_pandas_out; leave_pandas_out()"
ARRAY = "import pyarrow; pyarrow.array([1, 2])"
MAPPED = "sys.exit('/pandas/' in Path('/proc/self/maps').read_text())"


@pytest.mark.parametrize(("begin", "status"), [("pass", 1), (BLOCKED, 0)])
def test_pyarrow_does_not_import_pandas(begin: str, status: int):
    """Law: where pandas is installed, a daemon that writes Parquet takes no more memory."""
    code = f"import sys; from pathlib import Path; {begin}; {ARRAY}; {MAPPED}"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == status
