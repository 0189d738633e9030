"""Command `rankdump show`: shows shape, type, statistics and first values of the tensors in one
file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import click
import numpy.typing as npt

from rankdump import reader
from rankdump._analysis.reader.baseline_files import find_tensor_file
from rankdump._analysis.reader.tensor_loader import TORCH_SUFFIX, Facts, list_archived
from rankdump._analysis.reader.tensor_statistics import Statistics
from rankdump._analysis.reader.tree import Described, Entry
from rankdump._cli.output import format_layout, format_shape, print_json, print_lines, to_json_value
from rankdump._cli.tree_contents import describe_parallelism
from rankdump._core.tensor_layout import TensorLayout
from rankdump._core.units import format_bytes
from rankdump.errors import CorruptedError, UnsupportedError

_FIRST_VALUE_COUNT = 8
_NPY_SUFFIXES = (".npy", ".npy.zst")


@dataclass(frozen=True, slots=True)
class _ShownTensor:
    """One tensor of the shown file."""

    file: Path
    entry: Entry | None
    """Entry of the tree; None for a file outside of any tree."""
    member: str = ""
    """Member of a bin file; empty for a file with one tensor."""
    description: Described | None = None
    """Description in the header of a bin file; None for other files."""

    def load(self) -> npt.NDArray[Any]:
        """Return the array."""
        if self.entry is not None:
            return reader.load(self.entry)
        if self.member:
            return reader.load_member(self.file, self.member, None)
        return reader.load_file(self.file)

    def facts(self, tensor: npt.NDArray[Any] | None) -> Facts:
        """Return the facts about the tensor; those that nothing else tells are taken from the
        array.
        """
        if self.entry is not None and self.entry.record is not None:
            return reader.facts(self.entry)
        if self.description is not None:
            return Facts(
                self.description.dtype, self.description.shape, self.description.data_bytes
            )
        if tensor is None:
            return Facts("", (), 0)
        return reader.facts_of(self.entry, tensor)


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--tensor",
    "only",
    metavar="NAME",
    help="Only this tensor of a bin file, such as input.0, or of a pt file, such as fc.weight.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
def show(file: Path, only: str | None, as_json: bool) -> int:
    """Show the tensors in a file.

    Shape, type, statistics and first values are printed. FILE is an npy file or the bin file of an
    operator, compressed or not, or a pt file that torch.save wrote, in a dump tree or anywhere
    else. If a file was not written because its tensors equal those of the baseline, the file of the
    baseline is read. Exit code 1 when something in the file is damaged.
    """
    tensors = list(_find_tensors(file))
    if not tensors:
        raise click.BadParameter(f"File {str(file)!r} does not exist.", param_hint="'FILE'")
    names = [tensor.member for tensor in tensors]
    if only is not None:
        tensors = [tensor for tensor in tensors if tensor.member == only]
        if not tensors:
            known = ", ".join(filter(None, names)) or "none, the file is a single tensor"
            raise click.BadParameter(f"{only!r} is not a tensor of {file}; tensors: {known}")
    if as_json:
        objects, damage = _tensor_objects(tensors)
        one = len(objects) == 1 and (only is not None or not names[0])
        body = objects[0] if one else {"file": str(file), "tensors": objects}
        print_json(body)
        return 1 if damage else 0
    damage = False
    for at, tensor in enumerate(tensors):
        print_lines([""] if at else [])
        damage |= _print_tensor(tensor, alone=not tensor.member)
    return 1 if damage else 0


def _find_tensors(file: Path) -> Iterator[_ShownTensor]:
    entries = reader.locate(file)
    if not entries and not file.exists():
        return
    whole = not entries[0].member if entries else file.name.endswith(_NPY_SUFFIXES)
    if whole:
        entry = entries[0] if entries else None
        yield _ShownTensor(find_tensor_file(entry) if entry else file, entry)
        return
    if file.name.endswith(TORCH_SUFFIX):
        for member in list_archived(file):
            yield _ShownTensor(file, None, member)
        return
    described = reader.described(file) if file.is_file() else ()
    descriptions = {f"{side.value}.{slot}": facts for side, slot, facts in described}
    if entries:
        for entry in entries:
            description = descriptions.get(entry.member)
            yield _ShownTensor(find_tensor_file(entry), entry, entry.member, description)
    else:
        for member, facts in descriptions.items():
            yield _ShownTensor(file, None, member, facts)


def _load_array(tensor: _ShownTensor) -> tuple[npt.NDArray[Any] | None, str, bool]:
    """Return the array, or None with the reason, and whether the reason is damage."""
    try:
        return tensor.load(), "", False
    except UnsupportedError as error:
        return None, str(error), False
    except CorruptedError as error:
        if not tensor.member:  # the file has nothing else to show
            raise
        return None, str(error), True


def _tensor_objects(tensors: list[_ShownTensor]) -> tuple[list[dict[str, object]], bool]:
    found: list[dict[str, object]] = []
    any_damage = False
    for tensor in tensors:
        array, trouble, damage = _load_array(tensor)
        any_damage |= damage
        facts = _tensor_facts(tensor, array)
        if array is None:
            found.append(facts | {"trouble": trouble})
            continue
        statistics = asdict(reader.statistics(array))
        values = [to_json_value(value) for value in array.reshape(-1)[:_FIRST_VALUE_COUNT].tolist()]
        named = {name: to_json_value(value) for name, value in statistics.items()}
        found.append(facts | {"statistics": named, "first_values": values})
    return found, any_damage


def _print_tensor(tensor: _ShownTensor, *, alone: bool) -> bool:
    """Print one tensor; return whether it is damaged."""
    array, trouble, damage = _load_array(tensor)
    pairs = _fact_pairs(_tensor_facts(tensor, array))
    if not alone:
        pairs.insert(0, ("tensor", tensor.member))
    if array is None:
        pairs.append(("no values", trouble))
    else:
        pairs += _statistic_pairs(reader.statistics(array))
        pairs.append(("first values", ", ".join(map(str, array.reshape(-1)[:_FIRST_VALUE_COUNT]))))
    print_lines(f"{name + ':':<13} {value}" for name, value in pairs)
    return damage


def _tensor_facts(tensor: _ShownTensor, array: npt.NDArray[Any] | None) -> dict[str, object]:
    known, description, entry = tensor.facts(array), tensor.description, tensor.entry
    facts: dict[str, object] = {"file": str(tensor.file)}
    if tensor.member:
        facts["member"] = tensor.member
    facts |= {
        "shape": array.shape if array is not None else known.shape,
        "dtype": known.dtype,
        "stored_dtype": str(array.dtype) if array is not None else "",
        "bytes_in": known.bytes_in,
        "file_bytes": tensor.file.stat().st_size,
    }
    if description is not None:
        facts |= {"format": description.tensor_format, "original_shape": description.original_shape}
    if entry is None:
        return facts | ({"op_name": description.op_name} if description is not None else {})
    key, record = entry.key, entry.record
    facts |= {"rank": key.rank, "graph": key.graph}
    facts |= {"constant": True} if key.constant else {"iteration": key.iteration}
    facts |= {"op_type": entry.op_type, "op_name": entry.op_name}
    facts |= {"side": key.side.value, "slot": key.slot, "timestamp_us": key.timestamp_us}
    if record:
        facts |= {"argument": record.argument, "digest": record.digest}
        facts |= describe_parallelism(record)
    return facts


def _fact_pairs(facts: dict[str, object]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for name, value in facts.items():
        if name == "member" or (value in ("", ()) and name != "shape"):
            continue
        if name in ("shape", "original_shape"):
            text = format_shape(cast("tuple[int, ...]", value))
        elif isinstance(value, TensorLayout):
            pairs += format_layout(value)
            continue
        elif isinstance(value, int) and "bytes" in name:
            text = f"{format_bytes(value)} ({value:,})"
        else:
            text = str(value)
        pairs.append((name.replace("_", " "), text))
    return pairs


def _statistic_pairs(statistics: Statistics) -> list[tuple[str, str]]:
    extremes = (("min", statistics.minimum), ("max", statistics.maximum), ("mean", statistics.mean))
    counts = (
        ("nans", statistics.nans),
        ("infinities", statistics.infinities),
        ("zeros", statistics.zeros),
    )
    return [
        ("elements", f"{statistics.count:,}"),
        *((name, "-" if value is None else f"{value:.9g}") for name, value in extremes),
        ("l2norm", f"{statistics.l2norm:.9g}"),
        *((name, f"{count:,}") for name, count in counts),
    ]
