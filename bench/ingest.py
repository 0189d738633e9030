"""Sustained speed from a rank to the tree, compressed and not, against the bare work.

Files are packed at once, later as ranks would wait for that, or not at all.

The same work is done without a daemon: raw zstd compresses the same files on as many threads, and a
plain writer writes the same npy files uncompressed. Everything is in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import zstandard

from rankdump._core import npy_format

from .arrays import Tensors, activations, dump, stamp
from .host import Host, memory_folder, running_host
from .machine import cores
from .result import Result, median
from .timing import seconds
from .trees import check_complete

TENSORS = 32
ROUNDS = 4
"""Every tensor is dumped this often, with another first element each time: nothing is linked."""
ELEMENTS = 1 << 20
"""4 MiB of float32."""
REPEATS = 5
_GB = 1e9


def measure() -> Result:
    """Measure both codecs of the daemon, raw zstd and plain writes alternately; compare medians."""
    tensors = activations(TENSORS, ELEMENTS)
    threads = cores()
    total_gb = ROUNDS * tensors.nbytes / _GB
    cases = ("zstd", "later", "raw_zstd", "none", "raw_write")
    times: dict[str, list[float]] = {name: [] for name in cases}
    with running_host() as host, memory_folder() as folder:
        for repeat in range(REPEATS):
            times["zstd"].append(_ingest(host, f"zstd{repeat}", "zstd-always", tensors))
            times["later"].append(_ingest(host, f"later{repeat}", "zstd", tensors))
            times["raw_zstd"].append(_raw_zstd(tensors, threads))
            times["none"].append(_ingest(host, f"none{repeat}", "none", tensors))
            times["raw_write"].append(_raw_write(tensors, folder, threads))
    speed = {name: total_gb / median(found) for name, found in times.items()}
    return Result(
        figures={
            "gb_per_s": speed["zstd"],
            "packed_later_gb_per_s": speed["later"],
            "codec_none_gb_per_s": speed["none"],
            "raw_zstd_gb_per_s": speed["raw_zstd"],
            "raw_write_gb_per_s": speed["raw_write"],
            "gb": total_gb,
            "tensors": ROUNDS * TENSORS,
            "threads": threads,
        },
        ratios={
            "speed_vs_raw_zstd": speed["zstd"] / speed["raw_zstd"],
            "packed_later_vs_at_once": speed["later"] / speed["zstd"],
            "speed_vs_raw_write": speed["none"] / speed["raw_write"],
        },
    )


def _ingest(host: Host, name: str, codec: str, tensors: Tensors) -> float:
    """Return the seconds from the first tensor until all are acknowledged in the tree."""
    session = host.session(name, {"codec": codec})
    session.step(0)

    def run() -> None:
        for turn in range(ROUNDS):
            stamp(tensors, turn)
            dump(session, tensors)
        session.close()

    taken_s = seconds(run)
    check_complete(host.tree(name))
    host.remove_tensors(name)
    return taken_s


def _raw_zstd(tensors: Tensors, threads: int) -> float:
    """Compress the same files with zstandard alone; a thread has one tensor in all rounds."""

    def pack(number: int) -> None:
        compressor = zstandard.ZstdCompressor(level=1, write_checksum=True)
        tensor = tensors[number]
        for turn in range(ROUNDS):
            tensor[0] = turn * TENSORS + number
            stream = compressor.compressobj(size=len(head) + tensor.nbytes)
            b"".join((stream.compress(head), stream.compress(tensor.data), stream.flush()))

    head = npy_format.format_npy_header("<f4", tensors[0].shape)
    return _over(range(TENSORS), pack, threads)


def _raw_write(tensors: Tensors, folder: Path, threads: int) -> float:
    """Write the same files and nothing else."""

    def write(number: int) -> None:
        with (folder / f"{number}.npy").open("xb", buffering=0) as file:
            file.write(head)
            file.write(tensors[number % TENSORS].data)

    head = npy_format.format_npy_header("<f4", tensors[0].shape)
    write_s = _over(range(ROUNDS * TENSORS), write, threads)
    for path in folder.iterdir():
        path.unlink()
    return write_s


def _over(numbers: range, work: Callable[[int], None], threads: int) -> float:
    """Return the seconds of the work on all numbers."""

    def run() -> None:
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(work, numbers):
                pass

    return seconds(run)
