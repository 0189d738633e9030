"""Tests of rank metadata: configuration files and kernel arguments."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rankdump._config.config_file import load_config_plan
from rankdump._core.plan import (
    ContentSettings,
    DumpPlan,
    IterationSelection,
    OperatorSelection,
    OutputSettings,
    TensorSelection,
)
from rankdump._core.session_protocol import KernelArguments, OperatorArguments
from rankdump._layout.profile import PROFILES
from rankdumpd.agent.storage import rank_files
from rankdumpd.agent.storage.rank_files import render_configuration
from rankdumpd.agent.storage.tree import DumpTree

PLAN = DumpPlan(output=OutputSettings(root="/dump", net_name="Res-1"))


def tree(root: Path) -> DumpTree:
    return DumpTree(str(root), file_mode=0o440, folder_mode=0o750)


@pytest.mark.parametrize(
    ("profile", "version"), [("ms2.0", "2.0.0"), ("ms2.3", "2.3.0"), ("ms2.4", "2.4.0")]
)
def test_config_json_has_version_of_profile(make_request, tmp_path, profile, version):
    """Readers compare the release with their own."""
    rank_files.write_rank_metadata(tree(tmp_path), make_request(), PLAN, PROFILES[profile])
    body = (tmp_path / "rank_0/.dump_metadata/config.json").read_bytes()
    assert body == f'{{"device_target":"CPU","ms_version":"{version}"}}'.encode()


def test_configuration_of_user_is_copied_unchanged(make_request, tmp_path):
    """Where there is a file, it is that file."""
    request = make_request(config_source=b"{ }\n")
    rank_files.write_rank_metadata(tree(tmp_path), request, PLAN, PROFILES["ms2.3"])
    assert (tmp_path / "rank_0/.dump_metadata/data_dump.json").read_bytes() == b"{ }\n"


@pytest.mark.parametrize("source", [b'{"dump": {}}\n', b""])
def test_configuration_of_other_dialect_keeps_its_name(make_request, tmp_path, source):
    """`acl.json` is the user's, unchanged; `data_dump.json` is written for MindInsight."""
    request = make_request(config_source=source)
    rank_files.write_rank_metadata(
        tree(tmp_path), request, replace(PLAN, dialect="acl"), PROFILES["ms2.3"]
    )
    folder = tmp_path / "rank_0/.dump_metadata"
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert found.pop("acl.json", b"") == source
    assert sorted(found) == ["config.json", "data_dump.json"]
    assert json.loads(found["data_dump.json"])["common_dump_settings"]["net_name"] == "Res-1"


def test_plan_of_tf_adapter_gets_only_data_dump_json(make_request, tmp_path):
    """Its configuration is an object in the script."""
    request = make_request(config_source=b"")
    rank_files.write_rank_metadata(
        tree(tmp_path), request, replace(PLAN, dialect="tf"), PROFILES["ms2.3"]
    )
    names = sorted(path.name for path in (tmp_path / "rank_0/.dump_metadata").iterdir())
    assert names == ["config.json", "data_dump.json"]


def test_plan_without_file_gets_data_dump_json(make_request, tmp_path):
    """MindInsight passes over a rank whose configuration it cannot read."""
    request = make_request(config_source=b"", device=3)
    rank_files.write_rank_metadata(tree(tmp_path), request, PLAN, PROFILES["ms2.3"])
    body = json.loads((tmp_path / "rank_0/.dump_metadata/data_dump.json").read_text())
    common = body["common_dump_settings"]
    assert (common["net_name"], common["input_output"]) == ("Res-1", 0)
    assert (common["iteration"], common["support_device"]) == ("all", [3])
    assert body["e2e_dump_settings"]["enable"] is True


@pytest.mark.parametrize(
    ("selection", "common"),
    [
        (TensorSelection(), {"dump_mode": 0, "kernels": [], "op_debug_mode": 0}),
        (TensorSelection(operators=OperatorSelection(False, marked=True)), {"dump_mode": 2}),
        (
            TensorSelection(operators=OperatorSelection(False, ("a/b-op0",), ("conv",), ("a.*b",))),
            {"dump_mode": 1, "kernels": ["a/b-op0", "conv", "name-regex(a.*b)"]},
        ),
        (TensorSelection(IterationSelection("0|5-8", ((0, 0), (5, 8)))), {"iteration": "0|5-8"}),
        (TensorSelection(devices=(1, 2)), {"support_device": [1, 2]}),
        (TensorSelection(outputs=False), {"input_output": 1}),
        (TensorSelection(inputs=False), {"input_output": 2}),
        (
            TensorSelection(trigger="overflow", overflow_limit=4),
            {"op_debug_mode": 3, "overflow_number": 4},
        ),
        (TensorSelection(trigger="exception"), {"op_debug_mode": 4}),
        (TensorSelection(initial_iteration=9), {"initial_iteration": 9}),
    ],
)
def test_configuration_contains_selection(selection, common):
    """Every part of a selection has its key."""
    plan = DumpPlan(output=OutputSettings(root="/dump"), selection=selection)
    body = json.loads(render_configuration(plan, 0))["common_dump_settings"]
    assert {key: body[key] for key in common} == common
    assert ("overflow_number" in body) == (selection.trigger == "overflow")


