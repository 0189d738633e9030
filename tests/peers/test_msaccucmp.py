"""Conversion compared with CANN's own; run by `make peers`.

`run_msaccucmp.py` says how msaccucmp runs without CANN. MSPROBE_PYTHON names the Python of a
virtual environment that has it.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankdump._binfile.bin_file import serialize_bin_head
from rankdump._binfile.header_parts import DumpData, OpBuffer, OpInput, OpOutput, Shape, Workspace
from rankdump._core.cann_types import DATA_TYPES, FORMAT_NUMBERS

PEER = Path(__file__).with_name("run_msaccucmp.py")
STAMP = 1795225398044834
RANDOM = np.random.default_rng(7)
NUMBERS = {kind.name: kind.number for kind in DATA_TYPES.values()}


@dataclass(frozen=True)
class FileTensor:
    """One tensor of a file."""

    data_type: str
    form: str
    shape: tuple[int, ...]
    original: tuple[int, ...] | None = None
    item_bytes: float = 0
    groups: int = 0


FORMATS = {
    # Target: every tensor of it can be converted by both.
    "NCHW": [
        FileTensor("FLOAT16", "NC1HWC0", (2, 2, 3, 5, 16), (2, 20, 3, 5), 2),
        FileTensor("INT8", "NC1HWC0", (2, 2, 3, 5, 32), (2, 40, 3, 5), 1),
        FileTensor("FLOAT", "NC1HWC0", (2, 2, 3, 5, 16), None, 4),
        FileTensor("FLOAT16", "FRACTAL_Z", (2 * 3 * 5, 2, 16, 16), (20, 30, 3, 5), 2),
        FileTensor("FLOAT", "NHWC", (2, 3, 4, 5), (2, 5, 3, 4), 4),
        FileTensor("FLOAT", "HWCN", (2, 3, 4, 5), None, 4),
        FileTensor("FLOAT", "NCHW", (2, 3, 4, 5), (2, 3, 4, 5), 4),
        FileTensor("FLOAT16", "FRACTAL_NZ", (2, 4, 2, 16, 16), (2, 30, 50), 2),
    ],
    "NHWC": [
        FileTensor("FLOAT16", "NC1HWC0", (2, 2, 3, 5, 16), (2, 3, 5, 20), 2),
        FileTensor("INT32", "NCHW", (2, 3, 4, 5), None, 4),
        FileTensor("INT32", "HWCN", (2, 3, 4, 5), None, 4),
        FileTensor("FLOAT16", "FRACTAL_NZ", (4, 2, 16, 16), (30, 50), 2),
    ],
    "HWCN": [
        FileTensor("FLOAT16", "NC1HWC0", (2, 2, 3, 5, 16), (3, 5, 20, 2), 2),
        FileTensor("FLOAT16", "FRACTAL_Z", (2 * 3 * 5, 2, 16, 16), (3, 5, 30, 20), 2),
        FileTensor("UINT8", "NHWC", (2, 3, 4, 5), None, 1),
    ],
    "ND": [
        FileTensor("FLOAT16", "FRACTAL_NZ", (4, 2, 16, 16), (30, 50), 2),
        FileTensor("INT8", "FRACTAL_NZ", (3, 2, 2, 16, 32), (3, 32, 64), 1),
        FileTensor("FLOAT16", "NDC1HWC0", (2, 3, 2, 4, 5, 16), None, 2),
        FileTensor("DOUBLE", "ND", (7, 3), (7, 3), 8),
    ],
    "NCDHW": [FileTensor("FLOAT16", "NDC1HWC0", (2, 3, 2, 4, 5, 16), (2, 20, 3, 4, 5), 2)],
    "FRACTAL_Z": [
        FileTensor("FLOAT16", "NCHW", (20, 30, 3, 5), None, 2),
        FileTensor("FLOAT16", "HWCN", (3, 5, 30, 20), None, 2),
        FileTensor("FLOAT16", "NHWC", (20, 3, 5, 30), None, 2),
    ],
}
PLAIN = [
    FileTensor(name, "ND", shape, shape, bytes_)
    for name, bytes_ in (
        ("FLOAT", 4),
        ("FLOAT16", 2),
        ("INT8", 1),
        ("UINT8", 1),
        ("INT16", 2),
        ("UINT16", 2),
        ("INT32", 4),
        ("INT64", 8),
        ("UINT32", 4),
        ("UINT64", 8),
        ("BOOL", 1),
        ("DOUBLE", 8),
        ("COMPLEX64", 8),
        ("COMPLEX128", 16),
        ("RESOURCE", 8),
        ("BF16", 2),
        ("UNDEFINED", 4),
    )
    for shape in ((3, 5), ())
]


def payload(tensor: FileTensor) -> bytes:
    count = int(np.prod(tensor.shape)) if tensor.shape else 1
    if tensor.data_type == "BOOL":
        return RANDOM.integers(0, 2, count, "u1").tobytes()
    size = int(count * tensor.item_bytes)
    if tensor.data_type in ("FLOAT16", "BF16", "FLOAT", "DOUBLE", "COMPLEX64", "COMPLEX128"):
        # Any bits but those of NaN, of which there are many.
        return RANDOM.integers(0, 60, size, "u1").tobytes()
    return RANDOM.bytes(size)


def facts_of(tensor: FileTensor, size: int) -> dict[str, Any]:
    return {
        "data_type": NUMBERS[tensor.data_type],
        "format": FORMAT_NUMBERS[tensor.form],
        "shape": Shape(tensor.shape),
        "original_shape": None if tensor.original is None else Shape(tensor.original),
        "size": size,
        "sub_format": tensor.groups,
    }


def write(folder: Path, name: str, tensors: list[FileTensor]) -> None:
    """Make a file whose inputs and outputs are both these tensors."""
    datas = [payload(tensor) for tensor in tensors * 2]
    fields = [facts_of(tensor, len(data)) for tensor, data in zip(tensors * 2, datas, strict=True)]
    header = DumpData(
        dump_time=STAMP,
        op_name=f"net/{name}",
        input=tuple(OpInput(**each) for each in fields[: len(tensors)]),
        output=tuple(OpOutput(**each) for each in fields[len(tensors) :]),
        buffer=(OpBuffer(0, b"", 5),),
        space=(Workspace(0, b"", 3),),
    )
    path = folder / f"Kind.net_{name}.7.3.{STAMP}"
    path.write_bytes(serialize_bin_head(header) + b"".join(datas) + b"12345abc")


def converted(folder: Path, out: Path, *options: str) -> list[dict[str, Path]]:
    """Return what msaccucmp and we make of a folder's files, by name."""
    theirs, ours = out / "theirs", out / "ours"
    peer = [os.environ["MSPROBE_PYTHON"], str(PEER), "convert"]
    subprocess.run(
        [*peer, "-d", str(folder), "-out", str(theirs), *options],
        check=False,
        capture_output=True,
    )
    our = [sys.executable, "-m", "rankdump", "convert", "-d", str(folder), "-o", str(ours)]
    subprocess.run([*our, *options], check=False, capture_output=True)
    return [
        {path.name: path for path in sorted(made.iterdir()) if path.suffix != ".txt"}
        for made in (theirs, ours)
    ]


