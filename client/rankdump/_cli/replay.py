"""Command `rankdump replay`: computes a dumped call of torch's API again in float64, and tells
whether its dumped result is within the rounding error of its type.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from rankdump import reader
from rankdump._cli.options import DUMP_PATH
from rankdump._cli.output import format_shape, print_json, print_lines, to_json_value
from rankdump._core.number_ranges import ranges
from rankdump._core.units import format_count

if TYPE_CHECKING:
    from rankdump._analysis.replay import CallReplay, ReplayedOutput

_NUMBER = click.IntRange(min=0)


@click.command()
@click.argument("tree", type=DUMP_PATH)
@click.argument("call")
@click.option("--rank", type=_NUMBER, help="Only the call of this rank.")
@click.option("--iteration", type=_NUMBER, help="Only the call in this iteration.")
@click.option(
    "--tf32", is_flag=True, help="Operands of float32 products may have been rounded to TF32."
)
@click.option(
    "--reduced-precision",
    is_flag=True,
    help="Partial sums may have been rounded to the type of the result, as torch allows cuBLAS for "
    "16 bits.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
def replay(
    *,
    tree: Path,
    call: str,
    rank: int | None,
    iteration: int | None,
    tf32: bool,
    reduced_precision: bool,
    as_json: bool,
) -> int:
    """Compute a dumped call again in float64, and judge its result.

    CALL is the name of a forward call in an API dump or a dump of msprobe, such as
    Functional_linear_0_forward. Its inputs and arguments are those in the dump; it is computed on
    this host's processor, and needs torch. A result is within rounding when each element is no
    farther from its value in float64 than a correct kernel may be, whatever the order of its sums.
    Exit code 1 when a result is not, and for calls that cannot be replayed.
    """
    try:
        from rankdump._analysis.replay import replay_calls

        dump = reader.open(tree)
        dump = dump if rank is None else dump.where(rank=rank)
        dump = dump if iteration is None else dump.where(iteration=iteration)
        replays = list(replay_calls(dump, call, tf32=tf32, reduced_precision=reduced_precision))
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise click.ClickException("replay needs torch, which is not installed here") from None
    if as_json:
        print_json({"calls": [_describe_replay(each) for each in replays]})
    else:
        for each in replays:
            print_lines(_format_replay(each))
        print_lines(["", *_format_totals(replays)])
    return 0 if all(each.is_within for each in replays) else 1


def _format_replay(each: CallReplay) -> list[str]:
    word = "within rounding" if each.is_within else "not within rounding"
    head = f"{each.name}, rank {each.rank}, iteration {each.iteration}: {word}"
    return [head, *(f"  {_format_output(output)}" for output in each.outputs)]


def _format_output(output: ReplayedOutput) -> str:
    verdict = output.verdict
    name = f"{output.place} {output.dtype} {format_shape(output.shape)}"
    if not verdict.count:
        return f"{name}: no elements"
    place = ",".join(map(str, verdict.place))
    values = (
        f"{verdict.dumped:.9g} was dumped, {verdict.exact:.9g} in float64, "
        f"bound {verdict.bound:.3g}"
    )
    beyond = (
        f"; {verdict.beyond:,} of {verdict.count:,} elements are beyond" if verdict.beyond else ""
    )
    return f"{name}: largest error {verdict.share:.3g} of its bound, at ({place}): {values}{beyond}"


def _format_totals(replays: list[CallReplay]) -> list[str]:
    bad = [each for each in replays if not each.is_within]
    notes = list(dict.fromkeys(note for each in replays for note in each.notes))
    total = f"{format_count(len(replays), 'call')} replayed"
    if not bad:
        return [*notes, f"{total}: all results are within the rounding of their types"]
    ranks = ranges(each.rank for each in bad)
    good = sorted({each.rank for each in replays} - {each.rank for each in bad})
    others = f"; within it on rank {ranges(good)}" if good else ""
    return [*notes, f"{total}: not within the rounding of its type on rank {ranks}{others}"]


def _describe_replay(each: CallReplay) -> dict[str, object]:
    return {
        "name": each.name,
        "rank": each.rank,
        "iteration": each.iteration,
        "within": each.is_within,
        "outputs": [_describe_output(output) for output in each.outputs],
        "notes": each.notes,
    }


def _describe_output(output: ReplayedOutput) -> dict[str, object]:
    verdict = output.verdict
    numbers = {"share": verdict.share, "dumped": verdict.dumped, "exact": verdict.exact}
    return {
        "output": output.place,
        "dtype": output.dtype,
        "shape": output.shape,
        "count": verdict.count,
        "beyond": verdict.beyond,
        "at": verdict.place,
        "bound": to_json_value(verdict.bound),
        **{name: to_json_value(value) for name, value in numbers.items()},
    }
