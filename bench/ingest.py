"""Sustained speed from a rank to the compressed tree, against its parts done bare.

The peers do the same work without a daemon: raw zstd packs the same files on as many threads,
and a bare writer puts the same packed bytes into as many new files. Everything is in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import zstandard

from rankdump.contract import npy

from .host import Host, memory_folder, running_host
from .machine import cores
from .result import Result, median

TENSORS = 32
ROUNDS = 4
"""Every tensor is dumped this often, with another first element each time: nothing is linked."""
TENSOR_BYTES = 4 << 20
REPEATS = 5
_GB = 1e9

Tensor = npt.NDArray[np.float32]


def measure() -> Result:
    """Measure daemon, raw zstd and bare writes in turns, and compare the medians."""
    tensors = _tensors()
    threads = cores()
    total_gb = ROUNDS * TENSORS * TENSOR_BYTES / _GB
    times: dict[str, list[float]] = {"ingest": [], "zstd": [], "write": []}
    packed_bytes = 0
    with running_host() as host, memory_folder() as folder:
        for repeat in range(REPEATS):
            times["ingest"].append(_ingest(host, f"run{repeat}", tensors))
            packed, zstd_s = _raw_zstd(tensors, threads)
            packed_bytes = sum(map(len, packed))
            times["zstd"].append(zstd_s)
            times["write"].append(_raw_write(packed, folder, threads))
    speed = {name: total_gb / median(seconds) for name, seconds in times.items()}
    return Result(
        figures={
            "gb_per_s": speed["ingest"],
            "raw_zstd_gb_per_s": speed["zstd"],
            "raw_write_gb_per_s": speed["write"],
            "gb": total_gb,
            "packed_gb": packed_bytes / _GB,
            "tensors": ROUNDS * TENSORS,
            "threads": threads,
        },
        ratios={
            "speed_vs_raw_zstd": speed["ingest"] / speed["zstd"],
            "speed_vs_raw_write": speed["ingest"] / speed["write"],
        },
    )


def _tensors() -> list[Tensor]:
    """Return activations as a ReLU leaves them: half of them zero."""
    numbers = np.random.default_rng(0)
    shape = (TENSOR_BYTES // 4 // 1024, 1024)
    return [np.maximum(numbers.standard_normal(shape, np.float32), 0) for _ in range(TENSORS)]


def _stamped(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Yield every tensor once a round, changed in place."""
    for index in range(ROUNDS):
        for number, tensor in enumerate(tensors):
            tensor[0, 0] = index * TENSORS + number
            yield tensor


def _ingest(host: Host, name: str, tensors: list[Tensor]) -> float:
    """Return the seconds from the first tensor until all are acknowledged in the tree."""
    with host.session(name) as session:
        session.step(0)
        begun = time.perf_counter()
        for slot, tensor in enumerate(_stamped(tensors)):
            session.dump("Relu", f"Default/relu{slot}-ReLU/ReLU-op{slot}", "output", 0, tensor)
        session.close()
        seconds = time.perf_counter() - begun
    tree = host.tree(name)
    written = sum(1 for _ in tree.glob("rank_0/Bench/0/0/*.npy.zst"))
    if written != ROUNDS * TENSORS:
        raise RuntimeError(f"{written} files of {ROUNDS * TENSORS} in {tree}")
    return seconds


def _raw_zstd(tensors: list[Tensor], threads: int) -> tuple[list[bytes], float]:
    """Pack the same files by zstandard alone; a thread takes one tensor through its rounds."""

    def pack(number: int) -> list[bytes]:
        compressor = zstandard.ZstdCompressor(level=1, write_checksum=True)
        packed: list[bytes] = []
        for index in range(ROUNDS):
            tensor = tensors[number]
            tensor[0, 0] = index * TENSORS + number
            stream = compressor.compressobj(size=len(head) + tensor.nbytes)
            pieces = [stream.compress(head), stream.compress(tensor.data), stream.flush()]
            packed.append(b"".join(pieces))
        return packed

    head = npy.header("<f4", tensors[0].shape)
    packed: list[bytes] = []

    def run() -> None:
        with ThreadPoolExecutor(threads) as pool:
            for part in pool.map(pack, range(TENSORS)):
                packed.extend(part)

    return packed, _seconds(run)


def _raw_write(packed: list[bytes], folder: Path, threads: int) -> float:
    """Write the same files and nothing else."""

    def write(number: int) -> None:
        (folder / f"{number}.npy.zst").write_bytes(packed[number])

    def run() -> None:
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(write, range(len(packed))):
                pass

    seconds = _seconds(run)
    for path in folder.iterdir():
        path.unlink()
    return seconds


def _seconds(action: Callable[[], None]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun
