"""data_dump.json against a table of MindSpore's documented keys and of what it does with each."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import rows_of_common, rows_of_modes, rows_of_selection
from support.configuration_row import ConfigurationRow

from rankdump._config.mindspore_config import MINDSPORE_KEYS

ROWS = [*rows_of_common.ROWS, *rows_of_selection.ROWS, *rows_of_modes.ROWS]


@pytest.mark.parametrize("row", ROWS, ids=[row.source[:70] for row in ROWS])
def test_mindspore_config_row_is_accepted_or_rejected_as_listed(
    tmp_path: Path, row: ConfigurationRow
):
    """Accepted, accepted with exactly these warnings, or rejected with key and value."""
    row.check(tmp_path)


def test_mindspore_rows_reject_every_key():
    """Each key of both sections has a row that rejects it."""
    refused = {row.refused for row in ROWS}
    assert {f"{name}.{key}" for name, keys in MINDSPORE_KEYS.items() for key in keys} <= refused


def test_mindspore_rows_cover_every_section():
    """The table has rows for sections 1.2 to 1.10 of the keys' description."""
    found = {row.source.split()[0].rstrip(":") for row in ROWS}
    assert {f"1.{number}" for number in range(2, 11)} <= found