def same(one: Path, other: Path) -> bool:
    if one.suffix != ".npy":
        return one.read_bytes() == other.read_bytes()
    first, second = np.load(one), np.load(other)
    facts = (first.dtype, first.shape) == (second.dtype, second.shape)
    return facts and first.tobytes() == second.tobytes()


@pytest.mark.parametrize("kind", ["npy", "bin"])
def test_conversion_of_every_type_equals_msaccucmp(kind, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder, "types", PLAIN)
    theirs, ours = converted(folder, tmp_path, "-t", kind)
    assert len(theirs) == 2 * len(PLAIN) + 2
    assert set(ours) == set(theirs)
    assert [name for name in theirs if not same(theirs[name], ours[name])] == []


@pytest.mark.parametrize("kind", ["npy", "bin"])
@pytest.mark.parametrize("target", FORMATS)
def test_conversion_of_every_common_format_equals_msaccucmp(target, kind, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder, "formats", FORMATS[target])
    theirs, ours = converted(folder, tmp_path, "-t", kind, "-f", target)
    assert len(theirs) == 2 * len(FORMATS[target])
    assert set(ours) == set(theirs)
    assert [name for name in theirs if not same(theirs[name], ours[name])] == []


def test_long_names_are_mapped_as_by_msaccucmp(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder, "n" * 215, PLAIN[:1])
    theirs, ours = converted(folder, tmp_path)
    assert set(ours) == set(theirs)
    assert "mapping.csv" in theirs
    assert sorted(theirs["mapping.csv"].read_text().split()) == sorted(
        ours["mapping.csv"].read_text().split()
    )


