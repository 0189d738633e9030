"""Conversion of folders: in processes, with every element type, and with false headers."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.bin_conversion import NAME, bin_file, blocks, files_of, killed, numbered, tensor
from support.bin_files import file_of, headers

from rankdump._analysis.convert import conversion as run_module
from rankdump._analysis.convert.conversion import ConversionRequest, convert_files
from rankdump._analysis.convert.folders import find_bin_files
from rankdump._binfile.header_parts import Shape
from rankdump._core.cann_types import DATA_TYPES
from rankdump._layout.device_formats import TARGET_FORMATS


def converted(source: Path, out: Path, request: ConversionRequest, jobs: int = 1):
    return convert_files(find_bin_files(source, out), out, request, jobs=jobs)


@pytest.fixture
def folder(tmp_path):
    """Nine whole files and a damaged one."""
    folder = tmp_path / "dump"
    folder.mkdir()
    for number in range(9):
        part = tensor("output", blocks(numbered((2, 20 + number, 3, 5))), "NC1HWC0", (2, 20, 3, 5))
        (folder / f"Op.{number}.1.2.3").write_bytes(bin_file(part))
    (folder / "Op.x.1.2.3").write_bytes(b"123456789")
    return folder


def test_conversion_in_processes_gives_the_same_files(folder, tmp_path, monkeypatch):
    """Whichever process did it: the same files, the same failures."""
    alone = converted(folder, tmp_path / "alone", ConversionRequest("NCHW"))
    monkeypatch.setattr(run_module, "_FILES_PER_PROCESS", 1)
    seen: list[Path] = []
    out = tmp_path / "pool"
    found = convert_files(
        find_bin_files(folder, out),
        out,
        ConversionRequest("NCHW"),
        jobs=2,
        done=lambda each: seen.append(each.path),
    )
    assert sorted(seen) == sorted(folder.iterdir())
    assert files_of(tmp_path / "alone") == files_of(out)
    assert found.failures == alone.failures
    assert [failure.path.name for failure in found.failures] == ["Op.x.1.2.3"]
    assert (found.tensors, found.bytes_written) == (alone.tensors, alone.bytes_written)
    for name in files_of(out):
        assert (out / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()


def test_conversion_names_every_file_when_a_process_dies(folder, tmp_path, monkeypatch):
    """Every file that nobody converted is named, once."""
    monkeypatch.setattr(run_module, "_FILES_PER_PROCESS", 1)
    monkeypatch.setattr(run_module, "convert_file", killed)
    found = converted(folder, tmp_path / "out", ConversionRequest(), jobs=2)
    assert found.failed == sorted(folder.iterdir())
    assert len(found.failures) == 10
    assert {failure.reason for failure in found.failures} == {run_module._PROCESS_DIED}


@pytest.mark.parametrize("kind", DATA_TYPES.values(), ids=lambda kind: kind.name)
def test_conversion_of_every_element_type(kind, tmp_path):
    """It becomes a file that numpy reads, or one line says that it cannot."""
    payload = numbered((64 * 16,), "uint8")
    part = tensor("output", payload, data_type=kind.number, shape=Shape((64,)))
    (tmp_path / NAME).write_bytes(bin_file(part))
    found = converted(tmp_path / NAME, tmp_path / "out", ConversionRequest())
    if found.failures:
        assert kind.name in found.failures[0].reason
        assert files_of(tmp_path / "out") == []
    else:
        array = np.load(tmp_path / "out" / f"{NAME}.output.0.npy", allow_pickle=False)
        assert array.shape == ((1024,) if kind.name == "UNDEFINED" else (64,))


requests = st.builds(
    ConversionRequest,
    target=st.sampled_from(["", *TARGET_FORMATS]),
    kind=st.sampled_from(["npy", "bin"]),
    shape=st.lists(st.integers(1, 1 << 60), max_size=5).map(tuple),
    side=st.sampled_from(["", "input", "output"]),
    index=st.integers(0, 2),
)


@pytest.mark.slow
@given(headers, st.binary(max_size=300), requests)
def test_conversion_of_false_headers_never_raises(tmp_path_factory, header, body, request):
    """Anything a header says: outputs within the folder, or lines; never an exception."""
    folder = tmp_path_factory.mktemp("lies")
    (folder / NAME).write_bytes(file_of(header, [body]))
    found = converted(folder / NAME, folder / "out", request)
    assert files_of(folder) == sorted([NAME, *(f"out/{n}" for n in files_of(folder / "out"))])
    assert all(name.startswith(f"{NAME}.") for name in files_of(folder / "out"))
    assert len(files_of(folder / "out")) == found.tensors


@given(st.data())
def test_conversion_of_damaged_files_never_raises(tmp_path_factory, data):
    """Bytes of a real file changed, or cut off."""
    image = numbered((1, 20, 2, 2))
    whole = bytearray(bin_file(tensor("input", blocks(image), "NC1HWC0", image.shape)))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    folder = tmp_path_factory.mktemp("damage")
    (folder / NAME).write_bytes(whole[:cut] if data.draw(st.booleans()) else whole)
    converted(
        folder / NAME, folder / "out", ConversionRequest(data.draw(st.sampled_from(TARGET_FORMATS)))
    )


def test_conversion_keeps_names_that_are_not_text(tmp_path):
    """Names are bytes; they come out as they went in."""
    name = os.fsdecode(b"Op.\xff\xfe,\n.1.2.3")
    (tmp_path / name).write_bytes(bin_file(tensor("output", numbered((3,)))))
    found = converted(tmp_path, tmp_path / "out", ConversionRequest())
    assert not found.failures
    assert files_of(tmp_path / "out") == [f"{name}.output.0.npy"]


def test_conversion_skips_placeholders(tmp_path):
    """A slot that was not dumped stands in the header without type, shape and size."""
    empty = tensor("output", numbered((0,)), data_type=0, shape=None)
    (tmp_path / NAME).write_bytes(bin_file(empty, tensor("output", numbered((3,)))))
    found = converted(tmp_path / NAME, tmp_path / "out", ConversionRequest())
    assert (found.tensors, files_of(tmp_path / "out")) == (1, [f"{NAME}.output.1.npy"])


def test_interrupted_conversion_leaves_only_complete_files(folder, tmp_path, monkeypatch):
    """What is in hand is finished, no process stays, nothing half written."""
    monkeypatch.setattr(run_module, "_FILES_PER_PROCESS", 1)
    out = tmp_path / "out"

    def interrupted(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_files(
            find_bin_files(folder, out), out, ConversionRequest("NCHW"), jobs=2, done=interrupted
        )
    assert multiprocessing.active_children() == []
    assert all(name.endswith(".npy") for name in files_of(out))
    for name in files_of(out):
        assert np.load(out / name).shape[0] == 2
