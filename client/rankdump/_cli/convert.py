"""Command `rankdump convert`: converts CANN's bin files to npy files in the requested tensor
format.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

import click

from rankdump._analysis.convert.conversion import (
    ConversionRequest,
    ConversionSummary,
    convert_files,
    write_result_lists,
)
from rankdump._analysis.convert.folders import (
    ConversionFailure,
    escape_line,
    find_bin_files,
    make_output_folder,
)
from rankdump._cli.output import print_json, print_lines, show_progress
from rankdump._core.units import format_bytes, format_count
from rankdump._layout.device_formats import TARGET_FORMATS
from rankdump.errors import CorruptedError

_SHAPE = re.compile(r"[1-9][0-9]{0,17}(,[1-9][0-9]{0,17})*")


def _parse_shape(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> tuple[int, ...]:
    if text is None:
        return ()
    if not _SHAPE.fullmatch(text):
        raise click.BadParameter(
            f"{text!r} is not allowed; allowed: numbers above 0 joined by commas, such as "
            "1,3,224,224",
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
    help="A bin file, compressed or not, or a folder of bin files.",
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
@click.option(
    "-o",
    "short_out",
    metavar="DIR|N",
    help="Same as -out DIR; if -out is given as well, same as --output-tensor N.",
)
@click.option(
    "-f", "--format", "target", type=click.Choice(TARGET_FORMATS), help="Format to convert to."
)
@click.option(
    "-t",
    "--type",
    "kind",
    type=click.Choice(["npy", "bin"]),
    default="npy",
    show_default=True,
    help="Type of the output files; bin files hold the elements alone.",
)
@click.option(
    "-s",
    "--shape",
    callback=_parse_shape,
    help="Original shape, in place of the one in the header, such as 1,3,8,8.",
)
@click.option(
    "-i",
    "--input-tensor",
    "--input_tensor",
    type=click.IntRange(min=0),
    help="Convert only this input.",
)
@click.option(
    "--output-tensor",
    "--output_tensor",
    type=click.IntRange(min=0),
    help="Convert only this output.",
)
@click.option("-v", type=click.Choice(["1", "2"]), expose_value=False, hidden=True)
@click.option(
    "--recursive",
    is_flag=True,
    help="Convert files in folders below as well, into folders of the same names.",
)
@click.option(
    "--jobs", type=click.IntRange(min=1), help="Maximum number of processes; default: all cores."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
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
    """Convert CANN's bin files to npy files.

    The output files have the names that msaccucmp gives them. Without --format, tensors keep the
    shape they had on the device. Exit code 1 when a tensor could not be converted; the others are
    converted nevertheless.
    """
    out, output_tensor = _choose_folder(out, short_out, output_tensor)
    side, index = _choose_tensor(input_tensor, output_tensor)
    _check_options(source, target, shape, side)
    found = find_bin_files(source, out, recursive=recursive)
    if not found.jobs and not found.problems:
        hidden = f"; {format_count(len(found.hidden), 'hidden file')} left out" * bool(found.hidden)
        raise CorruptedError(f"{source}: no bin file found{hidden}")
    with _report_write_errors(out):
        make_output_folder(out, out)
    request = ConversionRequest(target or "", kind, shape, side, index)
    count = itertools.count(1)
    with show_progress("converting") as report_progress:
        summary = convert_files(
            found,
            out,
            request,
            jobs=jobs or len(os.sched_getaffinity(0)),
            done=lambda outcome: report_progress(next(count), len(found.jobs)),
        )
    if as_json:
        print_json(_summary_as_json(out, summary, found.hidden))
    else:
        _print_summary(out, summary, found.hidden)
    with _report_write_errors(out):
        write_result_lists(out, summary, listing=source.is_dir())
    return 1 if summary.failed else 0


def _choose_folder(
    out: Path | None, short: str | None, output_tensor: int | None
) -> tuple[Path, int | None]:
    """Return the output folder and the number of the output; `-o` may mean either of them.

    Together with `-out`, `-o` is the number of an output, as in msaccucmp; without, it is the
    folder.
    """
    if out is not None and short is not None:
        if output_tensor is not None or not short.isdecimal():
            raise click.UsageError(f"-o {short}: with --out, -o takes the number of one output")
        return out, int(short)
    if out is None and short is None:
        raise click.UsageError(
            "a folder for the converted files is missing: give -out DIR or -o DIR"
        )
    return out or Path(short or ""), output_tensor


def _choose_tensor(input_tensor: int | None, output_tensor: int | None) -> tuple[str, int]:
    if input_tensor is not None and output_tensor is not None:
        raise click.UsageError("--input-tensor and --output-tensor cannot be combined")
    if input_tensor is not None:
        return "input", input_tensor
    return ("", 0) if output_tensor is None else ("output", output_tensor)


def _check_options(source: Path, target: str | None, shape: tuple[int, ...], side: str) -> None:
    if shape and not target:
        raise click.UsageError(
            "--shape needs --format: it is the shape that a converted tensor is cropped to"
        )
    if source.is_dir() and (shape or side):
        raise click.UsageError(
            "--shape, --input-tensor and --output-tensor are for one file; "
            f"--dump-file is the folder {source}"
        )


@contextmanager
def _report_write_errors(out: Path) -> Generator[None, None, None]:
    try:
        yield
    except OSError as error:
        where = error.filename or out
        raise click.ClickException(f"{where}: cannot be written: {error.strerror}") from None


def _print_summary(out: Path, summary: ConversionSummary, hidden: Iterable[Path]) -> None:
    problems = (
        *((path, "a hidden file, not converted") for path in hidden),
        *((warning.path, warning.reason) for warning in summary.warnings),
        *((path, "empty") for path in summary.empty),
        *((failure.path, failure.reason) for failure in summary.failures),
    )
    print_lines((escape_line(f"{path}: {reason}") for path, reason in problems), err=True)
    counts = (len(summary.empty), "empty"), (len(summary.failed), "not or only partly converted")
    parts = [
        f"{format_count(summary.tensors, 'tensor')} of "
        f"{format_count(len(summary.outcomes), 'file')}",
        f"{format_bytes(summary.bytes_written)} written",
        *(f"{count:,} {what}" for count, what in counts if count),
    ]
    print_lines([f"{out}: {', '.join(parts)}"])


def _summary_as_json(
    out: Path, summary: ConversionSummary, hidden: Iterable[Path]
) -> dict[str, object]:
    def listed(found: list[ConversionFailure]) -> list[dict[str, str]]:
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
