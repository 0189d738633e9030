"""`rankdump find-source`: which operators came from a line of the script, and where they are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import click

from rankdump import reader
from rankdump.cli.listing import tree_at
from rankdump.cli.options import TREE, selecting
from rankdump.cli.screen import say
from rankdump.cli.text import counted
from rankdump.contract.errors import DamagedError
from rankdump.reader import Origin, Query, Search, Tree, ranges

_LIMIT = 6
_MOST_NAMED = 5


@click.command("find-source")
@click.argument("tree", type=TREE)
@click.argument("line")
@selecting
@click.option("--limit", type=click.IntRange(min=0), help="Most files of an operator; 0: all.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def find_source(
    *, tree: Path, line: str, query: Query, job_id: str, limit: int | None, as_json: bool
) -> int:
    """Show which operators came from a line of the script.

    LINE is FILE:NUMBER, the end of a path being enough, or a piece of the line's text. Answered
    from the graphs of the tree (graphs/*.ir), with the files of each operator.
    """
    found = tree_at(tree, query, job_id)
    every = reader.graph_files(tree, found.ranks)
    graphs = [g for g in every if query.keeps_place(g.rank, g.graph, None, dated=False)]
    if not graphs:
        raise DamagedError(_no_graph(found, len(every)))
    search = Search(line, reader.named(found, query.keeps))
    origins = [
        origin
        for origin in search.origins(graphs)
        if origin.tensors or query.keeps_operator(origin.op_type, origin.op_name)
    ]
    if as_json:
        body = [_as_json(origin) for origin in origins]
        problems = [*search.problems, *found.problems]
        head = {"root": str(tree), "line": line, "operator_count": len(body)}
        click.echo(json.dumps(head | {"operators": body, "problems": problems}, indent=1))
    else:
        _show(origins, search, _LIMIT if limit is None else limit or None, query, job_id)
        say((*search.problems, *found.problems), err=True)
    return 1 if search.problems or found.problems else 0


def _no_graph(tree: Tree, count: int) -> str:
    if count:
        return f"{tree.root}: none of its {counted(count, 'graph')} has that rank and number"
    expected = "rank_N/graphs/ms_output_trace_code_graph_M.ir or rankN/torch_api_dump_stack.json"
    return f"{tree.root}: no graph in it: expected {expected}"


def _show(
    origins: Sequence[Origin], search: Search, limit: int | None, query: Query, job_id: str
) -> None:
    if not origins:
        say([_nothing(search)])
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
        say([*([""] if at else []), f"{file}:{line}  {code}".rstrip()])
        for same in by_name.values():
            _show_operator(same, limit)
    if names:
        more = ", ..." * (len(names) > _MOST_NAMED)
        listed = ", ".join(names[:_MOST_NAMED]) + more
        # Of another iteration, side or job it may have some.
        narrowed = query.iterations is not None or query.side is not None or job_id
        which = "such a file" if narrowed else "a file"
        say(["", f"{counted(len(names), 'operator')} without {which}: {listed}"])


def _show_operator(same: list[Origin], limit: int | None) -> None:
    tensors = [tensor for origin in same for tensor in origin.tensors]
    keys = [tensor.key for tensor in tensors]
    where = f"rank {ranges(k.rank for k in keys)}, iteration {ranges(k.iteration for k in keys)}"
    say(["", f"  {same[0].op_type}  {same[0].op_name}"])
    if not all(origin.exact for origin in same):
        carried = sorted({tensor.op_name for tensor in tensors})
        say([f"    numbered otherwise in the files: {', '.join(carried)}"])
    say([f"    {counted(len(tensors), 'tensor')}: {where}"])
    paths = list(dict.fromkeys(tensor.relative for tensor in tensors))
    for path in paths[:limit]:
        click.echo(f"    {path}")
    left = len(paths) - len(paths[:limit])
    if left:
        say([f"    ... {counted(left, 'more file')}: --rank selects, --limit 0 lists all"])


def _nothing(search: Search) -> str:
    files = sorted({Path(file).name for file in search.files})
    named = ", ".join(files[:_MOST_NAMED]) + ", ..." * (len(files) > _MOST_NAMED)
    asked = "ask for FILE:NUMBER or a piece of the line's text"
    return f"no operator came from there; the graphs name {named or 'no source file'}; {asked}"


def _as_json(origin: Origin) -> dict[str, object]:
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
