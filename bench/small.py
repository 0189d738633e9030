"""Small tensors through the whole pipeline: what a record costs when its bytes cost nothing.

A record counts when it is acknowledged in the tree, a row when it stands in `statistic.csv`.
"""

from __future__ import annotations

import time
from pathlib import Path

import rankdump

from .arrays import Tensors, activations, dump, numpy_save_s, stamp
from .host import Host, memory_folder, running_host
from .result import Result, median
from .timing import seconds
from .trees import check_complete

ELEMENTS = 256
"""1 KiB of float32."""
TENSORS = 1_000
"""In an iteration, each of another operator."""
RECORD_ITERATIONS = 8
ROW_ITERATIONS = 40
REPEATS = 3
_TIMEOUT_S = 600.0


def measure() -> Result:
    """Measure records, rows of statistics and `numpy.save` in turns."""
    tensors = activations(TENSORS, ELEMENTS)
    rates: dict[str, list[float]] = {"records": [], "rows": [], "saved": []}
    with running_host() as host, memory_folder() as folder:
        for repeat in range(REPEATS):
            rates["records"].append(_records(host, f"tensor{repeat}", tensors))
            rates["saved"].append(TENSORS / numpy_save_s(folder, tensors))
            rates["rows"].append(_rows(host, f"statistic{repeat}", tensors))
    speed = {name: median(found) for name, found in rates.items()}
    return Result(
        figures={
            "records_per_s": speed["records"],
            "statistic_rows_per_s": speed["rows"],
            "numpy_save_per_s": speed["saved"],
            "records": TENSORS * RECORD_ITERATIONS,
            "statistic_rows": TENSORS * ROW_ITERATIONS,
        },
        ratios={"records_vs_numpy_save": speed["records"] / speed["saved"]},
    )


def _records(host: Host, name: str, tensors: Tensors) -> float:
    """Return the records a second, from the first tensor until all are acknowledged."""
    session = host.session(name)
    taken_s = seconds(lambda: _dump(session, tensors, RECORD_ITERATIONS))
    check_complete(host.tree(name))
    host.remove_tensors(name)
    return TENSORS * RECORD_ITERATIONS / taken_s


def _rows(host: Host, name: str, tensors: Tensors) -> float:
    """Return the rows a second, from the first tensor until the last row is in its table."""
    session = host.session(name, saved_data="statistic")
    begun = time.perf_counter()
    _dump(session, tensors, ROW_ITERATIONS)
    wanted = TENSORS * ROW_ITERATIONS
    # All are acknowledged; rows that were not written by then would be waited for here.
    while (written := _table_rows(host.tree(name))) < wanted:
        if time.perf_counter() - begun > _TIMEOUT_S:
            raise RuntimeError(f"{written} rows of {wanted}")
        time.sleep(0.01)
    taken_s = time.perf_counter() - begun
    check_complete(host.tree(name))
    host.remove_tensors(name)
    return wanted / taken_s


def _dump(session: rankdump.Session, tensors: Tensors, iterations: int) -> None:
    for iteration in range(iterations):
        session.step(iteration)
        stamp(tensors, iteration)
        dump(session, tensors)
    session.close()


def _table_rows(tree: Path) -> int:
    """Return the rows of all tables, without their heads."""
    tables = tree.glob("rank_0/Bench/0/*/statistic.csv")
    return sum(table.read_bytes().count(b"\n") - 1 for table in tables)
