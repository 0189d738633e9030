"""CANN's trees and the older asynchronous one: the laws of every layout, and a session's files."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.layout_laws import HOSTILE_NAMES, LayoutLaws, inherited, keys, names

from rankdump._core.record import TensorKey, TensorSide
from rankdump._layout.dump_folders import (
    find_folder,
    make_tensor_key,
    parse_name_in_folder,
    parse_tensor_path,
)
from rankdump._layout.file_name import FileKind
from rankdump._layout.tree_layouts import LAYOUTS
from rankdump._layout.tree_paths import MAX_NAME_BYTES, FilePlace, TreeContext

STAND = TreeContext("/data/dump", device=5, started="20261121175901")
TOPS = {
    "mindspore-async": "rank_{rank}",
    "cann": "20261121175901/5",
    "cann-step": "{iteration}/20261121175901/5",
    "cann-op": "20261121175901/5",
    "cann-op-step": "{iteration}/20261121175901/5",
}


def in_layout(name: str) -> type[LayoutLaws]:
    """Return the laws, for the functions of one layout."""
    layout = LAYOUTS[name]

    class Laws(LayoutLaws):
        @staticmethod
        def place_of(key: TensorKey, suffix: str) -> FilePlace:
            return layout.place_tensor(key._replace(tensor_format="ND"), STAND, suffix)

        @staticmethod
        def readable(key: TensorKey) -> TensorKey:
            return layout.make_readable_key(key._replace(tensor_format="ND"), STAND)

        @staticmethod
        def top_of(key: TensorKey) -> str:
            return TOPS[name].format(rank=key.rank, iteration=key.iteration)

        key_of = parse_tensor_path

        @inherited
        @given(key=keys)
        def test_operator_files_of_each_kind_are_distinguished(self, key: TensorKey):
            """The kinds are bin file, table, and bin file of one tensor, packed or not."""
            read = layout.make_readable_key(key, STAND)._replace(tensor_format="")
            for suffix in self.suffixes:
                for place, kind in (
                    (layout.place_operator(key, STAND, suffix), FileKind.OPERATOR),
                    (layout.place_operator(key, STAND, f".csv{suffix}"), FileKind.TABLE),
                    (layout.place_member(key, STAND, suffix), FileKind.MEMBER),
                ):
                    folder = find_folder(place.folder)
                    assert folder is not None
                    file = parse_name_in_folder(folder, place.mapped_from or place.name)
                    assert file is not None
                    assert file.kind is kind
                    assert make_tensor_key(folder, file, key.side, key.slot) == read
                    assert len(place.name.encode()) <= MAX_NAME_BYTES
                    assert "/" not in place.name
                    path = f"{place.folder}/{place.mapped_from or place.name}"
                    assert parse_tensor_path(path) == (read if kind is FileKind.MEMBER else None)

    return Laws


class TestMindSporeAsync(in_layout("mindspore-async")):
    pass


class TestCann(in_layout("cann")):
    pass


class TestCannStep(in_layout("cann-step")):
    pass


class TestCannOp(in_layout("cann-op")):
    pass


class TestCannOpStep(in_layout("cann-op-step")):
    pass


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=40)  # of each layout
@given(key=keys, net=names, started=names)
def test_model_name_never_leaves_the_root(name: str, key: TensorKey, net: str, started: str):
    """This holds for any name of a model and any start time of a session."""
    stand = TreeContext("/data/dump", 0, started)
    layout = LAYOUTS[name]
    key = key._replace(net_name=net, tensor_format=layout.tensor_format(()))
    place = layout.place_tensor(key, stand, "")
    for part in place.path.split("/"):
        assert part not in ("", ".", "..")
        assert len(part.encode()) <= MAX_NAME_BYTES
        assert part.isprintable()
    back = parse_tensor_path(f"{place.folder}/{place.mapped_from or place.name}")
    assert back == layout.make_readable_key(key, stand)


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_hostile_operator_name_stays_in_its_folder(name: str):
    """The bin file of an operator has one name, whatever the name of the operator."""
    key = TensorKey(0, name, 3, 7, 1, name, name, TensorSide.OUTPUT, 0)
    place = LAYOUTS["cann"].place_operator(key, STAND, "")
    assert place.folder.count("/") == 4
    assert "/" not in place.name


def test_long_cann_name_maps_to_its_hash():
    """The name is digits alone, as CANN writes it; a packed file has the same digits with its
    suffix.
    """
    key = TensorKey(0, "Net", 0, 0, 1, "T", "x" * 300, TensorSide.OUTPUT, 0)
    plain = LAYOUTS["cann"].place_operator(key, STAND, "")
    packed = LAYOUTS["cann"].place_operator(key, STAND, ".zst")
    assert plain.name.isdecimal()
    assert plain.mapped_from == f"T.{'x' * 300}.0.0.1"
    assert packed.name == f"{plain.name}.zst"
    assert packed.mapped_from == f"{plain.mapped_from}.zst"


@given(st.text("rank_0123/.abc-", max_size=60))
def test_parse_tensor_path_accepts_any_text(path: str):
    """No text raises."""
    assert parse_tensor_path(path) is None or "input" in path or "output" in path
