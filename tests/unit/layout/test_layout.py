"""Places of records in MindSpore's tree: the laws of every layout, and MindSpore's examples."""

from __future__ import annotations

import pytest
from support.layout_laws import HOSTILE_NAMES, LayoutLaws

from rankdump._core.record import TensorKey, TensorSide, sanitize_name
from rankdump._layout import tree_paths
from rankdump._layout.dump_folders import parse_tensor_path
from rankdump._layout.profile import PROFILES


def in_profile(name: str) -> type[LayoutLaws]:
    """Return the laws, for the functions of the layout in one profile."""
    profile = PROFILES[name]

    class Laws(LayoutLaws):
        @staticmethod
        def place_of(key: TensorKey, suffix: str) -> tree_paths.FilePlace:
            return tree_paths.make_mindspore_place(key, suffix, profile)

        @staticmethod
        def readable(key: TensorKey) -> TensorKey:
            return tree_paths.make_mindspore_readable_key(key, profile)

        @staticmethod
        def top_of(key: TensorKey) -> str:
            return f"rank_{key.rank}"

        key_of = parse_tensor_path

    return Laws


class TestMs23(in_profile("ms2.3")):
    pass


class TestMs24(in_profile("ms2.4")):
    pass


class TestMs20(in_profile("ms2.0")):
    pass


KEY = TensorKey(
    rank=3,
    net_name="LeNet",
    graph=0,
    iteration=2,
    timestamp_us=1795221576504376,
    op_type="Conv2D",
    op_name="Default/network-WithLossCell/_backbone-LeNet/conv1-Conv2d/Conv2D-op0",
    side=TensorSide.INPUT,
    slot=1,
)
PATH = (
    "rank_3/LeNet/0/2/Conv2D.Default_network-WithLossCell__backbone-LeNet_conv1-Conv2d_Conv2D-op0"
    ".0.0.1795221576504376.input.1.DefaultFormat.npy"
)


def test_mindspore_path_equals_that_of_2_3():
    """The path of a record is that of MindSpore 2.3."""
    assert tree_paths.make_mindspore_place(KEY, "").path == PATH
    assert tree_paths.make_mindspore_place(KEY, ".zst").path == PATH + ".zst"
    assert parse_tensor_path(PATH) == tree_paths.make_mindspore_readable_key(KEY)


WEIGHT = KEY._replace(
    op_type="Parameter", op_name="layers.0.conv 1.weight", side=TensorSide.OUTPUT, slot=0
)
FOLDER = "rank_3/LeNet/0/2"
STAMP = KEY.timestamp_us


@pytest.mark.parametrize(
    ("profile", "key", "path"),
    [
        ("ms2.0", KEY, f"{FOLDER}/Conv2D.Conv2D-op0.0.0.{STAMP}.input.1.DefaultFormat.npy"),
        (
            "ms2.0",
            WEIGHT,
            f"{FOLDER}/Parameter.layers.0.conv_1.weight.0.0.{STAMP}.output.0.DefaultFormat.npy",
        ),
        (
            "ms2.3",
            WEIGHT,
            f"{FOLDER}/Parameter.layers_0_conv_1_weight.0.0.{STAMP}.output.0.DefaultFormat.npy",
        ),
        (
            "ms2.4",
            WEIGHT._replace(element="Float32"),
            f"{FOLDER}/Parameter.layers_0_conv_1_weight.0.0.{STAMP}.output.0"
            ".DefaultFormat.Float32.npy",
        ),
        (
            "ms2.3",
            WEIGHT._replace(element="Float32", constant=True, iteration=7, op_name="data-3"),
            f"rank_3/LeNet/0/constants/Parameter.data-3.0.0.{STAMP}.output.0.DefaultFormat.npy",
        ),
    ],
)
def test_mindspore_path_follows_the_profile(profile: str, key: TensorKey, path: str):
    """Each profile has the spelling of its release; constants are beside the iterations."""
    assert tree_paths.make_mindspore_place(key, "", PROFILES[profile]).path == path
    back = parse_tensor_path(path)
    assert back == tree_paths.make_mindspore_readable_key(key, PROFILES[profile])


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("a/b", "a_b"),
        ("a//_b", "a___b"),
        ("conv1.weight", "conv1_weight"),
        ("a\\b c", "a_b_c"),
        ("\0\n\ud800", "___"),
        ("\u00e9\u4e2d", "\u00e9\u4e2d"),
        ("", ""),
    ],
)
def test_sanitize_name_replaces_each_unsafe_character(raw: str, clean: str):
    """Each character that a path cannot have becomes one underscore."""
    assert sanitize_name(raw) == clean


