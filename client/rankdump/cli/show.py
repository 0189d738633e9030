"""`rankdump show`: one tensor file in facts, figures and first values."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy.typing as npt

from rankdump import reader
from rankdump.cli.screen import say
from rankdump.cli.text import json_value, shape, size
from rankdump.reader import Entry, Statistics

_FIRST_VALUES = 8


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def show(file: Path, as_json: bool) -> int:
    """Show one tensor in facts and figures.

    FILE is an .npy or .npy.zst, of a dump tree or not.
    """
    entry = reader.locate(file)
    tensor = reader.load(entry) if entry else reader.load_file(file)
    facts = _facts(file, entry, tensor)
    figures = asdict(reader.statistics(tensor))
    first = tensor.reshape(-1)[:_FIRST_VALUES]
    if as_json:
        values = [json_value(value) for value in first.tolist()]
        named = {name: json_value(value) for name, value in figures.items()}
        click.echo(json.dumps(facts | {"statistics": named, "first_values": values}, indent=1))
        return 0
    say(f"{name + ':':<14}{value}" for name, value in _pairs(facts, tensor.shape))
    say(f"{name + ':':<14}{value}" for name, value in _figures(reader.statistics(tensor)))
    say([f"{'first values:':<14}{_values(first)}"])
    return 0


def _facts(file: Path, entry: Entry | None, tensor: npt.NDArray[Any]) -> dict[str, object]:
    known = reader.facts_of(entry, tensor)
    facts: dict[str, object] = {
        "file": str(file),
        "shape": tensor.shape,
        "dtype": known.dtype,
        "stored_dtype": str(tensor.dtype),
        "bytes_in": known.bytes_in,
        "file_bytes": file.stat().st_size,
    }
    if entry is None:
        return facts
    key, record = entry.key, entry.record
    facts |= {"rank": key.rank, "graph": key.graph}
    facts |= {"constant": True} if key.constant else {"iteration": key.iteration}
    facts |= {"op_type": entry.op_type, "op_name": entry.op_name}
    facts |= {"side": key.side.value, "slot": key.slot, "timestamp_us": key.timestamp_us}
    if record:
        facts |= {"argument": record.argument, "digest": record.digest}
    return facts


def _pairs(facts: dict[str, object], tensor_shape: tuple[int, ...]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for name, value in facts.items():
        if value == "":
            continue
        if name == "shape":
            text = shape(tensor_shape)
        elif isinstance(value, int) and "bytes" in name:
            text = f"{size(value)} ({value:,})"
        else:
            text = str(value)
        pairs.append((name.replace("_", " "), text))
    return pairs


def _figures(figures: Statistics) -> list[tuple[str, str]]:
    extremes = (("min", figures.minimum), ("max", figures.maximum), ("mean", figures.mean))
    counts = ("nans", figures.nans), ("infinities", figures.infinities), ("zeros", figures.zeros)
    return [
        ("elements", f"{figures.count:,}"),
        *((name, "-" if value is None else f"{value:.9g}") for name, value in extremes),
        ("l2norm", f"{figures.l2norm:.9g}"),
        *((name, f"{count:,}") for name, count in counts),
    ]


def _values(first: npt.NDArray[Any]) -> str:
    return ", ".join(map(str, first))
