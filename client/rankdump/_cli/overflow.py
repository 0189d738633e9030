"""Command `rankdump overflow`: lists operators that overflowed, with the unit and the status."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import click

from rankdump._analysis.overflow import (
    OverflowHit,
    OverflowRecord,
    OverflowSearch,
    search_overflows,
)
from rankdump._binfile.overflow_record import OverflowSection
from rankdump._cli.output import TableColumn, number_columns, print_json, print_lines, print_rows
from rankdump._core.units import format_count
from rankdump.errors import CorruptedError

_COLUMNS = (
    TableColumn("time stamp"),
    TableColumn("unit"),
    *number_columns("task", "stream", "status"),
    TableColumn("operator", is_flexible=True),
)
_NO_VALUE = "-"


@click.command()
@click.argument("path", type=click.Path(exists=True, path_type=Path), default=".")
@click.option(
    "--write",
    "target",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write each record to DIR as JSON, as msaccucmp does.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
def overflow(path: Path, target: Path | None, as_json: bool) -> int:
    """List the overflows that CANN recorded.

    PATH is an Opdebug file, or a folder that is searched with all folders below it. Exit code 1
    when there is an overflow, when a file is damaged, or when the folder contains no file at all.
    """
    found = search_overflows(path)
    if not (found.file_count or found.problems):
        raise CorruptedError(f"{path}: the folder contains no file: nothing was searched")
    root = path if path.is_dir() else path.parent
    written = _write_records(found, root, target) if target else 0
    if as_json:
        print_json(_search_as_json(found, path))
    else:
        _print_records(found, path)
        if target:
            print_lines([f"{format_count(written, 'JSON file')} written to {target}"])
    return int(bool(found.problems) or any(record.hits for record in found.records))


def _write_records(found: OverflowSearch, root: Path, target: Path) -> int:
    """Write the binary records as JSON files, in folders named as in the source; return the number
    of files.
    """
    binary = [record for record in found.records if not record.from_json]
    for record in binary:
        name = f"{record.path.name.removesuffix('.zst')}.output.{record.slot}.json"
        folder = target / record.path.parent.relative_to(root)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(record.content.to_json())
        except OSError as error:
            raise click.ClickException(
                f"{folder / name}: cannot be written: {error.strerror}"
            ) from None
    return len(binary)


def _print_records(found: OverflowSearch, path: Path) -> None:
    for at, (folder, records) in enumerate(groupby(found.records, lambda r: r.path.parent)):
        print_lines([*([""] if at else []), str(folder)])
        rows = [row for record in records for row in _record_rows(record)]
        print_rows(_COLUMNS, rows)
    if found.records:
        hit = sum(bool(record.hits) for record in found.records)
        total = format_count(len(found.records), "overflow record")
        print_lines(["", *_status_meanings(found), f"{path}: {total}, {hit} with an overflow"])
    elif not found.problems:
        print_lines([f"{path}: no Opdebug file found"])
    print_lines(found.problems, err=True)


def _record_rows(record: OverflowRecord) -> Iterator[list[str]]:
    stamp = _NO_VALUE if record.timestamp_us is None else str(record.timestamp_us)
    if not record.hits:
        units = [section.unit for section in record.content.sections]
        unit = units[0] if len(units) == 1 else "all"
        yield [stamp, unit, _NO_VALUE, _NO_VALUE, "0x0", "no overflow"]
    for hit in record.hits:
        ids = (str(hit.section.get_field(name)) for name in ("task_id", "stream_id"))
        operators = ", ".join(f"{op_type} {op_name}" for op_type, op_name in hit.operators)
        status = _format_status(hit.section)
        yield [stamp, hit.section.unit, *ids, status, operators or _NO_VALUE]


def _format_status(section: OverflowSection) -> str:
    """Return the status words, without trailing zeros."""
    last = max(at for at, word in enumerate(section.status) if word)
    return ",".join(hex(word) for word in section.status[: last + 1])


def _status_meanings(found: OverflowSearch) -> list[str]:
    """Return one sentence for each different status about the meaning of its bits."""
    sections = [hit.section for record in found.records for hit in record.hits]
    return list(dict.fromkeys(f"{_format_status(s)}: {', '.join(s.meaning)}" for s in sections))


def _search_as_json(found: OverflowSearch, path: Path) -> dict[str, object]:
    return {
        "path": str(path),
        "records": [
            {
                "path": str(record.path),
                "slot": record.slot,
                "timestamp_us": record.timestamp_us,
                "overflows": [_hit_as_json(hit) for hit in record.hits],
                "content": json.loads(record.content.to_json()),
            }
            for record in found.records
        ],
        "problems": found.problems,
    }


def _hit_as_json(hit: OverflowHit) -> dict[str, object]:
    section = hit.section
    return {
        "unit": section.unit,
        **{name: section.get_field(name) for name in ("task_id", "stream_id")},
        "status": section.status,
        "meaning": section.meaning,
        "operators": [
            {
                "op_type": op_type,
                "op_name": op_name,
                "files": [
                    on_disk
                    for name, on_disk in hit.files
                    if (name.op_type, name.op_name) == (op_type, op_name)
                ],
            }
            for op_type, op_name in hit.operators
        ],
    }
