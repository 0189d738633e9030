"""Which worker takes a rank of a job: the same one for ever, for a given number of workers. Pure.

All sessions of a rank share tables and manifests of a tree, so they share a worker.
"""

from __future__ import annotations

import zlib


def worker_of(job_id: str, rank: int, workers: int) -> int:
    """Return the worker's index.

    The digits of the rank to the base `workers`, added up: ranks of a host mostly follow each
    other, or one another at the distance of a power of two, and either way neighbours get
    different workers. Jobs of one rank are spread by their names.
    """
    index = zlib.crc32(job_id.encode(errors="surrogatepass"))
    while rank and workers > 1:
        rank, digit = divmod(rank, workers)
        index += digit
    return index % workers
