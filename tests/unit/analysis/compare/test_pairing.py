"""Pairs of calls: each rule, and the effect of an extra call."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.diff_programs import call, names, program

from rankdump._analysis.compare.call_names import (
    OPERATOR_SYNONYMS,
    normalize_operator_type,
    parse_module_path,
    read_name_mapping,
    strip_sharded_classes,
)
from rankdump._analysis.compare.call_pairs import check_pairing_rules, pair_calls
from rankdump._analysis.compare.report import ComparisonSettings
from rankdump.errors import ConfigError

CONV = "Default/network-Net/conv1-Conv2d/Conv2d-op0"
RELU = "Default/network-Net/act-ReLU/ReLU-op0"
FC = "Default/network-Net/fc-Linear/Linear-op0"
DEFAULT = ComparisonSettings()


def test_exact_rule_pairs_same_names_across_other_calls():
    a, b = program(CONV, RELU, FC), program(CONV, "Default/extra/Tanh-op0", RELU, FC)
    assert names(pair_calls(a, b, DEFAULT)) == [
        (CONV, CONV, "exact"),
        ("", "Default/extra/Tanh-op0", ""),
        (RELU, RELU, "exact"),
        (FC, FC, "exact"),
    ]


def test_exact_rule_pairs_calls_of_one_name_in_order():
    a, b = program(CONV, CONV), program(CONV, CONV, CONV)
    found = pair_calls(a, b, DEFAULT)
    assert [(p.a and p.a.position, p.b and p.b.position) for p in found] == [
        (0, 0),
        (1, 1),
        (None, 2),
    ]


def test_exact_rule_equates_the_spelling_of_files():
    spelt = CONV.replace("/", "_")
    found = pair_calls(program(CONV, RELU), program(call(spelt, "Conv2d"), RELU), DEFAULT)
    assert names(found)[0] == (CONV, spelt, "exact")


@pytest.mark.parametrize(
    "spelt", [lambda name: name, lambda name: name.replace("/", "_")], ids=["scopes", "files"]
)
def test_exact_rule_ignores_classes_that_sharding_made(spelt):
    """Two calls of each name, and one whose own class begins with the prefix already."""
    plain = (
        "Default/network-Net/Net-op0",
        "Default/network-Net/layers-ModuleList/0-Block/Block-op0",
        "Default/network-Net/layers-ModuleList/0-Block/up-Linear/Linear-op0",
        "Default/network-Net/tail-FSDPTail/FSDPTail-op0",
        "Gradients/Default/network-Net/Net-op0",
    )
    sharded = (
        "Default/network-FSDPNet/FSDPNet-op0",
        "Default/network-FSDPNet/layers-ModuleList/0-FSDPBlock/FSDPBlock-op0",
        "Default/network-FSDPNet/layers-ModuleList/0-FSDPBlock/up-Linear/Linear-op0",
        "Default/network-FSDPNet/tail-FSDPFSDPTail/FSDPFSDPTail-op0",
        "Gradients/Default/network-FSDPNet/FSDPNet-op0",
    )
    a = program(*(call(spelt(name), _type_of(name)) for name in sharded))
    b = program(*(call(spelt(name), _type_of(name)) for name in plain))
    assert names(pair_calls(a, b, DEFAULT)) == [
        (spelt(own), spelt(other), "exact") for own, other in zip(sharded, plain, strict=True)
    ]


def _type_of(name: str) -> str:
    return name.rpartition("/")[2].partition("-")[0]


def test_strip_sharded_classes_leaves_other_names():
    for name in (
        "Default/network-Net/fsdp-Linear/Linear-op0",
        "MyFSDPBlock",
        "Replication",
        "FSDP",
    ):
        assert strip_sharded_classes(name) == name
    assert strip_sharded_classes("ReplicateLinear") == "Linear"


def api(*apis: str, start: int = 0) -> list[str]:
    """Names of calls, numbered as api_dump numbers them."""
    counts: dict[str, int] = {}
    found: list[str] = []
    for each in apis:
        number = counts[each] = counts.get(each, start - 1) + 1
        found.append(f"{each}_{number}_forward")
    return found


def apis(*calls: str, start: int = 0):
    kinds = [each.rsplit("_", 2)[0] for each in api(*calls, start=start)]
    pairs = zip(api(*calls, start=start), kinds, strict=True)
    return program(*(call(name, kind) for name, kind in pairs))


def test_type_rule_pairs_api_calls_with_shifted_numbers():
    """Another iteration of the same program: every number is another one."""
    a, b = apis("NN_Conv2d", "NN_Linear"), apis("NN_Conv2d", "NN_Linear", start=7)
    assert names(pair_calls(a, b, DEFAULT)) == [
        ("NN_Conv2d_0_forward", "NN_Conv2d_7_forward", "type"),
        ("NN_Linear_0_forward", "NN_Linear_7_forward", "type"),
    ]


def test_extra_api_call_does_not_shift_others():
    """Without care `NN_Linear_1` would meet the extra one, whose number it has."""
    a = apis("NN_Linear", "Functional_relu", "NN_Linear", "Tensor_mean")
    b = apis("NN_Linear", "NN_Linear", "Functional_relu", "NN_Linear", "Tensor_mean")
    found = pair_calls(a, b, DEFAULT)
    assert [(one, other) for one, other, _ in names(found)] == [
        ("NN_Linear_0_forward", "NN_Linear_0_forward"),
        ("", "NN_Linear_1_forward"),
        ("Functional_relu_0_forward", "Functional_relu_0_forward"),
        ("NN_Linear_1_forward", "NN_Linear_2_forward"),
        ("Tensor_mean_0_forward", "Tensor_mean_0_forward"),
    ]
    assert [rule for *_, rule in names(found)] == ["sequence", "", "exact", "type", "exact"]


def test_type_rule_pairs_two_frameworks():
    a = apis("NN_Conv2d", "NN_ReLU", "NN_Linear")
    b = apis("NN_Conv2d", "Functional_relu", "NN_Dense")
    assert [rule for *_, rule in names(pair_calls(a, b, DEFAULT))] == ["exact", "type", "type"]


def test_removed_call_is_not_paired_with_a_distant_new_call():
    a = program("Default/x/Tanh-op0", CONV, RELU)
    b = program(CONV, RELU, "Default/y/Tanh-op0")
    assert [rule for *_, rule in names(pair_calls(a, b, DEFAULT))] == ["", "exact", "exact", ""]


def test_forward_calls_are_not_paired_with_backward_calls():
    a, b = program(call("x/Tanh-op0")), program(call("Gradients/y/Tanh-op0", "Tanh"))
    assert [rule for *_, rule in names(pair_calls(a, b, DEFAULT))] == ["", ""]


@pytest.mark.parametrize(
    ("mapping", "other"),
    [
        ({FC: "Default/n/dense/Dense-op3"}, "Default/n/dense/Dense-op3"),
        ({"fc": "dense"}, "Default/network-Other/dense-Linear/Linear-op0"),
        ({"Default/network-Net/fc-Linear": "Default/n/dense"}, "Default/n/dense/Linear-op0"),
    ],
)
def test_mapping_rule_applies_to_operators_and_scopes(mapping, other):
    found = pair_calls(
        program(CONV, FC),
        program("z/A-op0", other),
        ComparisonSettings(rules=("mapping",), mapping=mapping),
    )
    assert (FC, other, "mapping") in names(found)


def test_mapping_rule_applies_to_gradients_and_api_calls():
    a = program(FC, f"Gradients/{FC}", call("NN_Linear_2_backward", "NN_Linear", backward=True))
    b = program(
        "Default/network-Net/dense-Linear/Linear-op0",
        "Gradients/Default/network-Net/dense-Linear/Linear-op0",
        call("NN_Dense_5_backward", "NN_Dense", backward=True),
    )
    mapping = {"fc": "dense", "NN_Linear_2": "NN_Dense_5"}
    found = pair_calls(a, b, ComparisonSettings(rules=("mapping",), mapping=mapping))
    assert [rule for *_, rule in names(found)] == ["mapping"] * 3


def test_mapping_file_has_lines_or_json(tmp_path):
    lines, text = tmp_path / "names.csv", tmp_path / "names.json"
    lines.write_text("# torch,mindspore\nfc, dense\n\nconv1,conv\n")
    text.write_text(json.dumps({"fc": "dense", "conv1": "conv"}))
    assert read_name_mapping(lines) == read_name_mapping(text) == {"fc": "dense", "conv1": "conv"}


@pytest.mark.parametrize("text", ["fc", "fc,", '{"fc": 1}', "{"])
def test_invalid_mapping_file_is_an_error_in_one_line(tmp_path, text):
    path = tmp_path / "names"
    path.write_text(text)
    with pytest.raises(ConfigError, match="names") as error:
        read_name_mapping(path)
    assert "\n" not in str(error.value)


def test_check_pairing_rules_rejects_unknown_rules():
    assert check_pairing_rules(["type"]) == ("type",)
    for wrong in (["types"], [], ["flow"]):
        with pytest.raises(ConfigError, match="exact, mapping, type, sequence"):
            check_pairing_rules(wrong)


def test_operator_families_of_types():
    assert normalize_operator_type("NN_Linear") == normalize_operator_type("Dense") == "linear"
    assert normalize_operator_type("Functional_relu") == normalize_operator_type("ReLU") == "relu"
    assert normalize_operator_type("Torch_matmul") == normalize_operator_type("BatchMatMul")
    assert normalize_operator_type("LAYER_relu") != normalize_operator_type("NN_ReLU")


@pytest.mark.parametrize(
    ("torch", "mindspore"),
    [
        ("Tensor___radd__", "Tensor_add"),
        ("Tensor_unsqueeze", "ExpandDims"),
        ("NN_ConvTranspose2d", "NN_Conv2dTranspose"),
        ("NN_Hardswish", "NN_HSwish"),
        ("Functional_binary_cross_entropy_with_logits", "NN_BCEWithLogitsLoss"),
        ("Tensor_clamp", "Functional_clip_by_value"),
        ("Tensor___lt__", "Less"),
        ("Tensor_float", "Cast"),
        ("Functional_scaled_dot_product_attention", "FlashAttentionScore"),
    ],
)
def test_operator_family_of_names_in_two_frameworks(torch, mindspore):
    assert normalize_operator_type(torch) == normalize_operator_type(mindspore)


def test_synonyms_are_normalized_and_final():
    for other, name in OPERATOR_SYNONYMS.items():
        assert other == other.lower().replace("_", "")
        assert normalize_operator_type(other) == normalize_operator_type(name) == name


def test_parse_module_path_of_scopes():
    assert parse_module_path(f"Gradients/{CONV}") == ("conv1",)
    assert parse_module_path("NN_Conv2d_0_forward") == ()


KINDS = st.sampled_from(["NN_Linear", "NN_ReLU", "Tensor_add", "Torch_matmul"])


@given(st.lists(KINDS, max_size=30), st.data())
def test_inserted_calls_leave_all_others_paired(before, data):
    """Law: with calls inserted into one program, every call of the other has a partner of its
    own kind, in order, and as many are left as were inserted."""
    after = list(before)
    extra = data.draw(st.lists(st.tuples(st.integers(0, 30), KINDS), max_size=8))
    for at, kind in extra:
        after.insert(at, kind)
    found = pair_calls(apis(*before), apis(*after), DEFAULT)
    both = [(p.a, p.b) for p in found if p.a is not None and p.b is not None]
    assert len(both) == len(before)
    assert all(one.op_type == other.op_type for one, other in both)
    assert len(found) == len(after)


@given(st.lists(KINDS, max_size=25), st.lists(st.integers(0, 25), max_size=6))
def test_calls_of_a_new_kind_are_left_unpaired(before, places):
    """Law: calls of a new kind are those without a partner, and all others meet themselves."""
    after = list(before)
    for at in places:
        after.insert(at, "NN_Novelty")
    found = pair_calls(apis(*before), apis(*after), DEFAULT)
    assert [p.b.op_type for p in found if p.a is None and p.b is not None] == ["NN_Novelty"] * len(
        places
    )
    assert all(p.a.op_name == p.b.op_name for p in found if p.a is not None and p.b is not None)
    order = [p.b.position for p in found if p.b is not None]
    assert order == sorted(order)
