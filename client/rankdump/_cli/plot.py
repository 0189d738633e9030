"""Command `rankdump plot`: draws a chart of statistics of a tree, or of the elements of
a tensor.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rankdump._analysis.convert.folders import write_output
from rankdump._analysis.reader.query import Query
from rankdump._cli.command_group import explain_missing_modules
from rankdump._cli.options import TREE_PATH, add_query_options
from rankdump._cli.output import print_lines, shorten_text
from rankdump._cli.query import note_table_lag
from rankdump._core.record import sanitize_line
from rankdump._core.scope_names import format_scope_name
from rankdump.errors import ConfigError

if TYPE_CHECKING:
    from rankdump._analysis.plot.chart_picture import AnyChart
    from rankdump._analysis.plot.chart_rows import ChartRefusal, ChartRows

_COMMAND_LINE = "rankdump.command_line"
_FORMS = {".svg": "svg", ".png": "png", ".html": "html"}
_DEFAULT_STATISTIC = "l2norm"


class _QuotedCommand(click.Command):
    """Command that keeps the arguments with which it was called."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the arguments, then parse them."""
        ctx.meta[_COMMAND_LINE] = shlex.join(["rankdump", "plot", *args])
        return super().parse_args(ctx, args)


def _check_output(context: click.Context, parameter: click.Parameter, output: Path) -> Path:
    """Return the output path; BadParameter if its suffix is unknown or the file cannot
    be written.
    """
    if output.suffix.lower() not in _FORMS:
        raise click.BadParameter(
            f"{output}: the form {output.suffix or 'without a suffix'} is unknown; "
            f"allowed: {', '.join(_FORMS)}",
            context,
            parameter,
        )
    folder = output.absolute().parent
    if not folder.is_dir():
        raise click.BadParameter(f"{output}: its folder does not exist", context, parameter)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise click.BadParameter(f"{output}: its folder cannot be written to", context, parameter)
    return output


@click.command(cls=_QuotedCommand)
@click.argument("tree", type=TREE_PATH)
@add_query_options
@click.option("--slot", type=click.IntRange(min=0), help="Only inputs or outputs of this number.")
@click.option(
    "--kind",
    type=click.Choice(["lines", "heatmap", "histogram"]),
    default="lines",
    show_default=True,
    help="lines: a line for each tensor and rank; heatmap: a map of ranks and iterations with the "
    "extreme of all selected tensors; histogram: the distribution of the elements of one tensor.",
)
@click.option(
    "--stat",
    "statistic",
    metavar="NAME",
    help=f"The statistic: {_DEFAULT_STATISTIC} (default), max, min, avg, nan_count, ...",
)
@click.option(
    "--over",
    type=click.Choice(["iteration", "rank"]),
    help="Horizontal axis of lines; default: iteration.",
)
@click.option(
    "--scale",
    type=click.Choice(["auto", "log", "linear"]),
    default="auto",
    show_default=True,
    help="Scale of the values; auto is logarithmic where they spread over 3 decades.",
)
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_check_output,
    help="File to write: .svg, .png or .html.",
)
@click.pass_context
def plot(
    context: click.Context,
    *,
    tree: Path,
    query: Query,
    job_id: str,
    attempt: int | None,
    slot: int | None,
    kind: str,
    statistic: str | None,
    over: str | None,
    scale: str,
    output: Path,
) -> int:
    """Draw a chart of the tensors of a tree.

    The values are those of `rankdump query`; a histogram reads the tensor itself. The suffix of
    FILE decides its form. Exit code 1 when a manifest cannot be read; FILE is written then, too.
    """
    if over is not None and kind != "lines":
        raise click.UsageError(f"--over is for --kind lines, not for {kind}")
    if statistic is not None and kind == "histogram":
        raise click.UsageError("--stat is not for --kind histogram, which shows elements")
    # The backend `agg` opens no window, and a value that matplotlib does not know would make its
    # import fail.
    os.environ["MPLBACKEND"] = "agg"
    with explain_missing_modules("plot"):
        import rankdump._analysis.plot.chart_picture  # noqa: F401  # pyright: ignore[reportUnusedImport]
        from rankdump._analysis.plot.chart_rows import (
            STATISTICS,
            ChartRefusal,
            ChartRows,
            ChartSelection,
        )

    asked = statistic or _DEFAULT_STATISTIC
    if asked not in STATISTICS:
        raise ConfigError("command line", "--stat", asked, ", ".join(STATISTICS))
    rows = ChartRows(tree, ChartSelection(query, job_id, attempt, slot))
    chart = _find_chart(rows, kind, asked, over or "iteration")
    damages = dict.fromkeys((*rows.problems, *note_table_lag(tree)))
    print_lines(damages, err=True)
    if isinstance(chart, ChartRefusal):
        raise click.UsageError(chart.reason)
    content = _render_chart(chart, output, scale, context.meta[_COMMAND_LINE])
    try:
        write_output(output.parent, output.name, [content])
    except OSError as error:
        raise click.ClickException(f"{output}: cannot be written: {error.strerror}") from None
    print_lines([f"{output} written: {chart.title}", *chart.notes])
    return 1 if damages else 0


def _find_chart(rows: ChartRows, kind: str, statistic: str, over: str) -> AnyChart | ChartRefusal:
    """Return the data of the chart, or the reason why there is none."""
    from rankdump._analysis.plot import chart_data

    if kind == "lines":
        return chart_data.find_lines(rows, statistic, over, _spell_name)
    if kind == "heatmap":
        return chart_data.find_heat_map(rows, statistic, _spell_name)
    return chart_data.find_elements(rows, _spell_name)


def _spell_name(op_name: str) -> str:
    return format_scope_name(sanitize_line(op_name))


def _render_chart(chart: AnyChart, output: Path, scale: str, command: str) -> bytes:
    from rankdump._analysis.plot.chart_page import render_page
    from rankdump._analysis.plot.chart_picture import render_picture

    form = _FORMS[output.suffix.lower()]
    if form != "html":
        return render_picture(chart, form, shorten_text, scale=scale)
    picture = render_picture(chart, "svg", shorten_text, scale=scale)
    return render_page(chart, picture.decode(), command).encode(errors="replace")
