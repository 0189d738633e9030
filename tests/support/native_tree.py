"""Trees as MindSpore and CANN write them, and the expected result of an ingest."""

from __future__ import annotations

import io
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import zstandard

from rankdump._binfile.bin_file import serialize_bin_head
from rankdump._binfile.header_parts import DumpData, OpInput, OpOutput, Shape
from rankdump._core import npy_format

LONG = "ReLU.Default_" + "a-A_" * 70 + "ReLU-op0.0.0.1700000000000777.input.0.DefaultFormat.npy"


def npy_bytes(values: np.ndarray, *, descr: str = "") -> bytes:
    """A file as MindSpore writes it, under any type string."""
    return npy_format.format_npy_header(descr or values.dtype.str, values.shape) + values.tobytes()


def bin_bytes(*arrays: np.ndarray, op_name: str = "net/Add", trailing: bytes = b"") -> bytes:
    """A bin file: all but the last are inputs, the last is the output."""
    parts = [(Shape(tuple(a.shape)), a.nbytes) for a in arrays]
    header = DumpData(
        op_name=op_name,
        input=tuple(OpInput(1, 2, shape, size=size) for shape, size in parts[:-1]),
        output=tuple(OpOutput(1, 2, shape, size=size) for shape, size in parts[-1:]),
    )
    return serialize_bin_head(header) + b"".join(a.tobytes() for a in arrays) + trailing


def tensor_name(op: str, stamp: int, side: str = "output", slot: int = 0) -> str:
    return f"Op.Default_{op}.0.0.{1_700_000_000_000_000 + stamp}.{side}.{slot}.DefaultFormat.npy"


def native_files(*, ranks: int = 2, iterations: int = 2) -> Iterator[tuple[str, bytes]]:
    """Paths and bytes of a tree with everything in it that the real ones have."""
    for rank in range(ranks):
        for iteration in range(iterations):
            folder = f"rank_{rank}/Net/0/{iteration}"
            stamp = 1000 * iteration
            ones = np.ones((40, 40), np.float32)
            random = np.random.default_rng(stamp + rank).standard_normal(5000)
            yield f"{folder}/{tensor_name('ones', stamp)}", npy_bytes(ones)
            yield f"{folder}/{tensor_name('same', stamp + 1)}", npy_bytes(ones)
            yield f"{folder}/{tensor_name('random', stamp + 2)}", npy_bytes(random)
            yield f"{folder}/{tensor_name('scalar', stamp + 3)}", npy_bytes(np.array(7))
            half = np.arange(6, dtype="<u2").reshape(2, 3)
            yield f"{folder}/{tensor_name('bf16', stamp + 4)}", npy_bytes(half, descr="<E2")
            empty = npy_bytes(np.zeros((0,), np.float32)) + b"\1\2\3\4"
            yield f"{folder}/{tensor_name('empty', stamp + 5)}", empty
            yield f"{folder}/{12345 + iteration}.npy", npy_bytes(ones * 2)
            mapped = f"{12345 + iteration}.npy,{LONG}\n"
            yield f"{folder}/mapping.csv", mapped.encode()
            yield f"{folder}/Add.net_Add.3.1.{1_700_000_000_000_900 + stamp}", bin_bytes(ones, ones)
        yield f"rank_{rank}/execution_order/ms_execution_order_graph_0.csv", b"Head\nA\nB\n"
        yield f"rank_{rank}/graphs/ms_output_trace_code_graph_0.ir", b"# IR\n"
        yield f"rank_{rank}/.dump_metadata/config.json", b"{}"


def write_tree(root: Path, files: dict[str, bytes] | None = None) -> dict[str, bytes]:
    """Write a tree with the modes of MindSpore, and return its files."""
    files = dict(native_files()) if files is None else files
    for path, data in files.items():
        write_file(root / path, data)
    return files


def write_file(path: Path, data: bytes) -> None:
    for folder in reversed(path.parents):
        if not folder.exists():
            folder.mkdir(mode=0o700)
    path.write_bytes(data)
    path.chmod(0o400)


def stored(tree: Path) -> dict[str, bytes]:
    """What the source's files have become, unpacked, by their names there.

    Left out: what an ingest itself adds.
    """
    found: dict[str, bytes] = {}
    for path in sorted(tree.rglob("*")):
        relative = path.relative_to(tree).as_posix()
        own = relative.startswith(".rankdump") or "/.dump_metadata/manifest/" in f"/{relative}"
        if path.is_file() and not own:
            name = relative.removesuffix(".zst")
            assert name not in found, f"{name} stands there twice"
            found[name] = unpacked(path)
    return found


def unpacked(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix != ".zst":
        return data
    reader = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True)
    return reader.read()


def frames(path: Path) -> list[bytes]:
    """The contents of each frame of a packed file."""
    data, found = path.read_bytes(), list[bytes]()
    while data:
        reader = zstandard.ZstdDecompressor().decompressobj()
        found.append(reader.decompress(data))
        data = reader.unused_data
    return found


def hidden(tree: Path) -> list[str]:
    """Half-written files that were left."""
    return [path.name for path in tree.rglob(".ingest-*")]


def committed(tree: Path) -> set[str]:
    """What the state says was taken."""
    with sqlite3.connect(tree / ".rankdump" / "ingest.sqlite") as base:
        return {bytes(path).decode() for (path,) in base.execute("SELECT path FROM files")}