def test_configuration_contains_content():
    """Every part of a content has its key."""
    content = ContentSettings("full", ("max", "md5"), True, "low", 20, True)
    body = json.loads(render_configuration(DumpPlan(OutputSettings(root="/d"), content=content), 0))
    assert body["common_dump_settings"]["saved_data"] == "full"
    assert body["common_dump_settings"]["statistic_category"] == ["max", "md5"]
    assert body["e2e_dump_settings"] == {
        "enable": True,
        "trans_flag": True,
        "stat_calc_mode": "device",
        "device_stat_precision_mode": "low",
        "save_kernel_args": True,
        "sample_mode": 1,
        "sample_num": 20,
    }


def test_configuration_of_other_layouts():
    """MindSpore's asynchronous one is not the one that `enable` switches on."""
    output = OutputSettings(root="/d", net_name="", layout="cann", file_format="bin")
    body = json.loads(render_configuration(DumpPlan(output), 0))
    assert body["e2e_dump_settings"]["enable"] is False
    common = body["common_dump_settings"]
    assert (common["file_format"], common["net_name"]) == ("bin", "Net")


@pytest.mark.parametrize(
    ("selection", "content"),
    [
        (TensorSelection(), ContentSettings()),
        (
            TensorSelection(
                operators=OperatorSelection(False, ("a/b-op0",), ("conv",), ("a.*b",)), inputs=False
            ),
            ContentSettings("full", ("max", "md5"), sample_elements=20, kernel_arguments=True),
        ),
        (TensorSelection(), ContentSettings("statistic", on_device=True, precision="low")),
        (TensorSelection(trigger="overflow", overflow_limit=4), ContentSettings("statistic")),
        (TensorSelection(trigger="exception"), ContentSettings()),
        (TensorSelection(operators=OperatorSelection(False, marked=True)), ContentSettings()),
        (
            TensorSelection(IterationSelection("0|5-8", ((0, 0), (5, 8))), initial_iteration=3),
            ContentSettings(),
        ),
    ],
)
def test_configuration_yields_same_plan_when_read(tmp_path, selection, content):
    """Read as a user's own file, it gives the same plan again."""
    selection = replace(selection, devices=(0,))
    plan = DumpPlan(OutputSettings(root="/dump"), selection, content)
    path = tmp_path / "data_dump.json"
    path.write_bytes(render_configuration(plan, 0))
    again, _ = load_config_plan(path, {})
    assert (again.selection, again.content) == (selection, content)


def test_arguments_are_written_to_iteration_folder(tmp_path):
    """Named after type and scope, four blanks deep, sorted, every value a text."""
    arguments = KernelArguments(
        7,
        (
            OperatorArguments(
                1, "MatMul", "Default/fc.1-Dense/MatMul-op0", {"b": "True", "a": "\u00e9\n"}
            ),
        ),
    )
    told = rank_files.write_arguments(
        tree(tmp_path), arguments, folder_of="a/{}/7".format, mark="m"
    )
    assert told == []
    path = tmp_path / "a/1/7/MatMul.Default_fc_1-Dense_MatMul-op0.json"
    assert path.read_text() == '{\n    "a": "\u00e9\\n",\n    "b": "True"\n}'


def test_arguments_with_too_long_name_are_returned(tmp_path):
    """They are not written under another name; the others are written."""
    operators = tuple(
        OperatorArguments(0, "T", name, {}) for name in ("Default/" + "x" * 250, "../b\\ c")
    )
    told = rank_files.write_arguments(
        tree(tmp_path), KernelArguments(0, operators), folder_of=lambda _: "a/0", mark="m"
    )
    assert told == ["Default/" + "x" * 250]
    assert [p.name for p in (tmp_path / "a/0").iterdir()] == ["T.___b__c.json"]
