"""Archives of torch.save: those that torch writes of random tensors, and hostile ones."""

from __future__ import annotations

import io
import random
import struct
import subprocess
import sys
import zipfile
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankdump._torchfile.tensor_archive import open_tensor_archive
from rankdump.errors import CorruptedError, RankdumpError, UnsupportedError

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
]


def saved(value) -> bytes:
    """Return the file that torch writes."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def loaded(data: bytes, name: str = "", **limits):
    with open_tensor_archive(io.BytesIO(data)) as archive:
        return archive.load(name, **limits)


def expected(tensor) -> np.ndarray:
    """Return the array of a tensor as torch converts it."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    is_wide = tensor.dtype is torch.bfloat16 or "float8" in str(tensor.dtype)
    return (tensor.float() if is_wide else tensor).numpy()


@st.composite
def tensors(draw):
    """Draw a tensor of any type: transposed, sliced, expanded, a part of a larger storage."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    wide = torch.randint(-100, 100, shape, generator=generator).to(torch.float64)
    tensor = (wide.abs() if "uint" in str(dtype) else wide).to(dtype)
    if tensor.dim() > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, draw(st.integers(1, tensor.dim() - 1)))
    if tensor.dim() and draw(st.booleans()):
        tensor = tensor[draw(st.integers(0, 2)) :: draw(st.integers(1, 2))]
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(draw(st.integers(1, 3)), *tensor.shape)
    if tensor.is_complex() and draw(st.booleans()):
        tensor = tensor.conj() if draw(st.booleans()) else tensor.conj().imag
    is_parameter = tensor.is_floating_point() and tensor.dtype is not torch.float8_e5m2
    return torch.nn.Parameter(tensor) if is_parameter and draw(st.booleans()) else tensor


@given(tensors())
def test_tensors_of_torch_are_read_as_torch_reads_them(tensor):
    """Law: type, shape and every element are those of torch, and the array is read-only."""
    data = saved(tensor)
    array = loaded(data)
    right = expected(tensor)
    assert (array.dtype, array.shape) == (right.dtype, right.shape)
    assert np.array_equal(array, right, equal_nan=array.dtype.kind in "fc")
    assert not array.flags.writeable
    with open_tensor_archive(io.BytesIO(data)) as archive:
        position, described = archive.find_position(), archive.tensors[""]
        assert described.dtype == str(tensor.dtype).removeprefix("torch.")
    if position is not None:
        flat = np.frombuffer(data, right.dtype, right.size, position)
        assert np.array_equal(flat.reshape(right.shape), right)


@given(tensors(), st.data())
def test_damaged_archives_are_an_error_or_an_array(tensor, data):
    """Law: whatever bytes are changed or cut off, an error has one line, or there is an array."""
    packed = bytearray(saved(tensor))
    for _ in range(data.draw(st.integers(1, 4))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(packed[: data.draw(st.integers(0, len(packed)))])
    with suppress(RankdumpError):
        assert loaded(cut, limit_bytes=1 << 20).nbytes <= 1 << 20


def test_containers_are_read_by_name():
    """Tensors of a state_dict and of nested containers have the names that people know."""
    linear = torch.nn.Linear(2, 3)
    net = torch.nn.Sequential(linear, torch.nn.BatchNorm1d(3))
    data = saved({"model": net.state_dict(), "rest": [1, (torch.ones(2),)], "step": 7})
    with open_tensor_archive(io.BytesIO(data)) as archive:
        assert set(archive.tensors) >= {"model.0.weight", "model.1.num_batches_tracked", "rest.1.0"}
        weight = archive.load("model.0.weight")
    assert np.array_equal(weight, linear.weight.detach().numpy())
    with pytest.raises(CorruptedError, match="a container"):
        loaded(data)
    with pytest.raises(CorruptedError, match="no tensor 'x'"):
        loaded(data, "x")


def test_big_endian_archives_are_read():
    """`byteorder` tells it; complex numbers are swapped by their parts."""
    for tensor in (torch.tensor([1.5, -2.0]), torch.tensor([1 + 2j]), torch.tensor([1, 2])):
        right = expected(tensor)
        swapped = right.astype(right.dtype.newbyteorder(">")).tobytes()
        data = rezipped(saved(tensor), {"byteorder": b"big", "data/0": swapped})
        assert np.array_equal(loaded(data), right)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (torch.ones(2, 2).to_sparse(), "_rebuild_sparse_tensor, which is not read"),
        (torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear, which is not read"),
        ([print], "which is not read"),
    ],
)
def test_what_is_no_plain_tensor_is_named(value, match):
    with pytest.raises(UnsupportedError, match=match):
        loaded(saved(value))


def test_files_of_old_torch_are_named():
    file = io.BytesIO()
    torch.save(torch.ones(2), file, _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedError, match=r"before 1\.6"):
        loaded(file.getvalue())


def rezipped(data: bytes, changed, compression=zipfile.ZIP_STORED, names=None) -> bytes:
    """Return an archive with other members, by their names behind the first folder."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w", compression) as new:
        for member in old.namelist():
            base, _, inner = member.partition("/")
            content = changed.get(inner, old.read(member))
            if content is not None:
                new.writestr(f"{base}/{(names or {}).get(inner, inner)}", content)
    return file.getvalue()


