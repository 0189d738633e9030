"""data_dump.json against mindspore-dump.md: every row of 1.2 to 1.10 that a parser can be asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import rows_of_common, rows_of_modes, rows_of_selection
from support.configuration_row import ConfigurationRow

from rankdump._config.mindspore_config import MINDSPORE_KEYS

ROWS = [*rows_of_common.ROWS, *rows_of_selection.ROWS, *rows_of_modes.ROWS]


@pytest.mark.parametrize("row", ROWS, ids=[row.source[:70] for row in ROWS])
def test_row(tmp_path: Path, row: ConfigurationRow):
    """Accepted, accepted with exactly these warnings, or refused by key and value."""
    row.check(tmp_path)


def test_every_key_has_its_rows():
    """No key of either section is without a row that refuses it."""
    refused = {row.refused for row in ROWS}
    assert {f"{name}.{key}" for name, keys in MINDSPORE_KEYS.items() for key in keys} <= refused


def test_every_section_has_its_rows():
    """Sections 1.2 to 1.10 all stand in the table."""
    found = {row.source.split()[0].rstrip(":") for row in ROWS}
    assert {f"1.{number}" for number in range(2, 11)} <= found
