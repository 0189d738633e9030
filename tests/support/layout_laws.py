"""Laws of every layout: a path identifies its key, and never leaves its folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rankdump._core.record import TensorKey, TensorSide

NAME_MAX_BYTES = 255
# Every layout runs the one inherited test; examples hold for each of them, so each has fewer.
inherited = settings(max_examples=40, suppress_health_check=[HealthCheck.differing_executors])
HOSTILE_NAMES = (
    "",
    ".",
    "..",
    "/",
    "../../x",
    "..\\..\\x",
    "/etc/passwd",
    "a\0b",
    "a\nb\r\tc",
    "\ud800",
    "a\udfffb",
    "\u202eabc",
    "\u2028",
    "con.input.0",
    "n" * 5000,
    "\U0001f600" * 300,
    ".." * 2500,
    "a.b.0.0.1.input.0.DefaultFormat.npy",
)


class RecordPlace(Protocol):
    """Where a layout puts a record."""

    @property
    def folder(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def mapped_from(self) -> str: ...
    @property
    def path(self) -> str: ...


names = st.one_of(
    st.sampled_from(HOSTILE_NAMES),
    st.text(max_size=300),
    st.text(alphabet="ab./\\_ -\0\ud800", max_size=40),
    st.text(st.characters(categories=["Cs", "Cc", "Zs", "Lu", "So"]), max_size=40),
)
small = st.integers(0, 2**32 - 1)
keys = st.builds(
    TensorKey,
    rank=st.integers(0, 2**24),
    net_name=st.text("abcXYZ019_-", min_size=1, max_size=40),
    graph=small,
    iteration=st.integers(0, 2**64 - 1),
    timestamp_us=st.integers(0, 2**64 - 1),
    # Parameters have a spelling of their own, and so have aclnn's kernels.
    op_type=st.one_of(st.just("Parameter"), st.just("aclnnAdd"), names),
    op_name=st.one_of(st.just("aclnnMul_2"), names),
    side=st.sampled_from(TensorSide),
    slot=small,
    task=small,
    stream=small,
    tensor_format=st.just("DefaultFormat"),
    constant=st.booleans(),
    # No type is called npy; with that one the file's own suffix would be a type.
    element=st.one_of(st.sampled_from(["", "Float32", "0"]), names.filter(lambda n: n != "npy")),
    argument=st.just(""),
)
EXAMPLE = TensorKey(0, "Net", 0, 0, 1, "T", "a/b", TensorSide.INPUT, 0)


class LayoutLaws:
    """Derive, and set the functions of the layout under test, in the profile under test."""

    place_of: Callable[[TensorKey, str], RecordPlace]
    key_of: Callable[[str], TensorKey | None]
    readable: Callable[[TensorKey], TensorKey]
    """The key as a file name can carry it."""
    top_of: Callable[[TensorKey], str]
    """What the path of a key begins with."""
    suffixes: tuple[str, ...] = ("", ".zst")

    def readable_path(self, place: RecordPlace) -> str:
        """Return the path that key_of can read: a mapped name is in for the one on disk."""
        return f"{place.folder}/{place.mapped_from or place.name}"

    @inherited
    @given(key=keys)
    @example(key=EXAMPLE)
    def test_inverse(self, key: TensorKey):
        """The key of a path is the readable key, and its path is the same path again."""
        for suffix in self.suffixes:
            place = type(self).place_of(key, suffix)
            back = type(self).key_of(self.readable_path(place))
            assert back is not None
            assert back == type(self).readable(key)
            assert type(self).place_of(back, suffix) == place

    @inherited
    @given(key=keys)
    def test_readable_once_is_enough(self, key: TensorKey):
        """What a name gave back gives the same name and the same key again."""
        readable = type(self).readable
        assert readable(readable(key)) == readable(key)

    @inherited
    @given(key=keys)
    def test_stays_in_its_folder(self, key: TensorKey):
        """No name leaves the folder, and every component can be on a disk."""
        for suffix in self.suffixes:
            path = type(self).place_of(key, suffix).path
            parts = path.split("/")
            assert path.startswith(f"{type(self).top_of(key)}/")
            for part in parts:
                assert part not in ("", ".", "..")
                assert 1 <= len(part.encode()) <= NAME_MAX_BYTES
                assert part.isprintable()
                assert "\\" not in part

    @inherited
    @given(key=keys, other=keys)
    def test_distinct_keys_have_distinct_paths(self, key: TensorKey, other: TensorKey):
        """Two keys share a path only when they are readable as the same key."""
        same = type(self).place_of(key, "").path == type(self).place_of(other, "").path
        assert same == (type(self).readable(key) == type(self).readable(other))

    @inherited
    @given(key=keys, data=st.data())
    def test_every_field_tells_paths_apart(self, key: TensorKey, data: st.DataObject):
        """A change of any one field that survives the spelling changes the path."""
        field = data.draw(st.sampled_from(sorted(set(TensorKey._fields) - {"tensor_format"})))
        other = key._replace(**{field: getattr(data.draw(keys), field)})
        same = type(self).place_of(key, "").path == type(self).place_of(other, "").path
        assert same == (type(self).readable(key) == type(self).readable(other))

    @inherited
    @given(key=keys, name=names)
    def test_rejects_foreign_paths(self, key: TensorKey, name: str):
        """A path that differs from the tree's own form stands for no key."""
        path = self.readable_path(type(self).place_of(key, ""))
        foreign = (
            f"/{path}",
            f"./{path}",
            f"../{path}",
            f"{path}/",
            f"{path}\n",
            f"{path}.tmp",
            f"{path}/{name}",
            path.replace("/", "//", 1),
            f"rank-0/{path}",
            path.removesuffix(".npy"),
            path[: path.rindex("/")],
            name,
        )
        for text in foreign:
            assert type(self).key_of(text) is None
