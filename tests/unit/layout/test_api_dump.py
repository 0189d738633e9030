"""Tree of `api_dump`: names of files, lines of the info file, keys of the stack file."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.layout_laws import HOSTILE_NAMES, LayoutLaws, names

from rankdump._core.graph import SourceLine
from rankdump._core.record import TensorKey, TensorSide
from rankdump._layout import api_files
from rankdump._layout.api_tree import (
    ApiFileNames,
    ApiPlace,
    parse_api_file_name,
    parse_place,
    parse_tensor_name,
)
from rankdump._layout.dump_folders import parse_tensor_path
from rankdump._layout.tree_layouts import LAYOUTS
from rankdump._layout.tree_paths import MAX_NAME_BYTES, FilePlace, TreeContext
from rankdump.errors import CorruptedError

GOLDEN = Path(__file__).parents[4] / "shared" / "golden" / "troubleshooter"
STAND = TreeContext("/data/dump")
LAYOUT = LAYOUTS["api-torch"]
KEY = TensorKey(3, "Net", 0, 7, 1, "NN_Conv2d", "NN_Conv2d_12_forward", TensorSide.INPUT, 0)
OLD, NEW = ApiFileNames("torch"), ApiFileNames("torch", extended=True)


class TestApiLayout(LayoutLaws):
    """The laws of every layout, for the layout of API dumps."""

    @staticmethod
    def place_of(key: TensorKey, suffix: str) -> FilePlace:
        return LAYOUT.place_tensor(key, STAND, suffix)

    @staticmethod
    def readable(key: TensorKey) -> TensorKey:
        return LAYOUT.make_readable_key(key, STAND)

    @staticmethod
    def top_of(key: TensorKey) -> str:
        return f"rank{key.rank}/torch_api_dump"

    key_of = parse_tensor_path


@pytest.mark.parametrize(
    ("argument", "name", "slot"),
    [
        ("input.0", "NN_Conv2d_12_forward_input.0.npy", 0),
        ("input.1:int", "NN_Conv2d_12_forward_input.1.npy", 1),
        ("input.dim", "NN_Conv2d_12_forward_input.dim.npy", 0),
        ("output:recompute", "NN_Conv2d_12_forward_output.npy", 0),
        ("output.1.0", "NN_Conv2d_12_forward_output.1.0.npy", 1),
    ],
)
def test_api_tensor_is_named_by_its_place(argument: str, name: str, slot: int):
    """Names are those of troubleshooter; marks are not part of a name."""
    place = LAYOUT.place_tensor(KEY._replace(argument=argument), STAND, ".zst")
    assert place == FilePlace("rank3/torch_api_dump", f"{name}.zst")
    read = parse_tensor_path(place.path)
    assert read is not None
    assert (read.rank, read.op_type, read.op_name) == (3, "NN_Conv2d", "NN_Conv2d_12_forward")
    assert (read.argument, read.slot) == (argument.partition(":")[0], slot)


@given(name=names, path=names, side=st.sampled_from(TensorSide))
def test_api_tensor_stays_in_its_folder(name: str, path: str, side: TensorSide):
    """The name of the call or argument does not matter."""
    key = KEY._replace(op_name=name, side=side, argument=f"{side.value}.{path}")
    place = LAYOUT.place_tensor(key, STAND, "")
    assert place.folder == "rank3/torch_api_dump"
    assert "/" not in place.name
    assert "\\" not in place.name
    assert place.name.isprintable()
    assert place.name not in ("", ".", "..")
    assert len(place.name.encode()) <= MAX_NAME_BYTES
    assert parse_tensor_path(
        f"{place.folder}/{place.mapped_from or place.name}"
    ) == LAYOUT.make_readable_key(key, STAND)


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_api_file_name_of_another_form_has_no_key(name: str):
    """Names without side or suffix have no key."""
    assert parse_api_file_name(name) is None
    assert parse_api_file_name("NN_Conv2d_0_forward_input..npy") is None
    assert parse_api_file_name("_input.npy") is None


def line(files: ApiFileNames, argument: str, dtype: str, shape, **figures: str) -> str:
    place = parse_place(argument)
    assert place is not None
    name = f"NN_Conv2d_0_forward_{place.name}"
    return api_files.format_info_line(
        files, name=name, step=5, place=place, dtype=dtype, shape=shape, statistics=figures
    )


def test_info_line_has_the_form_of_each_release():
    """Numbers of a float32 have the digits of a float32; missing ones are NaN, or an empty list."""
    figures = {"max": "2.7466750144958496", "min": "-3.5", "avg": "0.07685063034296034"}
    start = '["NN_Conv2d_0_forward_input.0", 5, [], "torch.float32", [2, 3], '
    numbers = "[2.7466750144958496, -3.5, 0.07685063034296036]"
    assert line(OLD, "input.0", "float32", (2, 3), **figures) == f"{start}{numbers}]"
    md5 = "240dee9fde6d5d6b88cc7ca79fb6a3e7"
    text = line(NEW, "input.0", "float32", (2, 3), **figures, md5=md5, l2norm="19.013317")
    assert text == f'{start}{numbers}, "{md5}", 19.013317108154297]'
    assert line(OLD, "input.0", "float32", (2, 3)) == f"{start}[NaN, NaN, NaN]]"
    assert line(NEW, "input.0", "float32", (2, 3)) == f"{start}[NaN, NaN, NaN], [], []]"


def test_info_line_of_booleans_numbers_and_marks():
    """bool has no statistics, Python's numbers are written as they are, and marks are in
    field 3.
    """
    three = {"max": "2.0", "min": "2.0", "avg": "2.0"}
    assert line(OLD, "input.0", "bool", (4,), **three).endswith(
        '"torch.bool", [4], [NaN, NaN, NaN]]'
    )
    assert line(OLD, "input.1:int", "int64", (), **three).endswith(
        "\"<class 'int'>\", [], [2, 2, 2]]"
    )
    assert line(OLD, "input.1:float", "float64", (), max="0.1").endswith("[0.1, NaN, NaN]]")
    assert line(OLD, "input.1:bool", "bool", (), max="1.0").endswith("[true, NaN, NaN]]")
    assert line(OLD, "input.1:int", "int64", ()).endswith("[], [NaN, NaN, NaN]]")
    assert line(OLD, "output:recompute", "float64", (1,), max="1e300").endswith(
        '_output", 5, ["recompute"], "torch.float64", [1], [1e+300, NaN, NaN]]'
    )
    assert "[Infinity, -Infinity, NaN]" in line(
        OLD, "input.0", "bfloat16", (1,), max="inf", min="-inf", avg="nan"
    )
    # The digest of a number's text, as troubleshooter writes it.
    assert '"c81e728d9d4c2f636f067f89cc14862c", []]' in line(
        NEW, "input.1:int", "int64", (), **three, md5="x", l2norm="2.0"
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8", "bool", "float8_e4m3fn"])
@pytest.mark.parametrize("framework", ["torch", "mindspore"])
def test_dtype_names_of_both_frameworks_are_read(framework: str, dtype: str):
    """`torch.float32` and `Float32` are the same type."""
    assert api_files.parse_dtype_name(api_files.format_dtype_name(framework, dtype)) == dtype


@given(number=st.floats(), dtype=st.sampled_from(["float32", "float64", "int64", "float16"]))
def test_info_line_numbers_round_trip(number: float, dtype: str):
    """Numbers are equal, exactly or as float32, and every line is valid JSON."""
    text = line(OLD, "input.0", dtype, (1,), max=repr(number), min="1.0")
    assert json.loads(text)[1] == 5
    found = api_files.parse_info_line(text, file="x").statistics
    assert ("max" in found) == (not math.isnan(number))
    if dtype == "float64" and not math.isnan(number):
        assert found["max"] == number


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        "[" * 100_000,
        '["a", 1, [], "t", [1], [1, 2]]',
        '["a", 1, [], "t", [-1], [1, 2, 3]]',
        '["a", 1, 5, "t", [1], [1, 2, 3]]',
        '["a", "1", [], "t", [1], [1, 2, 3]]',
    ],
)
def test_info_line_of_another_form_is_rejected(text: str):
    """The error is one sentence with the file."""
    with pytest.raises(CorruptedError, match=r"f\.pkl: not a line of an info file"):
        api_files.parse_info_line(text, file="f.pkl")


@pytest.mark.parametrize("tree", ["1.0.17-all", "1.0.17-statistics", "1.0.18-all"])
def test_golden_info_lines_and_stack_keys_round_trip(tree: str):
    """Lines and stack keys of troubleshooter are read, and equal when they are written again."""
    folder = GOLDEN / tree / "rank0"
    if not folder.is_dir() and os.environ.get("CI") != "true":
        pytest.skip(f"no tree {folder}")
    (path,) = folder.glob("*_info.*")
    files = NEW if path.suffix == ".csv" else OLD
    for text in path.read_text().splitlines():
        read = api_files.parse_info_line(text, file=str(path))
        found = parse_tensor_name(read.name)
        assert found is not None
        again = api_files.format_info_line(
            files,
            name=read.name,
            step=read.step,
            place=found[1],
            dtype=api_files.parse_dtype_name(read.dtype),
            shape=read.shape,
            statistics={item: repr(value) for item, value in read.statistics.items()},
        )
        assert again == text
    stacks = (folder / OLD.stack_file).read_text()
    body = json.loads(stacks)
    for key in body:
        op_name = api_files.parse_stack_key(key)
        assert op_name
        assert key.startswith("LAYER: ") or api_files.make_stack_key("torch", op_name) == key
    entries = [api_files.format_stack_entry(key, tuple(lines)) for key, lines in body.items()]
    assert "{\n" + ",\n".join(entries) + "\n}" == stacks
    assert [key for key in map(api_files.read_stack_key, stacks.split("\n")) if key] == list(body)


def test_stack_keys_name_modules_by_path():
    """Kinds of calls and frameworks without a spelling of their own have a plain key."""
    key_of_call = api_files.make_stack_key
    assert key_of_call("torch", "LAYER_blocks.0.conv_forward") == "LAYER: blocks.0.conv forward"
    assert key_of_call("torch", "Torch_matmul_3_forward") == "torch.matmul(3) forward"
    assert key_of_call("torch", "Distributed_all_reduce_0_forward").endswith(
        "_0_forward_stack_info"
    )
    assert key_of_call("mindspore", "NN_Dense_0_forward") == "NN_Dense_0_forward_stack_info"
    assert (
        api_files.parse_stack_key("LAYER: blocks.0.conv forward") == "LAYER_blocks_0_conv_forward"
    )
    assert api_files.parse_stack_key("NN_Dense_0_forward_stack_info") == "NN_Dense_0_forward"
    assert (
        api_files.parse_stack_key("torch.nn.functional.relu(3) forward")
        == "Functional_relu_3_forward"
    )
    assert api_files.parse_stack_key("something else") == ""
    line = api_files.parse_source_line("File /a, b/net.py, line 8, in forward, \n y = f(x)")
    assert line == SourceLine("/a, b/net.py", 8, "forward", "y = f(x)")
    assert api_files.parse_source_line("nothing") is None
    assert ApiPlace(TensorSide.INPUT, "0").argument == "input.0"
