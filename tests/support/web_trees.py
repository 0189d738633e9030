"""Trees for the web page: names with markup, a NaN, an order with a finding, and source lines."""

from __future__ import annotations

from collections.abc import Sequence
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


def write_order(
    root: Path,
    *,
    ranks: int,
    iterations: int,
    names: Sequence[str] = (LINEAR, MARKUP),
    late: str = "iteration 1: events of rank 1 came late <b>",
    attempt: int = 0,
) -> None:
    """Write an order of some operators a rank and a collective, with a finding; attempts begin with
    the iteration of their number.
    """
    folder = root / GLOBAL_ORDER_FOLDER
    folder.mkdir(exist_ok=True)
    entries: list[OrderEntry] = []
    for iteration in range(attempt, attempt + iterations):
        for rank in range(ranks):
            for name in names:
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
    (folder / make_order_file_name(0, attempt=attempt)).write_text(text)
    finding = Finding(
        *(FindingKind.LATE, 1, late, (1,)),
        name="Default/AllReduce-op0",
    )
    (folder / FINDINGS_FILE).write_text(format_finding_line(finding))


# -- a model of some layers, whose third rank has a NaN

TRAINING_RANKS, TRAINING_ITERATIONS = 4, 16
TRAINING_BAD = (2, 11)
"""Rank and iteration of the first NaN."""
BAD_OPERATOR = "self_attn-Attention/Softmax-op0"
LAYERS = 3
TRAINING_SCRIPT = '''import torch


class Attention(torch.nn.Module):
    """Scores of all pairs of rows, and the mean of their values."""

    def forward(self, rows):
        query, key, value = self.project(rows).chunk(3, dim=-1)
        scores = query @ key.transpose(-1, -2) / self.temperature
        weights = scores.softmax(dim=-1)
        return self.out(weights @ value)


class Block(torch.nn.Module):
    def forward(self, rows):
        rows = rows + self.self_attn(self.norm1(rows))
        return rows + self.mlp(self.norm2(rows))
'''
_OPERATORS = (
    ("norm1-LayerNorm/LayerNorm-op0", 16),
    ("self_attn-Attention/project-Linear/Linear-op0", 8),
    (BAD_OPERATOR, 10),
    ("self_attn-Attention/out-Linear/Linear-op0", 11),
    ("norm2-LayerNorm/LayerNorm-op0", 17),
    ("mlp-Sequential/0-Linear/Linear-op0", 17),
    ("mlp-Sequential/2-Linear/Linear-op0", 17),
)
"""Names in a layer, and the line of the script."""


def name_operators() -> list[tuple[str, int]]:
    """Return the full names of the operators of the model, and their lines."""
    above = "Default/network-Reader/encoder-Encoder/layers-ModuleList"
    return [
        (f"{above}/{layer}-Block/{name}", line)
        for layer in range(LAYERS)
        for name, line in _OPERATORS
    ]


def fill_training_tree(root: Path, *, has_fault: bool = True) -> Path:
    """Write the tensors of a model whose norms grow until rank 2 has a NaN in iteration 11; those
    of its reference without the fault.
    """
    tree = TreeBuilder(root)
    root.mkdir(parents=True)
    script = root.parent / "train.py"
    script.write_text(TRAINING_SCRIPT)
    numbers = np.random.default_rng(7)
    operators = name_operators()
    names = [name for name, _ in operators]
    for iteration in range(TRAINING_ITERATIONS):
        for rank in range(TRAINING_RANKS):
            is_faulty = has_fault and rank == TRAINING_BAD[0]
            _fill_step(tree, rank, iteration, names, numbers, is_faulty=is_faulty)
    lines = "".join(
        f"%{at}([CNode]{at}) = PrimFunc_Op(%p)\n      # Fullname with scope: ({name})\n"
        f"      # In file {script}:{line}/{TRAINING_SCRIPT.splitlines()[line - 1]}/\n"
        for at, (name, line) in enumerate(operators, 1)
    )
    for rank in range(TRAINING_RANKS):
        tree.graph(rank, lines)
    write_order(
        root,
        ranks=TRAINING_RANKS,
        iterations=TRAINING_ITERATIONS,
        names=[name for name, _ in operators[:4]],
        late="iteration 1: 3 events of rank 1 came late",
    )
    return root


def _fill_step(
    tree: TreeBuilder,
    rank: int,
    iteration: int,
    names: list[str],
    numbers: np.random.Generator,
    *,
    is_faulty: bool,
) -> None:
    is_bad = is_faulty and iteration >= TRAINING_BAD[1]
    size = 1.0 + 0.05 * iteration + (0.4 * iteration if is_faulty else 0.0)
    is_spoilt = False
    rows = numbers.normal(size=(8, 16, 24)).astype(np.float32)
    for at, name in enumerate(names):
        tree.tensor(rank, iteration, name, rows, side=TensorSide.INPUT, tabled=True)
        rows = (rows * 0.4 + numbers.normal(size=rows.shape) * size * (1 + 0.1 * at)).astype("f4")
        is_spoilt = is_spoilt or (is_bad and BAD_OPERATOR in name)
        if is_spoilt:
            rows[0, :3] = np.nan
        tree.tensor(rank, iteration, name, rows, tabled=True)
    for layer in range(LAYERS):
        gradient = (numbers.normal(size=(24, 24)) * 0.01 * size).astype(np.float32)
        name = f"Gradients/encoder.layers.{layer}.self_attn.project.weight"
        tree.row(rank, iteration, name, gradient, op_type="Parameter")
    tree.complete(rank, iteration, world_size=TRAINING_RANKS)