def test_long_mindspore_name_maps_to_a_number():
    """A name of more than 255 bytes is a number on disk, the same each time, with its row."""
    long = TensorKey(0, "Net", 0, 0, 1, "T", "x" * 300, TensorSide.OUTPUT, 0)
    place = tree_paths.make_mindspore_place(long, ".zst")
    number, dot, rest = place.name.partition(".")
    assert number.isdecimal()
    assert dot + rest == ".npy.zst"
    assert place.mapped_from == f"T.{'x' * 300}.0.0.1.output.0.DefaultFormat.npy.zst"
    assert place == tree_paths.make_mindspore_place(long, ".zst")
    assert parse_tensor_path(place.path) is None


def test_mindspore_name_limit_is_in_bytes():
    """A name of exactly 255 bytes is kept, one of 256 is mapped."""
    for letter in ("x", "\u00e9"):
        frame = TensorKey(0, "Net", 0, 0, 1, "T", "_", TensorSide.OUTPUT, 0)
        spare = 255 - len(tree_paths.make_mindspore_place(frame, "").name) + 1
        width = len(letter.encode())
        fits = letter * (spare // width) + "y" * (spare % width)
        for name, mapped in ((fits, False), (fits + "y", True)):
            key = TensorKey(0, "Net", 0, 0, 1, "T", name, TensorSide.OUTPUT, 0)
            assert bool(tree_paths.make_mindspore_place(key, "").mapped_from) is mapped


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_hostile_mindspore_name_stays_in_its_folder(name: str):
    """For any operator name, the file is in the folder of the iteration."""
    key = TensorKey(0, "Net", 0, 0, 1, name, name, TensorSide.OUTPUT, 0)
    place = tree_paths.make_mindspore_place(key, "")
    assert place.folder == "rank_0/Net/0/0"
    assert "/" not in place.name


@pytest.mark.parametrize(
    "path",
    [
        "",
        "rank_0",
        "rank_0/Net/0/0/mapping.csv",
        "rank_0/.dump_metadata/manifest/iteration_0.x.json",
        "rank_0/execution_order/ms_execution_order_graph_0.csv",
        "rank_x/Net/0/0/T.a.0.0.1.output.0.DefaultFormat.npy",
        "rank_0/Net/0/-1/T.a.0.0.1.output.0.DefaultFormat.npy",
        "rank_0/N t/0/0/T.a.0.0.1.output.0.DefaultFormat.npy",
        "rank_0/Net/0/0/T.a.0.0.1.sideways.0.DefaultFormat.npy",
        "rank_0/Net/0/0/T.a.0.0.1.output.0.DefaultFormat.npz",
        "rank_0/Net/0/0/T.a.0.1.output.0.DefaultFormat.npy",
        "rank_0/Net/0/0/.T.a.0.0.1.output.0.DefaultFormat.npy.tmp",
        "rank_\u0663/Net/0/0/T.a.0.0.1.output.0.DefaultFormat.npy",
        "rank_00/Net/0/0/T.a.0.0.1.output.0.DefaultFormat.npy",
        "rank_0/Net/0/0/T.a.0.0.01.output.0.DefaultFormat.npy",
        "rank_0/Net/0/0/T.a." + "9" * 5000 + ".0.1.output.0.DefaultFormat.npy",
    ],
)
def test_parse_tensor_path_rejects_other_paths(path: str):
    """A path that the layout would not write has no key."""
    assert parse_tensor_path(path) is None


def test_parse_tensor_path_reads_names_of_other_unicode_tables():
    """Python versions differ in which characters can be printed."""
    key = parse_tensor_path("rank_0/Net/0/0/T.a\u0378b.0.0.1.output.0.DefaultFormat.npy")
    assert key is not None
    assert key.op_name == "a\u0378b"
