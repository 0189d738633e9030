"""acl.json against a table of CANN's documented keys, defaults, exclusions and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import rows_of_acl, rows_of_acl_errors
from support.acl_configurations import AclRow

from rankdump._config.acl_section import ACL_KEYS, ITEM_KEYS
from rankdump._config.config_file import load_config_plan
from rankdump.errors import ConfigError

EXAMPLE = Path(__file__).parents[3] / "examples" / "acl.json"
ROWS = [*rows_of_acl_errors.ROWS, *rows_of_acl.ROWS]


@pytest.mark.parametrize("row", ROWS, ids=[row.source[:70] for row in ROWS])
def test_acl_config_row_is_accepted_or_rejected_as_listed(tmp_path: Path, row: AclRow):
    """Accepted with exactly these warnings, or rejected with key, value and CANN's code."""
    row.check(tmp_path)


def test_acl_rows_reject_every_key():
    refused = {row.refused.rpartition(".")[2].partition("[")[0] for row in rows_of_acl_errors.ROWS}
    assert {*ACL_KEYS, *ITEM_KEYS} <= refused


def test_acl_rows_cover_every_documented_error():
    """Each error that CANN documents for acl.json is in the table."""
    found = {row.source.partition(":")[0] for row in rows_of_acl_errors.ROWS}
    assert set(rows_of_acl_errors.VIOLATIONS) <= found


@pytest.mark.parametrize(("path", "word"), [("$HOME/output", "$HOME"), ("~/dump", "~"), ("a~", "")])
def test_dump_path_error_names_an_unexpanded_shell_word(tmp_path: Path, path: str, word: str):
    """Neither rankdump nor CANN expands it."""
    file = tmp_path / "acl.json"
    file.write_text(json.dumps({"dump": {"dump_path": path, "dump_op_switch": "on"}}))
    with pytest.raises(ConfigError) as caught:
        load_config_plan(file, {})
    ending = f": rankdump does not expand {word}" if word else ""
    assert str(caught.value).endswith(f"allowed: a folder that exists{ending} (EP0003)")


def test_dump_path_may_name_a_folder_with_a_dollar_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "$HOME").mkdir()
    file = tmp_path / "acl.json"
    file.write_text(json.dumps({"dump": {"dump_path": "$HOME", "dump_op_switch": "on"}}))
    assert load_config_plan(file, {})[0].output.root == str(tmp_path / "$HOME")


def test_acl_example_is_accepted_without_warnings():
    """It gives the plan that docs/ascend.md describes."""
    plan, _ = load_config_plan(EXAMPLE, {"RANKDUMP_OUTPUT": "/o"})
    assert plan.warnings == ()
    assert [name for name, _ in plan.selection.models] == ["Encoder", "Head"]
    (excluded,) = plan.selection.models[0][1].without_names
    assert excluded.positions == ("output0",)
