"""`rankdump convert`: CANN's bin files as npy files, in the format that is asked for."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

import click

from rankdump import convert as room
from rankdump.cli.progress import counting
from rankdump.cli.screen import say
from rankdump.cli.text import counted, size
from rankdump.contract.errors import DamagedError
from rankdump.contract.formats import TARGETS
from rankdump.convert import Failure, Request, Summary

_SHAPE = re.compile(r"[1-9][0-9]{0,17}(,[1-9][0-9]{0,17})*")


def _shape_of(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> tuple[int, ...]:
    if text is None:
        return ()
    if not _SHAPE.fullmatch(text):
        raise click.BadParameter(
            f"{text!r} is not allowed; allowed: numbers above 0 joined by commas, as 1,3,224,224",
            context,
            parameter,
        )
    return tuple(map(int, text.split(",")))


@click.command()
@click.option(
    "-d",
    "--dump-file",
    "--dump_file",
    "source",
    required=True,
    type=click.Path(exists=True, path_type=Path),
    help="A bin file, packed or not, or a folder of them.",
)
@click.option(
    "-out",
    "--out",
    "--output",
    "out",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the converted files.",
)
@click.option("-o", "short_out", metavar="DIR", help="The same; beside -out, as --output-tensor N.")
@click.option("-f", "--format", "target", type=click.Choice(TARGETS), help="Format to convert to.")
@click.option("-t", "--type", "kind", type=click.Choice(["npy", "bin"]), default="npy")
@click.option(
    "-s", "--shape", callback=_shape_of, help="Original shape, instead of the header's; as 1,3,8,8."
)
@click.option(
    "-i", "--input-tensor", "--input_tensor", type=click.IntRange(min=0), help="Only this input."
)
@click.option(
    "--output-tensor", "--output_tensor", type=click.IntRange(min=0), help="Only this output."
)
@click.option("-v", type=click.Choice(["1", "2"]), expose_value=False, hidden=True)
@click.option("--recursive", is_flag=True, help="The folders below as well, as they are.")
@click.option("--jobs", type=click.IntRange(min=1), help="Most processes; all cores by default.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def convert(
    *,
    source: Path,
    out: Path | None,
    short_out: str | None,
    target: str | None,
    kind: str,
    shape: tuple[int, ...],
    input_tensor: int | None,
    output_tensor: int | None,
    recursive: bool,
    jobs: int | None,
    as_json: bool,
) -> int:
    """Convert CANN's bin files to npy files, or to their bare elements.

    Names are msaccucmp's. Without --format tensors keep the shape they had on the device. Exit
    code 1 when something could not be converted; the rest is.
    """
    out, output_tensor = _folder(out, short_out, output_tensor)
    side, index = _chosen(input_tensor, output_tensor)
    _check(source, target, shape, side)
    found = room.find(source, out, recursive=recursive)
    if not found.jobs and not found.problems:
        hidden = f", but {counted(len(found.hidden), 'hidden one')}" if found.hidden else ""
        raise DamagedError(f"{source}: there is no bin file here{hidden}")
    with _written(out):
        room.make_folder(out, out)
    request = Request(target or "", kind, shape, side, index)
    count = itertools.count(1)
    with counting("converting") as tell:
        summary = room.convert(
            found,
            out,
            request,
            jobs=jobs or _cores(),
            done=lambda outcome: tell(next(count), len(found.jobs)),
        )
    if as_json:
        click.echo(json.dumps(_as_json(out, summary, found.hidden), indent=1))
    else:
        _show(out, summary, found.hidden)
    with _written(out):
        room.record(out, summary, listing=source.is_dir())
    return 1 if summary.failed else 0


def _folder(
    out: Path | None, short: str | None, output_tensor: int | None
) -> tuple[Path, int | None]:
    """Return the folder and the output that are meant: msaccucmp's `-o` is a number, ours a folder.

    Where `-out` names the folder, `-o` is as in msaccucmp.
    """
    if out is not None and short is not None:
        if output_tensor is not None or not short.isdecimal():
            raise click.UsageError(f"-o {short}: beside --out it is the number of one output")
        return out, int(short)
    if out is None and short is None:
        raise click.UsageError("give a folder for the converted files: -out DIR, or -o DIR")
    return out or Path(short or ""), output_tensor


def _chosen(input_tensor: int | None, output_tensor: int | None) -> tuple[str, int]:
    if input_tensor is not None and output_tensor is not None:
        raise click.UsageError("--input-tensor and --output-tensor exclude each other")
    if input_tensor is not None:
        return "input", input_tensor
    return ("", 0) if output_tensor is None else ("output", output_tensor)


def _check(source: Path, target: str | None, shape: tuple[int, ...], side: str) -> None:
    if shape and not target:
        raise click.UsageError("--shape crops what --format converts: give a format as well")
    if source.is_dir() and (shape or side):
        raise click.UsageError(
            "--shape, --input-tensor and --output-tensor are for one file; "
            f"--dump-file is the folder {source}"
        )


def _cores() -> int:
    return len(os.sched_getaffinity(0))


@contextmanager
def _written(out: Path) -> Generator[None, None, None]:
    try:
        yield
    except OSError as error:
        where = error.filename or out
        raise click.ClickException(f"{where}: cannot be written: {error.strerror}") from None


def _show(out: Path, summary: Summary, hidden: Iterable[Path]) -> None:
    told = (
        *((path, "hidden, left alone") for path in hidden),
        *((warning.path, warning.reason) for warning in summary.warnings),
        *((path, "empty") for path in summary.empty),
        *((failure.path, failure.reason) for failure in summary.failures),
    )
    say((room.one_line(f"{path}: {reason}") for path, reason in told), err=True)
    counts = (len(summary.empty), "empty"), (len(summary.failed), "not or not wholly converted")
    parts = [
        f"{counted(summary.tensors, 'tensor')} of {counted(len(summary.outcomes), 'file')}",
        f"{size(summary.bytes_written)} written",
        *(f"{count:,} {what}" for count, what in counts if count),
    ]
    say([f"{out}: {', '.join(parts)}"])


def _as_json(out: Path, summary: Summary, hidden: Iterable[Path]) -> dict[str, object]:
    def listed(found: list[Failure]) -> list[dict[str, str]]:
        return [{"path": str(each.path), "reason": each.reason} for each in found]

    return {
        "out": str(out),
        "file_count": len(summary.outcomes),
        "tensor_count": summary.tensors,
        "bytes_written": summary.bytes_written,
        "empty": [str(path) for path in summary.empty],
        "hidden": [str(path) for path in hidden],
        "failed_count": len(summary.failed),
        "failures": listed(summary.failures),
        "warnings": listed(summary.warnings),
    }
