"""Command `rankdump find-source`: shows the operators that a line of the script created, with the
files of their tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

import click

from rankdump import reader
from rankdump._analysis.reader.query import Query
from rankdump._analysis.reader.source_lines import OperatorNames, Origin, Search
from rankdump._analysis.reader.table_rows import iterate_named
from rankdump._analysis.reader.tree import Entry, Figures, Tree
from rankdump._cli.options import DUMP_PATH, add_query_options
from rankdump._cli.output import list_first, print_json, print_lines
from rankdump._cli.tree_contents import read_tree
from rankdump._core.number_ranges import ranges
from rankdump._core.units import format_count
from rankdump.errors import CorruptedError

_DEFAULT_FILES = 6
_MAX_NAMES_SHOWN = 5


@click.command("find-source")
@click.argument("tree", type=DUMP_PATH)
@click.argument("line")
@add_query_options
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    help="Maximum number of files listed for an operator; 0 lists all.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
def find_source(
    *,
    tree: Path,
    line: str,
    query: Query,
    job_id: str,
    attempt: int | None,
    limit: int | None,
    as_json: bool,
) -> int:
    """Show which operators came from a line of the script.

    LINE is FILE:NUMBER, where the end of the path is enough, or a part of the line's text. The
    operators are found in the graphs of the tree (graphs/*.ir) and listed with their files.
    """
    found = read_tree(tree, query, job_id, attempt)
    every = reader.graph_files(tree, found.ranks, found.tool)
    graphs = [g for g in every if query.keeps_place(g.rank, g.graph, None, dated=False)]
    if not graphs:
        raise CorruptedError(_explain_no_graph(found, len(every)))
    search = Search(line, partial(_find_tensors, found, query))
    origins = [
        origin
        for origin in search.origins(graphs)
        if origin.tensors or query.keeps_operator(origin.op_type, origin.op_name)
    ]
    if as_json:
        body = [_origin_as_json(origin) for origin in origins]
        problems = [*search.problems, *found.problems]
        head = {"root": str(tree), "line": line, "operator_count": len(body)}
        print_json(head | {"operators": body, "problems": problems})
    else:
        _print_origins(
            origins, search, _DEFAULT_FILES if limit is None else limit or None, query, job_id
        )
        print_lines((*search.problems, *found.problems), err=True)
    return 1 if search.problems or found.problems else 0


def _find_tensors(tree: Tree, query: Query, names: OperatorNames) -> Iterator[Entry | Figures]:
    """Yield the selected tensors whose operator may have one of these names."""
    return iterate_named(tree, query.keeps, queries=[query.places], keeps_name=names.may_be)


def _explain_no_graph(tree: Tree, count: int) -> str:
    if count:
        return f"{tree.root}: none of its {format_count(count, 'graph')} matches --rank and --graph"
    expected = "rank_N/graphs/ms_output_trace_code_graph_M.ir or rankN/torch_api_dump_stack.json"
    return f"{tree.root}: the tree has no graph: expected {expected}"


def _print_origins(
    origins: Sequence[Origin], search: Search, limit: int | None, query: Query, job_id: str
) -> None:
    if not origins:
        print_lines([_explain_no_origin(search)])
        return
    dumped = [origin for origin in origins if origin.tensors]
    names = sorted({origin.op_name for origin in origins if not origin.tensors})
    by_place = sorted(dumped, key=lambda origin: (origin.frame.file, origin.frame.line))
    places = groupby(by_place, key=lambda origin: (origin.frame.file, origin.frame.line))
    for at, ((file, line), group) in enumerate(places):
        by_name: dict[str, list[Origin]] = {}
        for origin in group:
            by_name.setdefault(origin.op_name, []).append(origin)
        code = next(iter(by_name.values()))[0].frame.code
        print_lines([*([""] if at else []), f"{file}:{line}  {code}".rstrip()])
        for same in by_name.values():
            _print_operator(same, limit)
    if names:
        # The operator may have files in another iteration, on another side or in another job.
        narrowed = query.iterations is not None or query.side is not None or job_id
        which = "a matching file" if narrowed else "a file"
        listed = list_first(names, _MAX_NAMES_SHOWN)
        print_lines(["", f"{format_count(len(names), 'operator')} without {which}: {listed}"])


def _print_operator(same: list[Origin], limit: int | None) -> None:
    tensors = [tensor for origin in same for tensor in origin.tensors]
    keys = [tensor.key for tensor in tensors]
    where = f"rank {ranges(k.rank for k in keys)}, iteration {ranges(k.iteration for k in keys)}"
    print_lines(["", f"  {same[0].op_type}  {same[0].op_name}"])
    if not all(origin.exact for origin in same):
        carried = sorted({tensor.op_name for tensor in tensors})
        print_lines([f"    other numbers in the names of the files: {', '.join(carried)}"])
    print_lines([f"    {format_count(len(tensors), 'tensor')}: {where}"])
    paths = list(dict.fromkeys(tensor.relative for tensor in tensors))
    for path in paths[:limit]:
        click.echo(f"    {path}")
    left = len(paths) - len(paths[:limit])
    if left:
        print_lines(
            [f"    ... {format_count(left, 'more file')}: --rank selects, --limit 0 lists all"]
        )


def _explain_no_origin(search: Search) -> str:
    named = list_first(sorted({Path(file).name for file in search.files}), _MAX_NAMES_SHOWN)
    asked = "LINE is FILE:NUMBER or a part of the line's text"
    return f"no operator came from this line; the graphs name {named or 'no source file'}; {asked}"


def _origin_as_json(origin: Origin) -> dict[str, object]:
    frame = origin.frame
    return {
        "rank": origin.rank,
        "graph": origin.graph,
        "op_type": origin.op_type,
        "op_name": origin.op_name,
        "file": frame.file,
        "line": frame.line,
        "last_line": frame.last_line,
        "code": frame.code,
        "exact": origin.exact,
        "tensors": [
            {
                "path": tensor.relative,
                "iteration": tensor.key.iteration,
                "side": tensor.key.side.value,
                "slot": tensor.key.slot,
            }
            for tensor in origin.tensors
        ],
    }
