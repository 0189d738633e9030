from __future__ import annotations

import csv
import os

import pytest

from rankdump.contract.errors import DamagedError
from rankdump.contract.events import EventKind
from rankdump.contract.order import COLUMNS, ORDER_FOLDER, of_another_job, to_row
from rankdump.contract.status import OrderEntry
from rankdump.reader import read_order

ENTRIES = (
    OrderEntry(0, 0, 0, (0,), 'Default/a,"b"/MatMul-op0', EventKind.OPERATOR, "", 0, 5, 9),
    OrderEntry(1, 0, 0, (0, 1), "Default/AllReduce", EventKind.ALL_REDUCE, "world", 3, 9, 12, (2,)),
)


def write(root, entries, name="execution_order.csv", age_s=0):
    path = root / ORDER_FOLDER / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *map(to_row, entries)])
    os.utime(path, (1e9 - age_s, 1e9 - age_s))
    return path


def test_what_was_published_comes_back(tmp_path):
    """Entries survive the file, and so do the findings beside it."""
    write(tmp_path, ENTRIES)
    (tmp_path / ORDER_FOLDER / "findings.txt").write_text("rank 2 is late\n")
    published = read_order(tmp_path)
    assert published.entries == ENTRIES
    assert published.findings == ("rank 2 is late",)
    assert published.others == ()


def test_the_latest_job_counts(tmp_path):
    """Of several jobs in one tree the one published last is read, with its own findings."""
    write(tmp_path, ENTRIES, age_s=100)
    (tmp_path / ORDER_FOLDER / "findings.txt").write_text("of the first\n")
    write(tmp_path, ENTRIES[:1], of_another_job("execution_order.csv", "j2"))
    (tmp_path / ORDER_FOLDER / of_another_job("findings.txt", "j2")).write_text("of the second\n")
    published = read_order(tmp_path)
    assert published.entries == ENTRIES[:1]
    assert published.findings == ("of the second",)
    assert published.others == ("execution_order.csv",)


def test_what_is_no_file_is_no_order(tmp_path):
    """A link to nowhere and a folder of that name are passed over."""
    path = write(tmp_path, ENTRIES)
    path.with_name("execution_order.a.csv").symlink_to("nowhere")
    path.with_name("execution_order.b.csv").mkdir()
    published = read_order(tmp_path)
    assert (published.path, published.entries, published.others) == (path, ENTRIES, ())


def test_no_order_is_said(tmp_path):
    """A tree without an order is an error with the path, not an empty order."""
    with pytest.raises(DamagedError, match=r"execution_order\.csv: not there"):
        read_order(tmp_path)


@pytest.mark.parametrize(
    "text", ["0,0\n", "x" + "," * 10 + "\n", "0,0,0,NO_SUCH_KIND,n,0,,0,0,0,\n", "\udcff\n"]
)
def test_a_bad_line_is_named(tmp_path, text):
    """Damage says in which file, and where."""
    path = write(tmp_path, ENTRIES)
    with path.open("a", errors="surrogateescape") as file:
        file.write(text)
    with pytest.raises(DamagedError, match=r"execution_order\.csv"):
        read_order(tmp_path)
