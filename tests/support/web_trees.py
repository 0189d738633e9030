"""Trees for the web page: names with markup, a NaN, an order with a finding, and source lines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.tree_builder import TreeBuilder

from rankdump._core.events import EventKind, Finding, FindingKind
from rankdump._core.execution_order import (
    FINDINGS_FILE,
    GLOBAL_ORDER_FOLDER,
    ORDER_HEADER,
    format_finding_line,
    format_order_line,
    make_order_file_name,
)
from rankdump._core.record import TensorSide
from rankdump._core.status import OrderEntry

LINEAR = "Default/network-Net/encoder-Encoder/0-Linear/Linear-op0"
MARKUP = 'Default/network-Net/<script>alert("x")</script>&amp;\'-op0'
LONG = "Default/network-Net/" + "/".join(f"layer{n}-Block" for n in range(200)) + "/MatMul-op0"
GRADIENT = "Gradients/encoder.0.weight"
SCRIPT = "def forward(self, rows):\n    return self.encoder(rows)\n"
CODE_LINE = 2
BAD_PLACE = (1, 1)
"""Rank and iteration of the NaN."""
GRAPH = """%1([CNode]1) = PrimFunc_Linear(%p)
      # Fullname with scope: ({name})
      # In file {script}:2/    return self.encoder(rows)/
"""


def fill_tree(root: Path, *, ranks: int = 2, iterations: int = 3) -> Path:
    """Write tensors, an order and graphs; rank 1 has a NaN in iteration 1."""
    tree = TreeBuilder(root)
    root.mkdir(parents=True, exist_ok=True)
    script = root.parent / "train.py"
    script.write_text(SCRIPT)
    for iteration in range(iterations):
        for rank in range(ranks):
            values = np.arange(24, dtype=np.float32).reshape(2, 3, 4) + rank
            tree.tensor(rank, iteration, LINEAR, values, side=TensorSide.INPUT, tabled=True)
            made = np.full((4, 6), iteration + rank + 1, np.float32)
            if (rank, iteration) == BAD_PLACE:
                made[0, 0] = np.nan
            tree.tensor(rank, iteration, LINEAR, made, tabled=True)
            tree.tensor(rank, iteration, MARKUP, made, side=TensorSide.INPUT, tabled=True)
            tree.row(rank, iteration, LONG, values)
            tree.row(rank, iteration, GRADIENT, values, op_type="Parameter")
            tree.complete(rank, iteration, world_size=ranks)
    for rank in range(ranks):
        tree.graph(rank, GRAPH.format(name=LINEAR, script=script))
    write_order(root, ranks=ranks, iterations=iterations)
    return root


def write_order(root: Path, *, ranks: int, iterations: int) -> None:
    """Write an order of two operators a rank and a collective, with a finding."""
    folder = root / GLOBAL_ORDER_FOLDER
    folder.mkdir(exist_ok=True)
    entries: list[OrderEntry] = []
    for iteration in range(iterations):
        for rank in range(ranks):
            for name in (LINEAR, MARKUP):
                at = len(entries)
                entries.append(
                    OrderEntry(
                        *(at, 0, iteration, (rank,), name, EventKind.OPERATOR),
                        start_us=1000 + at * 100,
                        end_us=1050 + at * 100,
                    )
                )
        at = len(entries)
        entries.append(
            OrderEntry(
                *(at, 0, iteration, tuple(range(ranks)), "Default/AllReduce-op0"),
                EventKind.ALL_REDUCE,
                group="world",
                start_us=1000 + at * 100,
                end_us=1090 + at * 100,
            )
        )
    text = ORDER_HEADER + "".join(map(format_order_line, entries))
    (folder / make_order_file_name(0)).write_text(text)
    finding = Finding(
        *(FindingKind.LATE, 1, "iteration 1: events of rank 1 came late <b>", (1,)),
        name="Default/AllReduce-op0",
    )
    (folder / FINDINGS_FILE).write_text(format_finding_line(finding))