def old_layout() -> bytes:
    blocks = [RANDOM.bytes(48).ljust(size, b"\0") for size in (128, 128, 256)]
    states = [RANDOM.bytes(8).ljust(256, b"\0"), bytes(256), RANDOM.bytes(24).ljust(1024, b"\0")]
    return b"".join((*blocks, *states))


def new_layout(kind: int, version: int, numbers: int) -> bytes:
    head_of_it = struct.pack("<6I", 0x5A5A5A5A, version, 1, kind, 0, 8 * numbers)
    return (head_of_it + RANDOM.bytes(8 * numbers)).ljust(2048, b"\0")


RECORDS = {
    "old": old_layout(),
    "AIC": new_layout(0, 0, 11),
    "AIV": new_layout(1, 0, 11),
    "AICPU": new_layout(2, 0, 8),
    "SDMA": new_layout(3, 0, 10),
    "AIC of version 1": new_layout(0, 1, 14),
}


@pytest.mark.parametrize("kind", RECORDS)
def test_overflow_json_equals_msaccucmp(kind, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    output = OpOutput(NUMBERS["UINT8"], FORMAT_NUMBERS["ND"], Shape((2048,)), size=2048)
    header = DumpData(dump_time=STAMP, op_name="Node_OpDebug", output=(output,))
    name = f"Opdebug.Node_OpDebug.5.6.{STAMP}"
    (folder / name).write_bytes(serialize_bin_head(header) + RECORDS[kind])
    theirs, ours = converted(folder, tmp_path)
    assert set(theirs) == {f"{name}.output.0.json"} == set(ours)
    assert same(*(made[f"{name}.output.0.json"] for made in (theirs, ours)))


def test_small_floats_equal_msaccucmp_where_it_is_right(tmp_path):
    """They lose the sign of an infinity, know no NaN of E4M3FN, and miss HiF8 between 1 and 4."""
    folder = tmp_path / "in"
    folder.mkdir()
    names = ("FLOAT8_E5M2", "FLOAT8_E4M3FN", "HIFLOAT8")
    outputs = tuple(OpOutput(NUMBERS[name], 2, Shape((256,)), size=256) for name in names)
    path = folder / f"Kind.small.7.3.{STAMP}"
    path.write_bytes(
        serialize_bin_head(DumpData(dump_time=STAMP, output=outputs)) + bytes(range(256)) * 3
    )
    theirs, ours = converted(folder, tmp_path)
    different = {}
    for index, name in enumerate(names):
        one, other = (np.load(made[f"{path.name}.output.{index}.npy"]) for made in (theirs, ours))
        apart = ~((one == other) | (np.isnan(one) & np.isnan(other)))
        different[name] = {int(code) for code in np.flatnonzero(apart)}
    assert different["FLOAT8_E5M2"] == {0xFC}
    assert different["FLOAT8_E4M3FN"] == {0x7F, 0xFF}
    assert {code & 0x7F for code in different["HIFLOAT8"]} <= {*range(0x08, 0x20), 0x6F}
