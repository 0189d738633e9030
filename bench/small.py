"""Small tensors through the whole pipeline: cost of a record when its bytes cost nothing.

A record counts when it is acknowledged in the tree, a row when it is in `statistic.csv`. Two
ranks at once show the gain of a second worker of the agent.
"""

from __future__ import annotations

import time
from pathlib import Path

import rankdump

from .arrays import Tensors, activations, dump, numpy_save_s, stamp
from .burst import ELEMENTS, ITERATIONS, TENSORS, burst_s
from .host import Host, memory_folder, running_host
from .process import cpu_s
from .result import Result, median
from .timing import seconds
from .trees import check_complete

ROW_ITERATIONS = 200
TABLE_ITERATIONS = 300
"""Of the runs with and without a table of statistics: more rows than two of its windows have."""
TABLE_REPEATS = 3
RANKS = 2
REPEATS = 3
_TIMEOUT_S = 600.0


def measure() -> Result:
    """Measure records, rows of statistics and `numpy.save` alternately."""
    tensors = activations(TENSORS, ELEMENTS)
    rates: dict[str, list[float]] = {"records": [], "rows": [], "saved": [], "one": [], "two": []}
    used_s: dict[str, list[float]] = {"record": [], "fingerprint": [], "row": []}
    with running_host() as host, running_host(workers=2) as double, memory_folder() as folder:
        for repeat in range(REPEATS):
            before_s = cpu_s(host.pid)
            rates["records"].append(_records(host, f"tensor{repeat}", tensors))
            used_s["record"].append((cpu_s(host.pid) - before_s) / (TENSORS * ITERATIONS))
            before_s = cpu_s(host.pid)
            _records(host, f"fingerprint{repeat}", tensors, fingerprints=True)
            used_s["fingerprint"].append((cpu_s(host.pid) - before_s) / (TENSORS * ITERATIONS))
            rates["saved"].append(TENSORS / numpy_save_s(folder, tensors))
            before_s = cpu_s(host.pid)
            rates["rows"].append(_rows(host, f"statistic{repeat}", tensors))
            used_s["row"].append((cpu_s(host.pid) - before_s) / (TENSORS * ROW_ITERATIONS))
            rates["one"].append(_ranks(host, f"ranks{repeat}"))
            rates["two"].append(_ranks(double, f"ranks{repeat}"))
    speed = {name: median(found) for name, found in rates.items()}
    table = _compare_table(tensors)
    return Result(
        figures={
            "records_per_s": speed["records"],
            "statistic_rows_per_s": speed["rows"],
            "numpy_save_per_s": speed["saved"],
            "agent_us_per_record": median(used_s["record"]) * 1e6,
            "agent_us_per_row": median(used_s["row"]) * 1e6,
            "records_of_2_ranks_per_s": speed["one"],
            "records_of_2_ranks_2_workers_per_s": speed["two"],
            "records": TENSORS * ITERATIONS,
            "statistic_rows": TENSORS * ROW_ITERATIONS,
        },
        ratios={
            "agent_us_with_fingerprint_vs_record": median(used_s["fingerprint"])
            / median(used_s["record"]),
            "records_vs_numpy_save": speed["records"] / speed["saved"],
            "2_workers_vs_1": speed["two"] / speed["one"],
            "rows_with_table_vs_without": table,
        },
    )


def _records(host: Host, name: str, tensors: Tensors, *, fingerprints: bool = False) -> float:
    """Return the records a second, from the first tensor until all are acknowledged."""
    session = host.session(name, {"fingerprints": fingerprints})
    taken_s = seconds(lambda: _dump(session, tensors, ITERATIONS))
    check_complete(host.tree(name))
    host.remove_tensors(name)
    return TENSORS * ITERATIONS / taken_s


def _ranks(host: Host, name: str) -> float:
    """Return the records a second of several ranks at once."""
    taken_s = burst_s(host, name, RANKS)
    check_complete(host.tree(name))
    host.remove_tensors(name)
    return RANKS * TENSORS * ITERATIONS / taken_s


def _compare_table(tensors: Tensors) -> float:
    """Return the rows a second with the table of statistics over those without it."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    with running_host(table=False) as plain, running_host() as tabled:
        for repeat in range(TABLE_REPEATS):
            for host, table in ((plain, False), (tabled, True)):
                rates[table].append(_rows(host, f"table{repeat}", tensors, TABLE_ITERATIONS))
    return median(rates[True]) / median(rates[False])


def _rows(host: Host, name: str, tensors: Tensors, iterations: int = ROW_ITERATIONS) -> float:
    """Return the rows a second, from the first tensor until the last row is in its table."""
    session = host.session(name, saved_data="statistic")
    begun = time.perf_counter()
    _dump(session, tensors, iterations)
    wanted = TENSORS * iterations
    # All are acknowledged; rows that were not written by then would be waited for here.
    while (written := _table_rows(host.tree(name))) < wanted:
        if time.perf_counter() - begun > _TIMEOUT_S:
            raise RuntimeError(f"{written} rows of {wanted}")
        time.sleep(0.01)
    taken_s = time.perf_counter() - begun
    host.wait_until_indexed()
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