def pickle_of(data: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read(next(n for n in archive.namelist() if n.endswith("data.pkl")))


HOSTILE = saved(torch.arange(6, dtype=torch.float32).reshape(2, 3))
_PICKLE = pickle_of(HOSTILE)
_SHAPE = b"K\x02K\x03\x86"


@pytest.mark.parametrize(
    ("data", "match"),
    [
        pytest.param(b"", "not an archive", id="empty"),
        pytest.param(HOSTILE[:200], "not an archive", id="truncated"),
        pytest.param(rezipped(HOSTILE, {}, zipfile.ZIP_DEFLATED), "is compressed", id="a zip bomb"),
        pytest.param(rezipped(HOSTILE, {"data.pkl": None}), "0 data.pkl", id="no pickle"),
        pytest.param(rezipped(HOSTILE, {"data/0": None}), "not in the archive", id="no storage"),
        pytest.param(
            rezipped(HOSTILE, {"data/0": b"12345678"}), "8 bytes, but 6 elements", id="short"
        ),
        pytest.param(
            rezipped(HOSTILE, {"data.pkl": _PICKLE.replace(_SHAPE, b"K\x02K\x04\x86")}),
            "does not lie in its storage",
            id="a view beyond the storage",
        ),
        pytest.param(
            rezipped(HOSTILE, {"data.pkl": _PICKLE.replace(_SHAPE, b"K\x02K\x03\x86", 1)[:-9]}),
            "damaged at byte|no end",
            id="half a pickle",
        ),
        pytest.param(
            rezipped(
                HOSTILE,
                {
                    "data.pkl": _PICKLE.replace(
                        _SHAPE, b"\x8a\x08" + struct.pack("<q", 1 << 61) + b"K\x03\x86"
                    )
                },
            ),
            "does not lie in its storage",
            id="an endless shape",
        ),
        pytest.param(
            rezipped(
                HOSTILE,
                {"data.pkl": _PICKLE.replace(b"cpu", b"../")},
                names={"data/0": "data/../0"},
            ),
            "not in the archive",
            id="a path out of the archive",
        ),
        pytest.param(
            rezipped(HOSTILE, {"data.pkl": b"\x80\x02" + b"]" * 40 + b"a" * 39 + b"."}),
            "nested more than",
            id="deep containers",
        ),
        pytest.param(
            rezipped(HOSTILE, {"data.pkl": b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R."}),
            "names os.system, which is not read",
            id="a command",
        ),
        pytest.param(
            rezipped(HOSTILE, {"data.pkl": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R."}),
            "with 0 arguments",
            id="a tensor of nothing",
        ),
    ],
)
def test_hostile_archives_get_one_clear_line(data, match):
    with pytest.raises(RankdumpError, match=match) as caught:
        loaded(data)
    assert "\n" not in str(caught.value)


def test_expanded_tensor_is_not_made_larger_than_allowed():
    """A stride of 0 repeats an element for nothing; the array would not be."""
    data = saved(torch.ones(1).expand(1 << 16, 1 << 16))
    assert len(data) < 4096
    with pytest.raises(CorruptedError, match="would take"):
        loaded(data, limit_bytes=1 << 30)


def test_flipped_bit_in_a_storage_is_found():
    damaged = bytearray(HOSTILE)
    damaged[HOSTILE.index(struct.pack("<f", 5.0))] ^= 1
    with pytest.raises(CorruptedError, match="CRC"):
        loaded(bytes(damaged))


def test_it_works_without_torch(tmp_path):
    """Whoever reads a dump need not have torch."""
    path = tmp_path / "x.pt"
    path.write_bytes(saved(torch.tensor([1.5], dtype=torch.bfloat16)))
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from rankdump.reader import load_file; from pathlib import Path\n"
        "print(load_file(Path(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[1.5]\n"


def test_member_order_and_noise_between_members_do_not_matter():
    """zip allows any order; torch's padding is in the extra fields."""
    names = random.Random(0)
    with zipfile.ZipFile(io.BytesIO(HOSTILE)) as old:
        members = {name: old.read(name) for name in old.namelist()}
    order = list(members)
    names.shuffle(order)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as new:
        for name in order:
            new.writestr(name, members[name])
    assert loaded(file.getvalue()).tolist() == [[0, 1, 2], [3, 4, 5]]
